"""Anywhere: candidate clusters for a job, with speed, cost and bottleneck. Pure.

table = evaluate(measured, wanted, price_list())
best = table[0]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stoker.events import prices
from stoker.events.prices import Machine, PriceList
from stoker.sizing.model import (
    Prediction,
    Shape,
    Term,
    Workload,
    cheapest_count,
    knee,
    predict,
    usd_per_million_samples,
)

EFFICIENCY = 0.95
"""η: share of the CPU hosts' time that reaches the chain (benchmarks/sleeping.py)."""
ALIKE = 0.01
"""Costs that differ by less count as equal; then the faster cluster is preferred."""
MAX_CPU_HOSTS = 32
BITS = 8e-9
"""Divide Gb/s by this to get bytes/s."""
FLOW_GBPS = 5.0
"""Limit of one TCP connection between two instances."""


@dataclass(frozen=True)
class Measured:
    """Anywhere: a job's costs per sample, with their uncertainty and origin."""

    cpu_s: float
    """c, on the measuring machine."""
    cpu_spread: float
    """± share of `cpu_s`."""
    bytes_per_sample: float
    receive_s: float
    other_s: float
    serial_s: float
    receive_spread: float
    gpu_samples_per_s: dict[str, float]
    """G by GPU name (A10G); an entry under "" holds for every GPU."""
    gpu_spread: float = 0.0
    stages: list[dict[str, Any]] = field(default_factory=list)
    samples: int | None = None
    """Samples of the whole job: records × epochs; None if unknown."""
    notes: list[str] = field(default_factory=list)
    """Assumptions, one sentence each."""

    def work(self, gpu_name: str, side: int = 0, speed: float = 1.0) -> Workload | None:
        """Anywhere: the model's input for a GPU; None if this GPU's rate is unknown.

        Args:
            gpu_name: as in the table of machines.
            side: 0 the measured values; -1 every figure at its slow end, +1 at its fast end.
            speed: of the instances' vCPUs, relative to a core of the measuring machine.
        """
        rate = self.gpu_samples_per_s.get(gpu_name, self.gpu_samples_per_s.get(""))
        if rate is None:
            return None
        # Factors rather than differences: a spread of 1 or more would make a cost or a rate zero or negative.
        receiving = (1 + self.receive_spread) ** -side / speed
        return Workload(
            cpu_s=self.cpu_s * (1 + self.cpu_spread) ** -side / speed,
            gpu_samples_per_s=rate * (1 + self.gpu_spread) ** side,
            receive_s=self.receive_s * receiving,
            other_s=self.other_s * receiving,
            serial_s=self.serial_s * receiving,
            bytes_per_sample=self.bytes_per_sample,
        )


@dataclass(frozen=True)
class Candidate:
    """Anywhere: the assessment of one cluster."""

    gpu_type: str
    gpu_hosts: int
    cpu_type: str | None
    cpu_hosts: int
    samples_per_s: float
    low: float
    high: float
    binds: Term
    remote_share: float
    usd_per_hour: float
    usd_per_million_samples: float
    hours: float | None
    """Of the whole job; None if its length is unknown."""
    usd: float | None

    @property
    def hosts(self) -> str:
        """`1 × ml.g5.xlarge + 2 × ml.c5.xlarge`."""
        own = f"{self.gpu_hosts} × {self.gpu_type}"
        return f"{own} + {self.cpu_hosts} × {self.cpu_type}" if self.cpu_hosts else own


@dataclass(frozen=True)
class Wanted:
    """Anywhere: the clusters to consider."""

    gpu_types: tuple[str, ...]
    cpu_types: tuple[str, ...]
    gpu_hosts: int = 1
    max_cpu_hosts: int = MAX_CPU_HOSTS
    configured: tuple[str, str | None, int] | None = None
    """GPU type, CPU type and count in the configuration; always in the table."""
    speed: float = 1.0
    """Of the instances' vCPUs, relative to a core of the measuring machine."""


def evaluate(measured: Measured, wanted: Wanted, known: PriceList) -> list[Candidate]:
    """Anywhere: each GPU type alone, and with the best number of each CPU type; cheapest first.

    Bigger hosts with the same GPUs appear without CPU hosts, as the other way to add CPUs to a GPU.
    """
    found: dict[tuple[str, str | None, int], Candidate] = {}

    def add(gpu: Machine, cpu: Machine | None, count: int) -> None:
        candidate = judge(measured, wanted, known, gpu, cpu if count else None, count)
        if candidate is not None:
            found[candidate.gpu_type, candidate.cpu_type, candidate.cpu_hosts] = candidate

    for gpu in machines(wanted.gpu_types):
        add(gpu, None, 0)
        for cpu in machines(wanted.cpu_types):
            for count in counts_worth_a_look(measured, wanted, known, gpu, cpu):
                add(gpu, cpu, count)
    for name in wanted.gpu_types:
        for larger in larger_hosts(name):
            add(larger, None, 0)
    return sorted(found.values(), key=lambda one: (one.usd_per_million_samples, -one.samples_per_s))


