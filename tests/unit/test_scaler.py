"""How many CPU hosts a run requests from an autoscaler, against a simulated job."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from stoker.config.places import CpuHostsConfig
from stoker.serve.scaling import Scaler
from stoker.sizing.model import ClusterShape, Workload, cheapest_count


@dataclass
class Job:
    """A simulated job: training could take `rate` records/s, and a record costs a chain worker `cost_s`."""

    scaler: Scaler
    rate: float
    cost_s: float
    own: int = 2
    each: int = 4
    start_s: float = 12.0
    """How long a host takes to join."""
    now: float = 0.0
    hosts: int = 0
    coming: list[float] = field(default_factory=list)
    requests: list[tuple[float, int]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def run(self, seconds: float, ended: bool = False) -> None:
        """Let time pass; the autoscaler gives and takes what is requested."""
        for _ in range(int(seconds)):
            self.now += 1
            produced = (self.own + self.each * self.hosts) / self.cost_s
            trained = min(self.rate, produced)
            self.scaler.made(trained, trained * self.cost_s)
            if trained:
                self.scaler.stepped(trained, 1.0, 1.0 - trained / self.rate)
            if reason := self.scaler.look(self.now, self.own, [self.each] * self.hosts, ended):
                self.requests.append((self.now, self.scaler.count))
                self.reasons.append(reason)
            self._join_and_leave()

    def _join_and_leave(self) -> None:
        self.hosts += sum(at <= self.now for at in self.coming)
        self.coming = [at for at in self.coming if at > self.now]
        missing = self.scaler.count - self.hosts - len(self.coming)
        self.coming += [self.now + self.start_s] * missing
        self.hosts = min(self.hosts, self.scaler.count)


def model(job: Job, options: CpuHostsConfig) -> int:
    target = 1 - options.target_wait_pct / 100
    shape = ClusterShape(
        gpu_host_cpus=max(job.own, 1e-6),
        cpu_host_cpus=job.each,
        gpu_host_usd_per_hour=options.rest_usd_per_hour or 1.0,
        cpu_host_usd_per_hour=options.usd_per_hour or 1e-9,
    )
    return cheapest_count(Workload(job.cost_s, job.rate * target), shape, options.max)


@pytest.mark.parametrize("rate", [50, 130, 300, 700])
def test_the_request_reaches_the_models_number_within_a_minute(rate: float) -> None:
    options = CpuHostsConfig(max=16)
    job = Job(Scaler(options), rate, cost_s=0.05)
    job.run(60)
    assert job.hosts == model(job, options)
    assert len(job.requests) <= 2, "one host first, then the rest"
    job.run(600)
    assert len(job.requests) <= 2, "a job that does not change changes no request"


def test_a_run_that_waits_for_nothing_requests_nothing() -> None:
    job = Job(Scaler(CpuHostsConfig(max=8)), rate=39, cost_s=0.05)
    job.run(600)
    assert job.requests == []


def test_a_need_that_changes_twice_changes_the_request_twice() -> None:
    options = CpuHostsConfig(max=16)
    job = Job(Scaler(options), rate=300, cost_s=0.05)
    job.run(200)
    many = job.hosts
    job.rate = 60
    job.run(200)
    few = job.hosts
    assert few == model(job, options) < many
    job.rate = 300
    job.run(200)
    assert job.hosts == many
    assert [count for _, count in job.requests] == [1, many, few, many]


def test_hosts_leave_only_after_a_minute_without_need() -> None:
    job = Job(Scaler(CpuHostsConfig(max=16)), rate=300, cost_s=0.05)
    job.run(100)
    job.cost_s = 0.001
    job.run(job.scaler.options.release_after_s - 5)
    assert job.hosts > 0
    job.run(30)
    assert job.hosts == 0


def test_noise_around_a_whole_number_of_hosts_does_not_flap() -> None:
    job = Job(Scaler(CpuHostsConfig(max=16)), rate=200, cost_s=0.05)  # needs exactly 2 hosts
    for turn in range(300):
        job.rate = 200 * (1.02 if turn % 2 else 0.98)
        job.run(3)
    assert all(after > before for (_, before), (_, after) in pairwise(job.requests)), job.requests


def test_a_host_that_costs_more_than_it_saves_is_not_requested() -> None:
    cheap = CpuHostsConfig(max=8, usd_per_hour=0.1, rest_usd_per_hour=1.0)
    dear = CpuHostsConfig(max=8, usd_per_hour=9.0, rest_usd_per_hour=1.0)
    found = {}
    for options in (cheap, dear):
        job = Job(Scaler(options), rate=300, cost_s=0.05)
        job.run(120)
        found[options.usd_per_hour] = job.hosts
        assert job.hosts == model(job, options)
    assert found[0.1] == 3 and found[9.0] == 0
    job = Job(Scaler(cheap), rate=300, cost_s=0.05)
    job.run(120)
    assert "per 1M records" in job.reasons[-1]


def test_the_bounds_hold() -> None:
    job = Job(Scaler(CpuHostsConfig(min=1, max=2)), rate=1000, cost_s=0.05)
    assert job.scaler.count == 1, "requested from the start"
    job.run(120)
    assert job.hosts == 2
    job.rate = 1
    job.run(300)
    assert job.hosts == 1


def test_without_any_other_cpu_the_first_host_is_requested_at_once() -> None:
    job = Job(Scaler(CpuHostsConfig(max=8)), rate=100, cost_s=0.05, own=0)
    job.run(1)
    assert job.requests == [(1, 1)] and job.reasons == ["no other host can preprocess"]
    job.run(60)
    assert job.hosts == 2
    job.rate = 10
    job.run(200)
    assert job.hosts == 1, "the last one stays"


def test_hosts_leave_when_everything_is_preprocessed() -> None:
    job = Job(Scaler(CpuHostsConfig(max=16)), rate=300, cost_s=0.05)
    job.run(100)
    job.run(1, ended=True)
    assert job.scaler.count == 0 and job.reasons[-1] == "all records of the run are preprocessed"


def test_hosts_that_never_join_are_reported() -> None:
    job = Job(Scaler(CpuHostsConfig(max=8)), rate=300, cost_s=0.05, start_s=1e9)
    job.run(250)
    assert not job.scaler.missing(job.now)
    job.run(100)
    assert job.scaler.missing(job.now) == 1
    assert not job.scaler.missing(job.now), "once per deadline"
