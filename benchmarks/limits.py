"""Laptop: samples/s and bottleneck of twelve cluster shapes, predicted by the limits model and measured.

Chain and training sleep, so the machine can emulate more CPUs than it has; nodes, tasks, blocks, coordinator
and feed are real. Network-bound shapes run as jobs on rehearsed hosts with links limited by a token bucket,
all others in this process (benchmarks/sleeping.py). The bottleneck follows from the waits of the steps, by
the same rule as the verdict of a run.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import sleeping
from benchmarks.harness import Measure
from benchmarks.jobs import run_job
from benchmarks.nodes import ray_nodes
from benchmarks.sleeping import CPU_HOST_USD, GPU_HOST_USD, HEAD_CPUS, HOST_CPUS, MAX_HOSTS, Case
from stoker.events.bottleneck import INPUT_BOUND
from stoker.sizing import model
from stoker.train.device import WAITS

WITHIN = 0.10
COST_WITHIN = 0.05
WAITS_FOR: Mapping[str, model.Term] = {
    "wait_production": "cpu",
    "wait_transfer": "network",
    "wait_collate": "receiver",
    "host_to_device": "receiver",
}
PAYLOAD = 1448 / 1514
"""Payload bytes of a full TCP segment over bytes of its Ethernet frame, which the token bucket counts."""
PASS_S = 8.0
"""Target duration of an epoch of a rehearsed job."""


@dataclass(frozen=True)
class Linked:
    """A rehearsed shape with every host behind a link of `link_mbps`."""

    name: str
    hosts: int
    link_mbps: float
    cpu_s: float
    bytes_per_sample: int
    host_cpus: int = 4
    block_records: int = 32

    @property
    def work(self) -> model.Workload:
        return model.Workload(self.cpu_s, 1e6, bytes_per_sample=self.bytes_per_sample)

    @property
    def shape(self) -> model.ClusterShape:
        link = self.link_mbps * 1e6 / 8 * PAYLOAD
        return model.ClusterShape(
            gpu_host_cpus=self.host_cpus,
            reserved_cpus=self.host_cpus,  # data.preprocess_on: [cpu]
            cpu_host_cpus=self.host_cpus,
            cpu_hosts=self.hosts,
            gpu_host_bytes_per_s=link,
            cpu_host_bytes_per_s=link,
            gpu_host_usd_per_hour=GPU_HOST_USD,
            cpu_host_usd_per_hour=CPU_HOST_USD,
        )


SWEEP = [Case(f"{n} CPU hosts", n, cpu_s=0.05, gpu_samples_per_s=250) for n in range(MAX_HOSTS + 1)]
"""CPU-bound first, GPU-bound at the end; all numbers of hosts are measured, so the best one is known."""
RECEIVER = [
    Case("2 CPU hosts, slow receiver", 2, cpu_s=0.03, serial_s=0.005),
    Case("5 CPU hosts, slow receiver", 5, cpu_s=0.04, serial_s=0.004),
]
NETWORK = [
    Linked("1 CPU host, 100 Mb/s, 151 kB", 1, 100, cpu_s=0.02, bytes_per_sample=150_528),
    Linked("2 CPU hosts, 200 Mb/s, 151 kB", 2, 200, cpu_s=0.02, bytes_per_sample=150_528),
    Linked(
        "2 CPU hosts, 300 Mb/s, 602 kB",
        2,
        300,
        cpu_s=0.04,
        bytes_per_sample=602_112,
        block_records=16,
    ),
]


@dataclass(frozen=True)
class Row:
    """The prediction and measurement of a shape."""

    case: Case | Linked
    samples_per_s: float
    binds: model.Term

    @property
    def predicted(self) -> model.Prediction:
        return model.predict(self.case.work, self.case.shape)

    @property
    def ratio(self) -> float:
        return self.samples_per_s / self.predicted.samples_per_s

    @property
    def right(self) -> bool:
        """Whether the ratio is within tolerance and the predicted bottleneck binds."""
        return abs(self.ratio - 1) <= WITHIN and self.binds == self.predicted.binds

    def line(self) -> str:
        """A row of the table in docs/sizing.md."""
        found = self.predicted
        return (
            f"| {self.case.name} | {found.samples_per_s:.1f} | {self.samples_per_s:.1f} | {self.ratio:.3f}"
            f" | {found.binds} | {self.binds} |"
        )


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    print(
        "| Shape | predicted | measured | ratio | binds: model | binds: run |\n|---|---|---|---|---|---|"
    )
    asleep = list(_said(slept()))
    return measures([*asleep, *_said(map(rehearsed, NETWORK))])


def _said(rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        print(row.line(), flush=True)
        yield row


def slept() -> Iterator[Row]:
    """The shapes that run in this process, adding one host at a time."""
    with ray_nodes(HEAD_CPUS) as nodes:
        for count in range(MAX_HOSTS + 1):
            if count:
                nodes.add("cpu", HOST_CPUS)
            sleeping.wake_all_slots(HEAD_CPUS + count * HOST_CPUS)
            for case in [*SWEEP, *RECEIVER]:
                if case.hosts == count:
                    found = sleeping.measure(case)
                    terms = {name: found.times[f"{name}_s"] for name in (*WAITS, "compute")}
                    yield Row(case, found.samples_per_s, binding(terms))


def rehearsed(case: Linked) -> Row:
    """Run a job on rehearsed hosts through the command line.

    Raises:
        RuntimeError: the job failed.
    """
    expected = model.predict(case.work, case.shape).samples_per_s
    blocks = max(round(expected * PASS_S / case.block_records), 2 * case.host_cpus * case.hosts)
    job = {
        "name": "limits",
        "recipe": "asleep:Asleep",
        "params": {
            "records": blocks * case.block_records,
            "cpu_s": case.cpu_s,
            "bytes_per_sample": case.bytes_per_sample,
        },
        "data": {"preprocess_on": ["cpu"], "shuffle": False, "block_records": case.block_records},
        # Of three passes the first one warms up and does not count.
        "train": {"epochs": 3, "batch_size": case.block_records // 2},
        "cluster": {"object_store_mb": 192},
        "tracking": {"tensorboard": False},
        "rehearsal": {
            "hosts": f"gpu=1,cpu={case.hosts}",
            "entry": "container",
            "cpus": case.host_cpus,
            "link_mbps": case.link_mbps,
            "shm_mb": 256,
            "timeout_s": 240,
        },
    }
    with tempfile.TemporaryDirectory() as name:
        run_dir = run_job(Path(name), job, "--on", "rehearsal", timeout_s=300)
        speed = json.loads((run_dir / "summary.json").read_text())["speed"]
    return Row(case, speed["steady_samples_per_s"], binding(speed["step_terms_ms"]))


def binding(terms: Mapping[str, float]) -> model.Term:
    """The term that steps waited for most, or the GPU if they hardly waited.

    Args:
        terms: time by STEP_TERMS, in any unit.
    """
    waits: dict[model.Term, float] = {}
    for name, term in WAITS_FOR.items():
        waits[term] = waits.get(term, 0.0) + terms[name]
    if sum(waits.values()) < INPUT_BOUND * sum(terms.values()):
        return "gpu"
    return max(waits, key=lambda term: waits[term])


def measures(rows: Iterable[Row]) -> list[Measure]:
    """Each shape against the model, and the cost of the model's number of hosts against the best one."""
    found = list(rows)
    table = [
        Measure(
            f"limits, {row.case.name}",
            row.samples_per_s,
            row.predicted.samples_per_s,
            f"model: {row.predicted.binds} binds, run: {row.binds}",
            row.ratio,
            1 - WITHIN,
            row.right,
            "samples/s",
        )
        for row in found
    ]
    swept = [row for row in found if row.case in SWEEP]
    cost = {
        row.case.hosts: row.case.shape.usd_per_hour / row.samples_per_s / 3600 * 1e6
        for row in swept
    }
    chosen = model.cheapest_count(SWEEP[0].work, SWEEP[0].shape, MAX_HOSTS)
    best = min(cost, key=lambda count: cost[count])
    ratio = cost[best] / cost[chosen]
    name = f"limits, cost of the chosen n = {chosen}, best measured n = {best}"
    met = ratio >= 1 - COST_WITHIN
    return [
        *table,
        Measure(
            name,
            cost[chosen],
            cost[best],
            "brute force",
            ratio,
            1 - COST_WITHIN,
            met,
            "$/1M samples",
        ),
    ]