def recommend(table: list[Candidate]) -> Candidate:
    """Anywhere: the cheapest per sample; among equals the fastest, then the one with fewest CPU hosts."""
    best = table[0].usd_per_million_samples
    alike = [one for one in table if one.usd_per_million_samples <= best * (1 + ALIKE)]
    return max(alike, key=lambda one: (round(one.samples_per_s, 3), -one.cpu_hosts))


def judge(
    measured: Measured, wanted: Wanted, known: PriceList, gpu: Machine, cpu: Machine | None, count: int
) -> Candidate | None:
    """Anywhere: assess one cluster; None if its GPU's rate or a price is unknown."""
    shape = shape_of(wanted, known, gpu, cpu, count)
    if shape is None:
        return None
    works = [measured.work(gpu.gpu_name, side, wanted.speed) for side in (-1, 0, 1)]
    if works[1] is None:
        return None
    low, middle, high = (predict(work, shape) for work in works if work is not None)
    cost = usd_per_million_samples(middle, shape)
    return Candidate(
        gpu_type=gpu.type,
        gpu_hosts=wanted.gpu_hosts,
        cpu_type=cpu.type if cpu else None,
        cpu_hosts=count,
        samples_per_s=middle.samples_per_s,
        low=low.samples_per_s,
        high=high.samples_per_s,
        binds=middle.binds,
        remote_share=middle.remote_share,
        usd_per_hour=shape.usd_per_hour,
        usd_per_million_samples=cost,
        hours=_hours(measured.samples, middle),
        usd=cost * measured.samples / 1e6 if measured.samples else None,
    )


def shape_of(wanted: Wanted, known: PriceList, gpu: Machine, cpu: Machine | None, count: int) -> Shape | None:
    """Anywhere: the model's cluster; None if a price is unknown."""
    gpu_price = known.usd_per_hour(gpu.type)
    cpu_price = known.usd_per_hour(cpu.type) if cpu else 0.0
    if gpu_price is None or cpu_price is None:
        return None
    return Shape(
        gpu_host_cpus=gpu.vcpus,
        cpu_host_cpus=cpu.vcpus if cpu else 0,
        cpu_hosts=count,
        gpu_hosts=wanted.gpu_hosts,
        gpus_per_host=max(gpu.gpus, 1),
        # CPUs that hosts/raynode.py does not declare to Ray: one per GPU, but never the last one.
        reserved_cpus=min(gpu.gpus, gpu.vcpus - 1),
        gpu_host_bytes_per_s=gpu.baseline_gbps / BITS,
        cpu_host_bytes_per_s=min(cpu.baseline_gbps, FLOW_GBPS) / BITS if cpu else 0.0,
        efficiency=EFFICIENCY,
        gpu_host_efficiency=EFFICIENCY,
        gpu_host_usd_per_hour=gpu_price,
        cpu_host_usd_per_hour=cpu_price,
    )


def counts_worth_a_look(
    measured: Measured, wanted: Wanted, known: PriceList, gpu: Machine, cpu: Machine
) -> list[int]:
    """Anywhere: the cheapest number of CPU hosts, the knee, one host, and the configured number."""
    work = measured.work(gpu.gpu_name, 0, wanted.speed)
    shape = shape_of(wanted, known, gpu, cpu, 1)
    if work is None or shape is None:
        return []
    counts = {1, cheapest_count(work, shape, wanted.max_cpu_hosts)}
    full = knee(work, shape)
    if 0 < full <= wanted.max_cpu_hosts:
        counts |= {int(full), -int(-full // 1)}
    if wanted.configured and wanted.configured[:2] == (gpu.type, cpu.type):
        counts.add(wanted.configured[2])
    return sorted(count for count in counts if 0 < count <= max(wanted.max_cpu_hosts, 1))


def machines(names: Iterable[str]) -> list[Machine]:
    """Anywhere: the table's entries of these types; unknown types are skipped."""
    return [found for found in map(prices.machine, names) if found is not None]


def larger_hosts(name: str) -> list[Machine]:
    """Anywhere: hosts with the same number and type of GPUs and more vCPUs."""
    own = prices.machine(name)
    if own is None:
        return []
    same = [m for m in prices.MACHINES.values() if (m.gpu_name, m.gpus) == (own.gpu_name, own.gpus)]
    return sorted((m for m in same if m.vcpus > own.vcpus), key=lambda m: m.vcpus)


def _hours(samples: int | None, prediction: Prediction) -> float | None:
    return samples / prediction.samples_per_s / 3600 if samples else None
