"""How many CPU hosts a run requests from an autoscaler, against a simulated job, and which hosts leave."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from stoker.config.places import CpuHostsConfig
from stoker.events.kinds import Event, Note, StepLogged
from stoker.serve.accounting import ChainCosts
from stoker.serve.pool import ChainHost
from stoker.serve.scaling import EXPIRES_S, RENEW_S, Elastic, Scaler
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
            self.scaler.blocks.add(trained, trained * self.cost_s)
            if trained:
                self.scaler.steps.add(trained, 1.0, 1.0 - trained / self.rate)
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


@pytest.mark.parametrize("rate", [39, 50, 130, 300, 700])
def test_the_request_reaches_the_models_number_within_a_minute(rate: float) -> None:
    options = CpuHostsConfig(max=16)
    job = Job(Scaler(options), rate, cost_s=0.05)
    job.run(60)
    assert job.hosts == model(job, options)
    assert len(job.requests) <= 2, "one host first, then the rest"
    job.run(600)
    assert len(job.requests) <= 2, "a job that does not change changes no request"
    assert bool(job.requests) == (rate > 40), "a run that waits for nothing requests nothing"


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


TRAINS = ChainHost("g", 2, trains=True, name="gpu-1")
A, B, C = (ChainHost(node, 4, name=f"cpu-{node}", scaled=True) for node in "abc")


class Requests:
    """In place of Ray's autoscaler."""

    def __init__(self, resource: str) -> None:
        self.sent: list[tuple[int, float]] = []

    def send(self, count: int, expires_s: float) -> None:
        self.sent.append((count, expires_s))


@pytest.fixture(autouse=True)
def no_autoscaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.serve.scaling.HostRequest", Requests)


class Cluster:
    def __init__(self, count: int = 0, most: int = 9) -> None:
        self.events, self.costs = list[Event](), {"train": ChainCosts(), "val": ChainCosts()}
        self.elastic: Any = Elastic(self.events.append, self.costs, CpuHostsConfig(max=most))
        self.scaler = self.elastic.scaler
        if self.scaler:
            self.scaler.count = count

    def told(self) -> list[tuple[str, dict[str, Any]]]:
        return [(event.event, event.values()) for event in self.events]

    def staying(self, *hosts: ChainHost, draining: str = "", bound: str = "") -> list[str]:
        return [host.node for host in self.elastic.split([*hosts], {*draining}, 0.0, False, bound)]


def test_the_hosts_that_joined_last_leave_first_and_come_back_if_needed() -> None:
    cluster = Cluster(count=3)
    assert cluster.staying(TRAINS, B) == ["g", "b"]
    assert cluster.staying(TRAINS, A, B, C) == ["g", "a", "b", "c"]
    cluster.scaler.count = 1
    assert cluster.staying(TRAINS, A, B, C) == ["g", "b"]
    assert cluster.elastic.closing == {"a", "c"}
    assert cluster.told() == [("closing", {"nodes": ["a", "c"]})]
    cluster.scaler.count = 2
    assert cluster.staying(TRAINS, A, B, C) == ["g", "a", "b"]


def test_a_host_that_reads_a_stream_is_let_go_when_that_has_ended() -> None:
    """Another process would have to read the stream again, which not all streams allow."""
    cluster = Cluster(count=2)
    cluster.staying(TRAINS, A, B)
    cluster.scaler.count = 0
    assert cluster.staying(TRAINS, A, B, bound="b") == ["g", "b"]
    assert cluster.staying(TRAINS, A, B) == ["g"]
    assert cluster.staying(TRAINS, B, draining="b", bound="b") == ["g"], "others take it away"


def test_a_host_that_has_left_is_not_taken_for_a_lost_one() -> None:
    cluster = Cluster(count=2)
    cluster.staying(TRAINS, A, B)
    cluster.scaler.count = 1
    cluster.staying(TRAINS, A, B)
    cluster.staying(TRAINS, A)
    assert cluster.told() == [("closing", {"nodes": ["b"]})], "still named, and told once"
    cluster.scaler.count = 0
    cluster.staying(TRAINS, A)
    assert cluster.told()[-1] == ("closing", {"nodes": ["b", "a"]})


def test_a_host_that_the_cluster_takes_away_gets_no_work_whoever_added_it() -> None:
    for cluster in (Cluster(count=2), Cluster(most=0)):
        for _ in range(2):
            assert cluster.staying(TRAINS, A, B, draining="a") == ["g", "b"]
        notes = [event.text for event in cluster.events if isinstance(event, Note)]
        assert notes == ["host cpu-a is about to be taken away: it gets no more work"]
    assert cluster.staying(A, draining="a") == ["a"], "the only one works to the end"
    assert cluster.elastic.closing == set(), "and keeps its chain workers"


def step(number: int, epoch: int, samples: int, elapsed_s: float, late: float = 0.0) -> StepLogged:
    terms = {"wait_production": late, "compute": 100.0 - late}
    return StepLogged(
        step=number, epoch=epoch, epoch_samples=samples, elapsed_s=elapsed_s, terms_ms=terms,
        loss=1.0, lr=0.1, wait_s=0.0,
    )  # fmt: skip


def test_training_and_blocks_are_measured_once_and_without_the_start() -> None:
    cluster = Cluster()
    for each in (
        step(1, 0, 16, 40.0, 99.0),  # waits for processes to start
        step(11, 0, 176, 41.0, 50.0),
        step(16, 1, 48, 0.5),  # a new pass counts from its own beginning
        step(11, 1, 16, 0.1, 90.0),  # started again from a checkpoint
        step(21, 1, 176, 1.1, 10.0),
    ):
        cluster.elastic.stepped(each)
    assert cluster.scaler.steps.sums() == pytest.approx((368, 2.5, 0.6))
    for split, records, seconds in (("train", 100, 4.0), ("val", 50, 1.0), ("val", 50, 1.0)):
        cluster.costs[split].records, cluster.costs[split].seconds = records, seconds
        cluster.staying(TRAINS)
    assert cluster.scaler.blocks.sums() == (150, 5.0, 0.0)


def test_a_request_is_renewed_before_it_expires_and_changed_at_once() -> None:
    cluster = Cluster(count=2)
    for now in range(int(3 * RENEW_S)):
        cluster.elastic.split([TRAINS], set(), float(now), False)
        cluster.elastic.send(float(now))
    assert cluster.elastic._request.sent == [(2, EXPIRES_S)] * 3 and RENEW_S < EXPIRES_S / 2
    cluster.elastic.split([TRAINS], set(), 30.5, True)
    cluster.elastic.send(30.5)
    assert cluster.elastic._request.sent[-1] == (0, EXPIRES_S)
    reason = "all records of the run are preprocessed"
    assert cluster.told() == [("cpu_hosts", {"count": 0, "reason": reason})]
