"""Head: deadlines for work, how long to avoid a host, how often to retry a read; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median

LEAST_SHARE, LEAST_S = 0.1, 5.0
"""Minimum deadline of a block, as a share of `data.stall_timeout_s` and in seconds."""
TIMES_TYPICAL = 20.0
"""A block is late after this multiple of the median duration of its split's blocks."""
UNKNOWN_SHARE = 0.5
"""Deadline as a share of `data.stall_timeout_s` before the first block of a split has arrived."""
START_UP = 2.0
"""Factor for the first block of a host, which includes process start and imports."""
GIVE_UP_SHARE, LEAST_GIVE_UP_S = 0.9, 30.0
"""Share of `data.stall_timeout_s` after which the run ends and names the stuck work, before train workers
time out without that information."""
AVOID_S, LONGEST_AVOID_S = 120.0, 1920.0
KNOWN = 101
"""Number of block durations to remember."""


@dataclass
class Patience:
    """Head: one per attempt, used by the thread that sends work. See the module.

    Args:
        stall_s: `data.stall_timeout_s`.
    """

    stall_s: float
    _taken: dict[str, deque[float]] = field(default_factory=dict)
    _seen: set[tuple[str, str]] = field(default_factory=set)
    _avoided: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Node → (until when, for how long)."""

    def took(self, split: str, node: str, seconds: float) -> None:
        """Record the duration of a block of a split."""
        self._taken.setdefault(split, deque(maxlen=KNOWN)).append(seconds)
        self._seen.add((split, node))

    def deadline_s(self, split: str, node: str, late: int) -> float:
        """How long a task may take for its next result.

        Args:
            split: of its records.
            node: where it runs.
            late: how often the same work was late before. Each time doubles the deadline, since slow is not
                stuck.
        """
        taken = self._taken.get(split)
        if not taken:
            return UNKNOWN_SHARE * self.stall_s * 2.0**late
        least = max(LEAST_SHARE * self.stall_s, LEAST_S, TIMES_TYPICAL * median(taken))
        return least * (1.0 if (split, node) in self._seen else START_UP) * 2.0**late

    @property
    def give_up_s(self) -> float:
        """The run ends if no awaited block arrives for this long."""
        return max(GIVE_UP_SHARE * self.stall_s, LEAST_GIVE_UP_S)

    def avoid(self, node: str, now: float) -> float:
        """A host was late: how many seconds it gets no work. Doubles each time."""
        _, before = self._avoided.get(node, (0.0, AVOID_S / 2))
        seconds = min(2 * before, LONGEST_AVOID_S)
        self._avoided[node] = (now + seconds, seconds)
        return seconds

    def avoided(self, now: float) -> set[str]:
        """Hosts that currently get no work."""
        return {node for node, (until, _) in self._avoided.items() if now < until}


def others(nodes: Collection[str], *not_these: Collection[str]) -> set[str]:
    """Head: the hosts not in any of the given sets, or all hosts if none is left."""
    left = set(nodes)
    for some in not_these:
        left = left - set(some) or left
    return left
