"""Candidate clusters for a job with speed, cost and bottleneck, and a recommendation in plain words. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stoker.events import prices
from stoker.events.prices import Machine, PriceList
from stoker.sizing.model import (
    ClusterShape,
    Term,
    Workload,
    cheapest_count,
    predict,
    usd_per_million_samples,
)

EFFICIENCY = 0.95
"""η: share of the CPU hosts' time that reaches the chain (benchmarks/sleeping.py)."""
RECEIVE_S, FEED_S = 0.00002, 0.0003
"""κ and h of a sample of `RECEIVE_BYTES`: docs/performance.md. One machine cannot measure them."""
RECEIVE_BYTES = 150_528
ALIKE = 0.01
"""Costs that differ by less count as equal; then the faster cluster is preferred."""
MAX_CPU_HOSTS = 32
BITS = 8e-9
"""Divide Gb/s by this to get bytes/s."""
FLOW_GBPS = 5.0
"""Limit of one TCP connection between two instances."""
PARTS: dict[Term, str] = {
    "gpu": "GPU",
    "cpu": "CPUs",
    "network": "network",
    "gpu_host_cpu": "GPU host's CPUs",
    "receiver": "receiving thread",
}
"""What limits a cluster."""
UNKNOWN = (
    "no recommendation: how fast a GPU trains this model is unknown, and this machine has no such GPU."
    " Give its samples per second, --gpu-samples-per-s 400 (or A10G=400), or a run on it: `size --from RUN`"
)


@dataclass(frozen=True)
class Measured:
    cpu_s: float
    """c, on the measuring machine."""
    bytes_per_sample: float
    gpu_samples_per_s: dict[str, float]
    """G by GPU name (A10G); an entry under "" holds for every GPU."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """As `chain` in summary.json."""
    samples: int | None = None
    """Samples of the whole job: records × epochs; None if unknown."""
    notes: list[str] = field(default_factory=list)

    def rate(self, gpu_name: str) -> float | None:
        return self.gpu_samples_per_s.get(gpu_name, self.gpu_samples_per_s.get(""))

    def work(self, rate: float, speed: float) -> Workload:
        """The model's input for a GPU of this rate.

        `speed`: of the instances' vCPUs, relative to a core of the measuring machine.
        """
        receiving = self.bytes_per_sample / RECEIVE_BYTES / speed
        return Workload(
            cpu_s=self.cpu_s / speed,
            gpu_samples_per_s=rate,
            receive_s=RECEIVE_S * receiving,
            other_s=FEED_S * receiving,
            serial_s=FEED_S / 3 * receiving,
            bytes_per_sample=self.bytes_per_sample,
        )

    def assumptions(self) -> list[str]:
        ms = 1000 * (RECEIVE_S + FEED_S) * self.bytes_per_sample / RECEIVE_BYTES
        return [
            f"receiving: assumed {ms:.2f} ms of CPU per sample ± 50 %; it is not measured",
            f"{100 * EFFICIENCY:.0f} % of the CPUs' time reaches the chain (benchmarks/sleeping.py)",
        ]


@dataclass(frozen=True)
class Candidate:
    gpu_type: str
    gpu_hosts: int
    cpu_type: str | None
    cpu_hosts: int
    samples_per_s: float
    binds: Term
    remote_share: float
    usd_per_hour: float
    usd_per_million_samples: float
    hours: float | None
    usd: float | None

    @property
    def hosts(self) -> str:
        own = f"{self.gpu_hosts} × {self.gpu_type}"
        return f"{own} + {self.cpu_hosts} × {self.cpu_type}" if self.cpu_hosts else own


@dataclass(frozen=True)
class Wanted:
    gpu_types: tuple[str, ...]
    cpu_types: tuple[str, ...]
    gpu_hosts: int = 1
    max_cpu_hosts: int = MAX_CPU_HOSTS
    configured: tuple[str, str | None, int] | None = None
    """GPU type, CPU type and count in the configuration."""
    speed: float = 1.0
    """Speed of the instances' vCPUs, relative to a core of the measuring machine."""
    train_workers: int | None = None
    """`train.workers`; None: each GPU trains."""
    gpu_hosts_preprocess: bool = True
    """Whether `data.preprocess_on` allows it."""


@dataclass(frozen=True)
class Advice:
    measured: Measured
    wanted: Wanted
    table: list[Candidate]
    best: Candidate | None
    """None if no GPU's rate is known; the table is empty then."""
    lines: list[str]
    notes: list[str]

    def is_configured(self, one: Candidate) -> bool:
        count = one.cpu_hosts
        return self.wanted.configured == (one.gpu_type, one.cpu_type if count else None, count)


def advise(measured: Measured, wanted: Wanted, known: PriceList) -> Advice:
    notes = [known.label, *measured.notes, *measured.assumptions()]
    rates = {gpu: measured.rate(gpu.gpu_name) for gpu in machines(wanted.gpu_types)}
    table = [
        row
        for gpu, rate in rates.items()
        if rate
        for row in grid(measured, wanted, known, gpu, rate)
    ]
    if not table:
        return Advice(measured, wanted, [], None, [UNKNOWN], notes)
    if unrated := [gpu.type for gpu, rate in rates.items() if not rate]:
        notes.append(f"left out, because the rate of the GPU is unknown: {', '.join(unrated)}")
    table.sort(key=lambda row: (row.usd_per_million_samples, -row.samples_per_s))
    # The cheapest per sample; among equals the fastest, then the one with fewest CPU hosts.
    most = table[0].usd_per_million_samples * (1 + ALIKE)
    alike = [row for row in table if row.usd_per_million_samples <= most]
    best = max(alike, key=lambda row: (round(row.samples_per_s, 3), -row.cpu_hosts))
    return Advice(measured, wanted, table, best, [_reason(table, best)], notes)


