"""Candidate clusters for a job with speed, cost and bottleneck, and a recommendation in plain words. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
"""κ and h of a sample of `RECEIVE_BYTES`: docs/performance.md."""
RECEIVE_BYTES = 150_528
ASSUMED_SPREAD = 0.5
RUN_SPREAD = 0.1
"""Uncertainty of figures from a run: throughput of the same job varies this much between runs."""
ALIKE = 0.01
"""Costs that differ by less count as equal; then the faster cluster is preferred."""
MAX_CPU_HOSTS = 32
BITS = 8e-9
"""Divide Gb/s by this to get bytes/s."""
FLOW_GBPS = 5.0
"""Limit of one TCP connection between two instances."""
BINDS: dict[Term, tuple[str, str]] = {
    "gpu": ("GPU", "the GPU is the limit, more CPUs would be idle"),
    "cpu": ("CPUs", "the CPUs are still the limit, the next host would cost more than it gains"),
    "network": ("network", "the network is the limit, more CPU hosts would not help"),
    "gpu_host_cpu": (
        "GPU host's CPUs",
        "the GPU host's own CPUs are the limit, more CPU hosts would not help",
    ),
    "receiver": (
        "receiving thread",
        "the receiving thread is the limit, more CPU hosts would not help",
    ),
}
"""What limits a cluster: its name in the table, and what that means for the recommended one."""
CAPACITY_HOSTS = (0, 1, 2, 4, 8)
AROUND = ("pack", "task")
"""Work outside the chain's own stages, which no recipe can make cheaper."""
DEAR = 0.3
"""From this share of the chain's CPU time on, a stage is mentioned."""


@dataclass(frozen=True)
class Measured:
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
    """As `chain` in summary.json, in the order of the chain, with `random` if known."""
    samples: int | None = None
    """Samples of the whole job: records × epochs; None if unknown."""
    most_per_gpu: int | None = None
    """Samples after which `train.max_steps` ends the job, per GPU."""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def received(cls, bytes_per_sample: float, notes: list[str], **figures: Any) -> Measured:
        """With the usual cost of receiving a sample of this size, which one machine cannot measure."""
        scale = bytes_per_sample / RECEIVE_BYTES
        assumed = f"{1000 * (RECEIVE_S + FEED_S) * scale:.2f} ms of CPU per sample"
        return cls(
            cpu_spread=RUN_SPREAD,
            bytes_per_sample=bytes_per_sample,
            receive_s=RECEIVE_S * scale,
            other_s=FEED_S * scale,
            serial_s=FEED_S * scale / 3,
            receive_spread=ASSUMED_SPREAD,
            notes=[
                *notes,
                f"receiving: assumed {assumed} ± {100 * ASSUMED_SPREAD:.0f} %; it is not measured",
                f"{100 * EFFICIENCY:.0f} % of the CPUs' time reaches the chain (benchmarks/sleeping.py)",
            ],
            **figures,
        )

    def work(self, gpu_name: str, side: int = 0, speed: float = 1.0) -> Workload | None:
        """The model's input for a GPU; None if this GPU's rate is unknown.

        `side`: 0 the measured values; -1 every figure at its slow end, +1 at its fast end. `speed`: of the
        instances' vCPUs, relative to a core of the measuring machine.
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
    """None if no GPU's rate is known; the table then shows only the capacity of the CPU side."""
    lines: list[str]
    notes: list[str]

    def shown(self, limit: int) -> list[Candidate]:
        rows = [*self.table[:limit], self.best]
        rows += [
            one for one in self.table if not one.cpu_hosts and one.gpu_type in self.wanted.gpu_types
        ]
        return [one for one in self.table if one in rows or self.is_configured(one)]

    def is_configured(self, one: Candidate) -> bool:
        count = one.cpu_hosts
        return self.wanted.configured == (one.gpu_type, one.cpu_type if count else None, count)


