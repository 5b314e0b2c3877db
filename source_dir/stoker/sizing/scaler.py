"""Head: how many CPU hosts to request from a cluster's autoscaler, by the limits model; pure.

The coordinator reports training steps and finished blocks, and asks `look` once a second.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from stoker.config.places import CpuHostsConfig
from stoker.figures import count_of
from stoker.sizing.model import (
    ClusterShape,
    Prediction,
    Workload,
    cheapest_count,
    predict,
    usd_per_million_samples,
)

GROW_AFTER_S = 5.0
"""How long more hosts must be wanted before the request changes: an epoch's end lasts seconds."""
SPARE = 0.1
"""A host is released only if training that is faster by this share would not need it either, so that
measurement noise around a whole number of hosts does not make the request flap."""
TRAINING_S, PRODUCTION_S = 10.0, 30.0
"""Length of the sliding windows: seconds of training, and of chain workers' time."""
JOIN_DEADLINE_S = 300.0


@dataclass
class Window:
    """Sums over the most recent entries that add up to `seconds`."""

    seconds: float
    entries: deque[Counter[str]] = field(default_factory=deque)
    sums: Counter[str] = field(default_factory=Counter)

    def add(self, **values: float) -> None:
        """Add an entry; `seconds` is one of its values."""
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
        """CPU hosts requested now."""
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
        """A change of the request, if it is due.

        Args:
            now: `time.monotonic()`.
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
        if now - self._since < (GROW_AFTER_S if up else self.options.release_after_s) and not at_once:
            return None
        reason = self._reason(own, wanted)
        self.count, self._since, self._asked = wanted, None, None
        return Decision(wanted, reason)

    def missing(self, now: float) -> int:
        """CPU hosts that should have joined long ago."""
        late = self._asked is not None and now - self._asked > JOIN_DEADLINE_S
        self._asked = now if late else self._asked
        return self.count if late else 0

    def _wanted(self, own: int) -> int | None:
        """The number of hosts to request; None: unknown."""
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
        high = self.options.max
        found = cheapest_count(self._work(spare), self._shape(own), high)
        if self._each or not found:
            return max(found, 0 if own else 1)
        return 1  # its CPUs tell how many more are needed

    def _late(self) -> float:
        # Sums of a window may round to less than nothing.
        return max(0.0, self._steps.sums["late"]) / self._steps.sums["seconds"]

    def _work(self, spare: float = 0.0) -> Workload:
        steps, blocks, target = self._steps.sums, self._blocks.sums, self.options.target_wait_pct / 100
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

    def predicted(self, own: int, count: int) -> tuple[Prediction, float]:
        """The model's speed with a number of CPU hosts, and its $ per 1,000,000 samples."""
        shape = self._shape(own).with_cpu_hosts(count)
        prediction = predict(self._work(), shape)
        return prediction, usd_per_million_samples(prediction, shape)

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
        before, after = (self.predicted(own, count)[1] for count in (self.count, wanted))
        return f"{text}; ${after:.2f} instead of ${before:.2f} per 1M records"