def grid(
    measured: Measured, wanted: Wanted, known: PriceList, gpu: Machine, rate: float
) -> list[Candidate]:
    """A GPU type alone, and with 1, the best and the configured number of each CPU type."""
    work = measured.work(rate, wanted.speed)
    clusters: list[tuple[Machine | None, int]] = [(None, 0)] if wanted.gpu_hosts_preprocess else []
    for cpu in machines(wanted.cpu_types):
        shape = shape_of(wanted, known, gpu, cpu, 1)
        counts = {1, cheapest_count(work, shape, wanted.max_cpu_hosts)}
        if wanted.configured and wanted.configured[:2] == (gpu.type, cpu.type):
            counts.add(wanted.configured[2])
        clusters += [(cpu, n) for n in sorted(counts) if 0 < n <= wanted.max_cpu_hosts]
    found = []
    for kind, count in clusters:
        shape = shape_of(wanted, known, gpu, kind, count)
        prediction, samples = predict(work, shape), measured.samples
        cost = usd_per_million_samples(prediction, shape)
        found.append(
            Candidate(
                gpu_type=gpu.type,
                gpu_hosts=wanted.gpu_hosts,
                cpu_type=kind.type if kind else None,
                cpu_hosts=count,
                samples_per_s=prediction.samples_per_s,
                binds=prediction.binds,
                remote_share=prediction.remote_share,
                usd_per_hour=shape.usd_per_hour,
                usd_per_million_samples=cost,
                hours=samples / prediction.samples_per_s / 3600 if samples else None,
                usd=cost * samples / 1e6 if samples else None,
            )
        )
    return found


def shape_of(
    wanted: Wanted, known: PriceList, gpu: Machine, cpu: Machine | None, count: int
) -> ClusterShape:
    workers = min(max(gpu.gpus, 1) * wanted.gpu_hosts, wanted.train_workers or math.inf)
    return ClusterShape(
        gpu_host_cpus=gpu.vcpus,
        cpu_host_cpus=cpu.vcpus if cpu else 0,
        cpu_hosts=count,
        gpu_hosts=wanted.gpu_hosts,
        gpus_per_host=workers / wanted.gpu_hosts,
        # CPUs that hosts/raynode.py does not declare to Ray: one per GPU, but never the last one.
        reserved_cpus=min(gpu.gpus, gpu.vcpus - 1) if wanted.gpu_hosts_preprocess else gpu.vcpus,
        gpu_host_bytes_per_s=gpu.baseline_gbps / BITS,
        cpu_host_bytes_per_s=min(cpu.baseline_gbps, FLOW_GBPS) / BITS if cpu else 0.0,
        efficiency=EFFICIENCY,
        gpu_host_efficiency=EFFICIENCY,
        gpu_host_usd_per_hour=known.usd_per_hour(gpu.type) or 0.0,
        cpu_host_usd_per_hour=known.usd_per_hour(cpu.type) or 0.0 if cpu else 0.0,
    )


def machines(names: Iterable[str]) -> list[Machine]:
    found = map(prices.machine, dict.fromkeys(names))
    return [machine for machine in found if machine is not None]


def table_name(device: str) -> str | None:
    """The price table's name of a whole GPU, from the driver's, such as NVIDIA A100-SXM4-40GB."""
    names = {machine.gpu_name for machine in prices.MACHINES.values() if machine.gpu_name}
    words = device.replace("-", " ").split() if "MIG" not in device else []  # a slice of a GPU
    for name in sorted(names, key=len, reverse=True):
        model, _, memory = name.partition("-")
        if model in words and (not memory or any(word.startswith(memory) for word in words)):
            return name
    return None


def _reason(table: list[Candidate], best: Candidate) -> str:
    """Compare the recommendation with the same GPU host alone, or with the best that has CPU hosts."""
    head = f"recommended: {best.hosts}, ${best.usd_per_million_samples:.2f} per 1M samples"
    limit = f"limited by the {PARTS[best.binds]}"
    like = [row for row in table if row.gpu_type == best.gpu_type]
    other = next((row for row in like if bool(row.cpu_hosts) != bool(best.cpu_hosts)), None)
    if other is None:
        why = (
            "the GPU hosts do not preprocess" if best.cpu_hosts else "no CPU hosts were considered"
        )
        return f"{head}: {why}; {limit}"
    alone, both = (other, best) if best.cpu_hosts else (best, other)
    more = both.usd_per_million_samples / max(alone.usd_per_million_samples, 1e-9) - 1
    amount = f"{100 * abs(more):.0f} % {'more' if more > 0 else 'less'} than"
    cost = amount if abs(more) >= ALIKE else "as much as"
    faster = f"{both.samples_per_s / alone.samples_per_s:.1f} times as fast"
    if best.cpu_hosts:
        return f"{head}: {cost} {alone.hosts} alone and {faster}; then {limit}"
    return f"{head}: no CPU hosts: {limit}; {both.hosts} costs {cost} that and is {faster}"
