"""Head: how long work may take, for how long a host is avoided, how often a read is tried again; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median

LEAST_SHARE, LEAST_S = 0.1, 5.0
"""Of `data.stall_timeout_s`, and in any case: no block is late before that."""
TIMES_TYPICAL = 20.0
"""A block is late when it takes so many times what blocks of its split take."""
UNKNOWN_SHARE = 0.5
"""Of `data.stall_timeout_s`: while no block of a split has come, nobody knows how slow its chain is."""
START_UP = 2.0
"""So many times longer for the first block of a host, whose processes start and import first."""
GIVE_UP_SHARE, LEAST_GIVE_UP_S = 0.9, 30.0
"""Of `data.stall_timeout_s`: then the run ends with the names, before its train workers give up without."""
AVOID_S, LONGEST_AVOID_S = 120.0, 1920.0
KNOWN = 101
"""Blocks whose durations are remembered."""


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
        """A block of a split was made."""
        self._taken.setdefault(split, deque(maxlen=KNOWN)).append(seconds)
        self._seen.add((split, node))

    def deadline_s(self, split: str, node: str, late: int) -> float:
        """How long a task may give nothing while it is waited for.

        Args:
            split: of its records.
            node: where it runs.
            late: how often the same work was late before: slow is not stuck, so each time it gets twice as
                long.
        """
        taken = self._taken.get(split)
        if not taken:
            return UNKNOWN_SHARE * self.stall_s * 2.0**late
        least = max(LEAST_SHARE * self.stall_s, LEAST_S, TIMES_TYPICAL * median(taken))
        return least * (1.0 if (split, node) in self._seen else START_UP) * 2.0**late

    @property
    def give_up_s(self) -> float:
        """After so long without any block of work that is waited for, the run ends."""
        return max(GIVE_UP_SHARE * self.stall_s, LEAST_GIVE_UP_S)

    def avoid(self, node: str, now: float) -> float:
        """A host was late: for how many seconds it gets no work, each time longer."""
        _, before = self._avoided.get(node, (0.0, AVOID_S / 2))
        seconds = min(2 * before, LONGEST_AVOID_S)
        self._avoided[node] = (now + seconds, seconds)
        return seconds

    def avoided(self, now: float) -> set[str]:
        """The hosts that get no work now."""
        return {node for node, (until, _) in self._avoided.items() if now < until}


def others(nodes: Collection[str], *not_these: Collection[str]) -> set[str]:
    """Head: the hosts besides some, or all of them where there is no other."""
    left = set(nodes)
    for some in not_these:
        left = left - set(some) or left
    return left
