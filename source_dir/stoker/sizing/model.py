"""Anywhere: the limits model: how fast a cluster can train, what limits it, and what a sample costs. Pure.

By it, `Scaler` tells how many CPU hosts to request from a cluster's autoscaler.

A sample is preprocessed on the GPU hosts (rate L) or on CPU hosts and received (rate R), T = L + R:

    T ≤ G                                  the GPUs
    T ≤ 1 / κ₁                             the one thread of a train worker that assembles batches
    L·c + R·κ + T·h ≤ C_g                  CPUs of the GPU hosts
    L·c ≤ η_g·(C_g − reserve)              … those of them that the chain may use
    R·c ≤ η·n·C_c                          CPUs of the CPU hosts
    R·b ≤ B                                network, the slower side

This is a linear programme in two variables whose solution is one of at most three points, so the split
between local and remote work is exact. docs/sizing.md defines the symbols. Pecan (USENIX ATC 2024), Cachew
(ATC 2022) and FastFlow (VLDB 2023) use subsets of these limits.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Literal

from stoker.config.places import CpuHostsConfig
from stoker.figures import count_of

Term = Literal["gpu", "cpu", "network", "gpu_host_cpu", "receiver"]

TOLERANCE = 1e-9
MAX_CPU_HOSTS = 100


@dataclass(frozen=True)
class Workload:
    cpu_s: float
    """c: CPU-seconds of the chain per sample, on a vCPU whose neighbours are busy too."""
    gpu_samples_per_s: float
    """G: samples per second that one GPU trains when data is never late; infinite: no limit."""
    receive_s: float = 0.0
    """κ: CPU-seconds of a GPU host to receive one sample preprocessed elsewhere."""
    other_s: float = 0.0
    """h: further CPU-seconds of a GPU host per sample, wherever it is preprocessed."""
    serial_s: float = 0.0
    """κ₁: seconds per sample of the thread that assembles batches, one per train worker; 0: no limit."""
    bytes_per_sample: float = 0.0
    """b: bytes of one preprocessed sample on the network."""


@dataclass(frozen=True)
class ClusterShape:
    gpu_host_cpus: float
    """C_g: vCPUs of one GPU host."""
    cpu_host_cpus: float = 0.0
    """C_c: vCPUs of one CPU host."""
    cpu_hosts: int = 0
    gpu_hosts: int = 1
    gpus_per_host: float = 1
    """Those that train, in the mean."""
    reserved_cpus: float = 0.0
    """vCPUs of a GPU host not available to the chain."""
    gpu_host_bytes_per_s: float = math.inf
    """B of one GPU host."""
    cpu_host_bytes_per_s: float = math.inf
    """B of one CPU host."""
    efficiency: float = 1.0
    """η: share of the CPU hosts' CPU time that the chain gets."""
    gpu_host_efficiency: float = 1.0
    """η_g: the same for the GPU hosts' CPUs."""
    gpu_host_usd_per_hour: float = 0.0
    """P_g: $/h of one GPU host."""
    cpu_host_usd_per_hour: float = 0.0
    """P_c: $/h of one CPU host."""

    def with_cpu_hosts(self, count: int) -> ClusterShape:
        return replace(self, cpu_hosts=count)

    @property
    def usd_per_hour(self) -> float:
        return (
            self.gpu_hosts * self.gpu_host_usd_per_hour
            + self.cpu_hosts * self.cpu_host_usd_per_hour
        )


@dataclass(frozen=True)
class Prediction:
    samples_per_s: float
    binds: Term
    remote_share: float
    """x: share of the samples preprocessed by CPU hosts, in 0…1."""


def predict(work: Workload, shape: ClusterShape) -> Prediction:
    curve = _Curve(work, shape)
    remote = curve.best_remote(curve.most_remote(shape.cpu_hosts))
    rate = curve.total(remote)
    # CPU hosts work first, as in the placement; the remainder stays on the GPU host.
    share = min(remote / rate, 1.0) if rate > 0 and math.isfinite(rate) else float(remote > 0)
    return Prediction(rate, curve.binding(rate, remote), share)


def usd_per_million_samples(prediction: Prediction, shape: ClusterShape) -> float:
    """$ per 1,000,000 samples: (P_g·m + P_c·n) / (3600·T) · 10⁶."""
    return _ratio(shape.usd_per_hour, 3600 * prediction.samples_per_s) * 1e6


def cheapest_count(work: Workload, shape: ClusterShape, limit: int = MAX_CPU_HOSTS) -> int:
    """The number of CPU hosts with the lowest cost per sample; the smallest among equals."""
    costs = [_cost_with(work, shape, count) for count in range(limit + 1)]
    most = min(costs) * (1 + TOLERANCE)
    return next(count for count, cost in enumerate(costs) if cost <= most)


