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
RECEIVE_SPREAD = 0.5
RUN_SPREAD = 0.1
"""Uncertainty of figures from a run: throughput of the same job varies this much between runs."""
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
AROUND = ("pack", "task")
"""Work outside the chain's own stages, which no recipe can make cheaper."""
DEAR = 0.3
"""From this share of the chain's CPU time on, a stage is mentioned."""
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
    gpu_spread: float = 0.0
    """± share of these rates."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """As `chain` in summary.json."""
    samples: int | None = None
    """Samples of the whole job: records × epochs; None if unknown."""
    most_per_gpu: int | None = None
    """Samples after which `train.max_steps` ends the job, per GPU."""
    notes: list[str] = field(default_factory=list)

    def rate(self, gpu_name: str) -> float | None:
        return self.gpu_samples_per_s.get(gpu_name, self.gpu_samples_per_s.get(""))

    def work(self, rate: float, side: int, speed: float) -> Workload:
        """The model's input for a GPU of this rate.

        `side`: 0 the measured values; -1 every figure at its slow end, +1 at its fast end. `speed`: of the
        instances' vCPUs, relative to a core of the measuring machine.
        """
        # Factors rather than differences: a spread of 1 or more would make a cost or a rate zero or negative.
        receiving = self.bytes_per_sample / RECEIVE_BYTES * (1 + RECEIVE_SPREAD) ** -side / speed
        return Workload(
            cpu_s=self.cpu_s * (1 + RUN_SPREAD) ** -side / speed,
            gpu_samples_per_s=rate * (1 + self.gpu_spread) ** side,
            receive_s=RECEIVE_S * receiving,
            other_s=FEED_S * receiving,
            serial_s=FEED_S / 3 * receiving,
            bytes_per_sample=self.bytes_per_sample,
        )

    def assumptions(self) -> list[str]:
        ms = 1000 * (RECEIVE_S + FEED_S) * self.bytes_per_sample / RECEIVE_BYTES
        spread = f"± {100 * RECEIVE_SPREAD:.0f} %"
        return [
            f"receiving: assumed {ms:.2f} ms of CPU per sample {spread}; it is not measured",
            f"{100 * EFFICIENCY:.0f} % of the CPUs' time reaches the chain (benchmarks/sleeping.py)",
        ]


@dataclass(frozen=True)
class Candidate:
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
    usd: float | None

    @property
    def hosts(self) -> str:
        own = f"{self.gpu_hosts} × {self.gpu_type}"
        return f"{own} + {self.cpu_hosts} × {self.cpu_type}" if self.cpu_hosts else own

    def dearer_than(self, other: Candidate) -> float:
        """In percent, per sample."""
        if not other.usd_per_million_samples:
            return math.inf if self.usd_per_million_samples else 0.0
        return 100 * (self.usd_per_million_samples / other.usd_per_million_samples - 1)


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
    prices: PriceList
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
    hints = stage_hints(measured.stages)
    if not table:
        return Advice(measured, wanted, known, [], None, [UNKNOWN, *hints], notes)
    if unrated := [gpu.type for gpu, rate in rates.items() if not rate]:
        notes.append(f"left out, because the rate of the GPU is unknown: {', '.join(unrated)}")
    table.sort(key=lambda row: (row.usd_per_million_samples, -row.samples_per_s))
    # The cheapest per sample; among equals the fastest, then the one with fewest CPU hosts.
    most = table[0].usd_per_million_samples * (1 + ALIKE)
    alike = [row for row in table if row.usd_per_million_samples <= most]
    best = max(alike, key=lambda row: (round(row.samples_per_s, 3), -row.cpu_hosts))
    advice = Advice(measured, wanted, known, table, best, [_reason(table, best)], notes)
    advice.lines.extend([*_configured(advice, best), *hints])
    return advice


def grid(
    measured: Measured, wanted: Wanted, known: PriceList, gpu: Machine, rate: float
) -> list[Candidate]:
    """A GPU type alone, as a bigger host with the same GPUs, and with 1, the best and the configured number of
    each CPU type."""
    works = [measured.work(rate, side, wanted.speed) for side in (-1, 0, 1)]
    same = [m for m in prices.MACHINES.values() if (m.gpu_name, m.gpus) == (gpu.gpu_name, gpu.gpus)]
    clusters: list[tuple[Machine, Machine | None, int]] = [
        (host, None, 0) for host in same if host == gpu or host.vcpus > gpu.vcpus
    ]
    for cpu in machines(wanted.cpu_types):
        shape = shape_of(wanted, known, gpu, cpu, 1)
        counts = {1, cheapest_count(works[1], shape, wanted.max_cpu_hosts)}
        if wanted.configured and wanted.configured[:2] == (gpu.type, cpu.type):
            counts.add(wanted.configured[2])
        allowed = [count for count in sorted(counts) if 0 < count <= wanted.max_cpu_hosts]
        clusters += [(gpu, cpu, count) for count in allowed]
    return [
        judge(measured, wanted, works, shape_of(wanted, known, *cluster), *cluster)
        for cluster in clusters
        if cluster[2] or wanted.gpu_hosts_preprocess
    ]


def judge(
    measured: Measured,
    wanted: Wanted,
    works: list[Workload],
    shape: ClusterShape,
    gpu: Machine,
    cpu: Machine | None,
    count: int,
) -> Candidate:
    low, middle, high = (predict(work, shape) for work in works)
    cost, samples = usd_per_million_samples(middle, shape), measured.samples
    if per_gpu := measured.most_per_gpu:
        most = round(per_gpu * shape.gpu_hosts * shape.gpus_per_host)
        samples = min(samples or most, most)
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
        hours=samples / middle.samples_per_s / 3600 if samples else None,
        usd=cost * samples / 1e6 if samples else None,
    )


def shape_of(
    wanted: Wanted, known: PriceList, gpu: Machine, cpu: Machine | None, count: int
) -> ClusterShape:
    def price(machine: Machine) -> float:
        found = known.usd_per_hour(machine.type)
        return machine.price_per_hour_usd if found is None else found

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
        gpu_host_usd_per_hour=price(gpu),
        cpu_host_usd_per_hour=price(cpu) if cpu else 0.0,
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
    if best.cpu_hosts:
        alone = next((row for row in like if not row.cpu_hosts), None)
        if alone is None:
            return f"{head}: the GPU hosts do not preprocess (data.preprocess_on); {limit}"
        less = -best.dearer_than(alone)
        cost = f"{less:.0f} % less than" if less >= 100 * ALIKE else "as cheap as"
        gain = best.samples_per_s / alone.samples_per_s
        return f"{head}: {cost} {alone.hosts} alone and {gain:.1f} times as fast; then {limit}"
    other = next((row for rows in (like, table) for row in rows if row.cpu_hosts), None)
    if other is None:
        return f"{head}: no CPU hosts were considered; {limit}"
    dearer, speed = other.dearer_than(best), other.samples_per_s / best.samples_per_s
    cost = f"{dearer:.0f} % more" if dearer >= 100 * ALIKE else "as much"
    bigger = other.gpu_type != best.gpu_type
    why = "a bigger GPU host instead of CPU hosts" if bigger else f"no CPU hosts: {limit}"
    more = f"costs {cost} per sample at {speed:.2f} times the speed"
    return f"{head}: {why}; the best with them, {other.hosts}, {more}"


def _configured(advice: Advice, best: Candidate) -> list[str]:
    now = next((row for row in advice.table if advice.is_configured(row)), best)
    dearer, faster = now.dearer_than(best), best.samples_per_s / now.samples_per_s
    if dearer < 100 * ALIKE and faster < 1 + ALIKE:
        return []
    cost = "as cheap" if dearer < 100 * ALIKE else f"{dearer:.0f} % more expensive"
    return [
        f"configured now: {now.hosts}: {cost} per sample; the recommendation is {faster:.2f} times as fast"
    ]


def stage_hints(stages: list[dict[str, Any]]) -> list[str]:
    """The most expensive stage of the chain, if it takes much of the time."""

    def ms(stage: dict[str, Any]) -> float:
        return float(stage.get("cpu_ms_per_sample", 0))

    total, dearest = sum(map(ms, stages)), max(stages, key=ms, default={})
    name = dearest.get("stage")
    if total <= 0 or len(stages) < 2 or name in AROUND or ms(dearest) < DEAR * total:
        return []
    return [
        f"{name} takes {100 * ms(dearest) / total:.0f} % of the chain, {ms(dearest):.1f} ms per sample"
    ]