def advise(measured: Measured, wanted: Wanted, known: PriceList) -> Advice:
    notes = [known.label, *measured.notes]
    hints = stage_hints(measured.stages)
    rated = [m.type for m in machines(wanted.gpu_types) if measured.work(m.gpu_name)]
    unrated = [name for name in wanted.gpu_types if name not in rated]
    if not rated:
        lines = [
            "no recommendation: how fast a GPU trains this model is unknown, and this machine has no such"
            " GPU. Give its samples per second, --gpu-samples-per-s 400 (or A10G=400), or a run on it:"
            " `size --from RUN`",
            *hints,
        ]
        table = capacity(measured, wanted, known)
        return Advice(measured, wanted, known, table, None, lines, notes)
    if unrated:
        notes.append(f"left out, because the rate of the GPU is unknown: {', '.join(unrated)}")
    table = search(measured, replace(wanted, gpu_types=tuple(rated)), known)
    best = recommend(table)
    instead = _configured(table, best, wanted)
    return Advice(
        measured, wanted, known, table, best, [_reason(table, best), *instead, *hints], notes
    )


def recommend(table: list[Candidate]) -> Candidate:
    """The cheapest per sample; among equals the fastest, then the one with fewest CPU hosts."""
    best = table[0].usd_per_million_samples
    alike = [one for one in table if one.usd_per_million_samples <= best * (1 + ALIKE)]
    return max(alike, key=lambda one: (round(one.samples_per_s, 3), -one.cpu_hosts))


def search(measured: Measured, wanted: Wanted, known: PriceList) -> list[Candidate]:
    """Each GPU type alone, and with the best number of each CPU type; cheapest first.

    Bigger hosts with the same GPUs appear without CPU hosts, as the other way to add CPUs to a GPU.
    """
    clusters: list[tuple[Machine, Machine | None, int]] = []
    by_size = sorted(prices.MACHINES.values(), key=lambda machine: machine.vcpus)
    for gpu in machines(wanted.gpu_types):
        same = [m for m in by_size if (m.gpu_name, m.gpus) == (gpu.gpu_name, gpu.gpus)]
        clusters += [(host, None, 0) for host in same if host is gpu or host.vcpus > gpu.vcpus]
        for cpu in machines(wanted.cpu_types):
            clusters += [
                (gpu, cpu, count) for count in counts_of(measured, wanted, known, gpu, cpu)
            ]
    judged = [
        one
        for cluster in dict.fromkeys(clusters)
        if (one := judge(measured, wanted, known, *cluster)) is not None
    ]
    return sorted(judged, key=lambda one: (one.usd_per_million_samples, -one.samples_per_s))


def capacity(measured: Measured, wanted: Wanted, known: PriceList) -> list[Candidate]:
    """What GPU hosts with a few CPU hosts could feed if their GPUs were infinitely fast."""
    free = replace(measured, gpu_samples_per_s={"": math.inf}, gpu_spread=0)
    types = itertools.product(machines(wanted.gpu_types), machines(wanted.cpu_types[:2]))
    counts = [count for count in CAPACITY_HOSTS if count <= wanted.max_cpu_hosts]
    found = [
        judge(free, wanted, known, gpu, cpu if count else None, count)
        for gpu, cpu in types
        for count in counts
    ]
    unique = {
        (one.gpu_type, one.cpu_type or "", one.cpu_hosts): one for one in found if one is not None
    }
    return [unique[key] for key in sorted(unique)]


def judge(
    measured: Measured,
    wanted: Wanted,
    known: PriceList,
    gpu: Machine,
    cpu: Machine | None,
    count: int,
) -> Candidate | None:
    shape = shape_of(wanted, known, gpu, cpu, count)
    works = [measured.work(gpu.gpu_name, side, wanted.speed) for side in (-1, 0, 1)]
    if shape is None or works[1] is None or not (count or wanted.gpu_hosts_preprocess):
        return None
    low, middle, high = (predict(work, shape) for work in works if work is not None)
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
) -> ClusterShape | None:
    gpu_price = known.usd_per_hour(gpu.type)
    cpu_price = known.usd_per_hour(cpu.type) if cpu else 0.0
    if gpu_price is None or cpu_price is None:
        return None
    hosts = wanted.gpu_hosts
    workers = min(max(gpu.gpus, 1) * hosts, wanted.train_workers or math.inf)
    return ClusterShape(
        gpu_host_cpus=gpu.vcpus,
        cpu_host_cpus=cpu.vcpus if cpu else 0,
        cpu_hosts=count,
        gpu_hosts=hosts,
        gpus_per_host=workers / hosts,
        # CPUs that hosts/raynode.py does not declare to Ray: one per GPU, but never the last one.
        reserved_cpus=min(gpu.gpus, gpu.vcpus - 1) if wanted.gpu_hosts_preprocess else gpu.vcpus,
        gpu_host_bytes_per_s=gpu.baseline_gbps / BITS,
        cpu_host_bytes_per_s=min(cpu.baseline_gbps, FLOW_GBPS) / BITS if cpu else 0.0,
        efficiency=EFFICIENCY,
        gpu_host_efficiency=EFFICIENCY,
        gpu_host_usd_per_hour=gpu_price,
        cpu_host_usd_per_hour=cpu_price,
    )


