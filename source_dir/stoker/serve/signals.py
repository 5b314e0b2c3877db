"""Head: makes all train workers act after the same step; pure.

Train workers request the same steps in the same sequence, each at its own pace. A requested action happens at
the first step that none of them has requested yet.
"""

from __future__ import annotations

Step = tuple[int, bool, int]
"""(epoch, whether in the validation that follows its training, step of the pass)."""


class Pace:
    """Head: the latest step that each rank has requested."""

    def __init__(self) -> None:
        self.asked: dict[int, Step] = {}

    def ask(self, rank: int, epoch: int, step: int, val: bool = False) -> None:
        """A rank requests a step."""
        self.asked[rank] = (epoch, val, step)

    def first_unasked(self) -> Step:
        """Head: the first step that no rank has requested; it may lie beyond the end of its pass."""
        epoch, val, step = max(self.asked.values(), default=(0, False, -1))
        return epoch, val, step + 1


class Signal:
    """Head: a request that every rank sees from the same step on."""

    def __init__(self) -> None:
        self.since: Step | None = None

    def request(self, pace: Pace) -> None:
        """Make the request; a pending one stays as it is."""
        if self.since is None:
            self.since = pace.first_unasked()

    def due(self, epoch: int, step: int, val: bool = False) -> bool:
        """Whether a rank that takes this step must see it."""
        return self.since is not None and (epoch, val, step) >= self.since


class OneTimeSignal(Signal):
    """Head: a request that every rank sees in exactly one step, the same for all."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers = workers
        self._seen: set[int] = set()

    def take(self, rank: int, epoch: int, step: int) -> bool:
        """Whether this step of this rank is the one; call it once per step and rank."""
        if rank in self._seen or not self.due(epoch, step):
            return False
        self._seen.add(rank)
        if len(self._seen) == self.workers:
            self.since, self._seen = None, set()
        return True