def _cost_with(work: Workload, shape: ClusterShape, cpu_hosts: int) -> float:
    shape = shape.with_cpu_hosts(cpu_hosts)
    return usd_per_million_samples(predict(work, shape), shape)


class _Curve:
    """Total throughput as a function of the remote rate R: concave and piecewise linear."""

    def __init__(self, work: Workload, shape: ClusterShape) -> None:
        self.work, self.shape = work, shape
        self.gpu_cpus = shape.gpu_hosts * shape.gpu_host_cpus
        usable = max(shape.gpu_host_cpus - shape.reserved_cpus, 0.0)
        self.slots = shape.gpu_hosts * usable * shape.gpu_host_efficiency
        workers = shape.gpu_hosts * shape.gpus_per_host
        self.gpu_cap = workers * work.gpu_samples_per_s
        self.receiver_cap = _ratio(workers, work.serial_s)
        self.network = _ratio(shape.gpu_hosts * shape.gpu_host_bytes_per_s, work.bytes_per_sample)
        # At this rate, receiving alone saturates the GPU hosts' CPUs.
        self.receiving = _ratio(self.gpu_cpus, work.receive_s + work.other_s)

    def produced(self, count: float) -> float:
        return _ratio(self.shape.efficiency * count * self.shape.cpu_host_cpus, self.work.cpu_s)

    def sent(self, count: float) -> float:
        return (
            _ratio(count * self.shape.cpu_host_bytes_per_s, self.work.bytes_per_sample)
            if count
            else 0.0
        )

    def most_remote(self, count: float) -> float:
        produced = self.produced(count) if count else 0.0
        return min(produced, self.sent(count), self.network, self.receiving)

    def total(self, remote: float) -> float:
        lines = [base + slope * remote for base, slope in self._lines() if math.isfinite(base)]
        return max(min([self.gpu_cap, self.receiver_cap, *lines]), 0.0)

    def _lines(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """T ≤ base + slope·R, by the CPUs of the GPU hosts: all of them, and those for the chain."""
        work = self.work
        whole = work.cpu_s + work.other_s
        if whole <= 0:
            return (math.inf, 0.0), (math.inf, 0.0)
        all_cpus = (self.gpu_cpus / whole, (work.cpu_s - work.receive_s) / whole)
        return all_cpus, (_ratio(self.slots, work.cpu_s), 1.0)

    def best_remote(self, most: float) -> float:
        """The R in 0…most with the largest T."""
        candidates = [0.0, most, min(max(self._corner(), 0.0), most)]
        finite = [r for r in candidates if math.isfinite(r)]
        best = max(self.total(r) for r in finite)
        # Among equals the largest: CPU hosts work first.
        return max(r for r in finite if self.total(r) >= best * (1 - TOLERANCE))

    def _corner(self) -> float:
        (base, slope), (slots, one) = self._lines()
        return (base - slots) / (one - slope) if math.isfinite(slots) and one != slope else 0.0

    def binding(self, rate: float, remote: float) -> Term:
        near = 1 - TOLERANCE
        if rate >= self.gpu_cap * near:
            return "gpu"
        if rate >= self.receiver_cap * near:
            return "receiver"
        hosts = self.shape.cpu_hosts
        if hosts and remote >= min(self.network, self.sent(hosts)) * near:
            return "network"
        return "cpu" if not hosts or remote >= self.produced(hosts) * near else "gpu_host_cpu"


def _ratio(supply: float, demand: float) -> float:
    return supply / demand if demand > 0 else math.inf


GROW_AFTER_S = 5.0
"""How long more hosts must be wanted before the request changes: an epoch's end lasts seconds."""
SPARE = 0.1
"""A host is released only if training that is faster by this share would not need it either, so that
measurement noise around a whole number of hosts does not make the request flap."""
TRAINING_S, PRODUCTION_S = 10.0, 30.0
JOIN_DEADLINE_S = 300.0


@dataclass
class Window:
    seconds: float
    entries: deque[Counter[str]] = field(default_factory=deque)
    sums: Counter[str] = field(default_factory=Counter)

    def add(self, **values: float) -> None:
        entry: Counter[str] = Counter()
        entry.update(values)
        self.entries.append(entry)
        self.sums.update(entry)
        while self.sums["seconds"] - self.entries[0]["seconds"] >= self.seconds:
            self.sums.subtract(self.entries.popleft())


@dataclass(frozen=True)
class Decision:
    count: int
    reason: str


class Scaler:
    """One per run.

    Growing needs two things: training waits for preprocessing longer than the target, and the limits model
    finds a number of hosts with a lower cost per sample. Without prices, it takes the smallest number with
    which training does not wait.
    """

    def __init__(self, options: CpuHostsConfig) -> None:
        self.options = options
        self.count = options.min
        self._each = 0
        """CPUs of one CPU host; 0: unknown until the first has joined."""
        self._steps, self._blocks = Window(TRAINING_S), Window(PRODUCTION_S)
        self._since: float | None = None
        """Since when another number has been wanted; `_up`: a larger one."""
        self._up = False
        self._asked: float | None = None
        """When hosts were requested that have not joined yet."""
        self._ended = False

    def stepped(self, samples: float, seconds: float, late_s: float) -> None:
        """Add training steps of all train workers, which waited `late_s` of `seconds` for preprocessing."""
        self._steps.add(samples=samples, seconds=seconds, late=late_s)

    def made(self, records: float, seconds: float) -> None:
        """Add blocks; `seconds` of chain workers include reading, so that slow storage counts as well."""
        self._blocks.add(records=records, seconds=seconds)

    def look(self, now: float, own: int, joined: list[int], ended: bool = False) -> Decision | None:
        """A change of the request, if it is due at `time.monotonic()`.

        Args:
            own: chain workers of the hosts that stay anyway.
            joined: chain workers of each requested host that has joined.
            ended: whether all records of the run are preprocessed.
        """
        self._ended = ended
        self._each = max(joined, default=self._each)
        self._asked = None if len(joined) >= self.count else self._asked or now
        wanted = self._wanted(own)
        if wanted is None or wanted == self.count:
            self._since = None
            return None
        up = wanted > self.count
        if self._since is None or up != self._up:
            self._since, self._up = now, up
        at_once = self._ended or not own + sum(joined) + self.count
        if (
            now - self._since < (GROW_AFTER_S if up else self.options.release_after_s)
            and not at_once
        ):
            return None
        reason = self._reason(own, wanted)
        self.count, self._since, self._asked = wanted, None, None
        return Decision(wanted, reason)

    def missing(self, now: float) -> int:
        late = self._asked is not None and now - self._asked > JOIN_DEADLINE_S
        self._asked = now if late else self._asked
        return self.count if late else 0

    def _wanted(self, own: int) -> int | None:
        low, high = self.options.min, self.options.max
        if self._ended:
            return low
        if not self._steps.sums["seconds"] or not self._blocks.sums["records"]:
            # Without any CPU nothing would ever be measured.
            return None if own or self.count else max(low, min(1, high))
        if self._late() > self.options.target_wait_pct / 100:
            wanted = self._cheapest(own, 0.0)
            if wanted > self.count:
                return min(wanted, high)
        return max(low, min(self._cheapest(own, SPARE), self.count))

    def _cheapest(self, own: int, spare: float) -> int:
        found = cheapest_count(self._work(spare), self._shape(own), self.options.max)
        if self._each or not found:
            return max(found, 0 if own else 1)
        return 1  # its CPUs tell how many more are needed

    def _late(self) -> float:
        # Sums of a window may round to less than nothing.
        return max(0.0, self._steps.sums["late"]) / self._steps.sums["seconds"]

    def _work(self, spare: float = 0.0) -> Workload:
        steps, blocks, target = (
            self._steps.sums,
            self._blocks.sums,
            self.options.target_wait_pct / 100,
        )
        busy_s = max(steps["seconds"] - steps["late"], 1e-6)
        rate = steps["samples"] / busy_s * (1 - target) * (1 + spare)
        return Workload(cpu_s=blocks["seconds"] / blocks["records"], gpu_samples_per_s=rate)

    def _shape(self, own: int) -> ClusterShape:
        prices = self.options
        # Without prices a host costs nearly nothing compared to the rest, so only speed counts.
        return ClusterShape(
            gpu_host_cpus=max(own, 1e-6),  # without any, a sample would cost infinitely much
            cpu_host_cpus=self._each or max(own, 1),
            gpu_host_usd_per_hour=prices.rest_usd_per_hour or 1.0,
            cpu_host_usd_per_hour=1e-9 if prices.usd_per_hour is None else prices.usd_per_hour,
        )

    def _reason(self, own: int, wanted: int) -> str:
        if self._ended:
            return "all records of the run are preprocessed"
        if not self._steps.sums["seconds"]:
            return "no other host can preprocess"
        work = self._work()
        share = f"training waits {100 * self._late():.0f} % of the time for preprocessing"
        need = f"it needs {work.gpu_samples_per_s:.0f} records/s"
        each = f"a CPU preprocesses {1 / max(work.cpu_s, 1e-9):.1f}"
        if not self._each:
            return f"{share}; {need}, {each}; one host first, to see how many CPUs it has"
        have = count_of(own + wanted * self._each, "CPU")
        text = f"{share}; {need}, {each}: {have} with {count_of(wanted, 'CPU host')}"
        if self.options.usd_per_hour is None:
            return text
        before, after = (
            _cost_with(work, self._shape(own), count) for count in (self.count, wanted)
        )
        return f"{text}; ${after:.2f} instead of ${before:.2f} per 1M records"