def counts_of(
    measured: Measured, wanted: Wanted, known: PriceList, gpu: Machine, cpu: Machine
) -> list[int]:
    work, shape = measured.work(gpu.gpu_name, 0, wanted.speed), shape_of(wanted, known, gpu, cpu, 1)
    if work is None or shape is None:
        return []
    counts = {1, cheapest_count(work, shape, wanted.max_cpu_hosts)}
    if wanted.configured and wanted.configured[:2] == (gpu.type, cpu.type):
        counts.add(wanted.configured[2])
    return sorted(count for count in counts if 0 < count <= wanted.max_cpu_hosts)


def machines(names: Iterable[str]) -> list[Machine]:
    return [found for found in map(prices.machine, names) if found is not None]


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
    limit = BINDS[best.binds][1]
    like = [one for one in table if one.gpu_type == best.gpu_type]
    alone = next((one for one in like if not one.cpu_hosts), None)
    if best.cpu_hosts and alone is not None:
        gain = best.samples_per_s / alone.samples_per_s
        less = -best.dearer_than(alone)
        cost = f"{less:.0f} % less than" if less >= 100 * ALIKE else "as cheap as"
        reason = f"{cost} {alone.hosts} alone and {gain:.1f} times as fast"
        return f"{head}: {reason}; then {limit}"
    others = [one for one in table if one.cpu_hosts]
    if best.cpu_hosts:
        return f"{head}: the GPU hosts do not preprocess (data.preprocess_on); {limit}"
    if not others:
        return f"{head}: no CPU hosts were considered; limited by the {BINDS[best.binds][0]}"
    other = next((one for one in like if one.cpu_hosts), others[0])
    dearer = other.dearer_than(best)
    cost = f"{dearer:.0f} % more" if dearer >= 100 * ALIKE else "as much"
    more = f"the best with them, {other.hosts}, costs {cost} per sample"
    if other.gpu_type != best.gpu_type:
        speed = f"at {other.samples_per_s / best.samples_per_s:.2f} times the speed"
        return f"{head}: a bigger GPU host instead of CPU hosts; {more} {speed}"
    feeds = (
        "the GPU host feeds its GPU alone"
        if best.binds == "gpu"
        else "they would cost more than they gain"
    )
    return f"{head}: no CPU hosts: {feeds}; {more}"


def _configured(table: list[Candidate], best: Candidate, wanted: Wanted) -> list[str]:
    clusters = {(one.gpu_type, one.cpu_type, one.cpu_hosts): one for one in table}
    now = clusters.get(wanted.configured) if wanted.configured else None
    if now is None or now == best:
        return []
    dearer, faster = now.dearer_than(best), best.samples_per_s / now.samples_per_s
    as_cheap = dearer < 100 * ALIKE
    if as_cheap and faster < 1 + ALIKE:
        return []
    fewer = "larger or more than needed; " if now.binds == "gpu" and best.binds == "gpu" else ""
    cost = "as cheap" if as_cheap else f"{fewer}{dearer:.0f} % more expensive"
    return [
        f"configured now: {now.hosts}: {cost} per sample; the recommendation is {faster:.2f} times as fast"
    ]


def stage_hints(stages: list[dict[str, Any]]) -> list[str]:
    """The most expensive stage of the chain, if it takes much of the time."""
    total, dearest = sum(map(_ms, stages)), max(stages, key=_ms, default={})
    dear = total > 0 and len(stages) > 1 and _ms(dearest) >= DEAR * total
    if not dear or dearest.get("stage") in AROUND:
        return []
    share = 100 * _ms(dearest) / total
    return [
        f"{dearest['stage']} takes {share:.0f} % of the chain, {_ms(dearest):.1f} ms per sample"
    ]


def _ms(stage: dict[str, Any]) -> float:
    return float(stage.get("cpu_ms_per_sample", 0))
