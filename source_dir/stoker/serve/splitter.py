"""Head: divides the rows of a stream of blocks among train workers; pure, so it can be reasoned about.

Rows are numbered as blocks arrive. Step s takes the next workers × batch_size rows, and worker r takes the
r-th batch_size of them. The rest at the end is divided evenly. For training, fewer rows than workers remain
(dropped, or padded with repeated rows), or all of a last step that gives each worker fewer rows than a limit;
for validation every row goes to exactly one worker.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple


def least_rows(remainder: str | int, batch_size: int) -> int:
    """Anywhere: the fewest rows of a train worker in a training step, by `data.remainder`."""
    return min(remainder, batch_size) if isinstance(remainder, int) else 1


class Slice(NamedTuple):
    """Rows start … stop-1 of a block; blocks are numbered in order of arrival."""

    block: int
    start: int
    stop: int


@dataclass(frozen=True)
class Share:
    """The rows of one worker in one step."""

    slices: tuple[Slice, ...]
    padded: int = 0
    """Number of repeated rows among them."""


class Splitter:
    """Head: takes blocks, returns shares.

    Args:
        workers: number of train workers.
        batch_size: rows of each in a step.
        equal: all workers get the same number of rows in each step.
        remainder: `data.remainder`.
    """

    def __init__(self, workers: int, batch_size: int, *, equal: bool, remainder: str | int = "drop") -> None:
        self.workers, self.batch_size, self.equal = workers, batch_size, equal
        self.pad, self.least = remainder == "pad", least_rows(remainder, batch_size)
        self.starts: list[int] = []
        self.skipped: list[int] = []
        self.rows = 0
        self.ended = False

    def add(self, rows: int, skip: int = 0) -> int:
        """Add a block; returns its number.

        Args:
            rows: number of rows in it.
            skip: number of leading rows that no worker may get.
        """
        self.starts.append(self.rows)
        self.skipped.append(skip)
        self.rows += rows - skip
        return len(self.starts) - 1

    def end(self) -> None:
        """Mark the stream as ended."""
        self.ended = True

    @property
    def step_rows(self) -> int:
        return self.workers * self.batch_size

    @property
    def remainder(self) -> range:
        """Rows that no worker takes, once the stream has ended."""
        over = 0
        if self.equal and not self.pad:
            left = self.rows % self.step_rows
            over = left % self.workers if left >= self.workers * self.least else left
        return range(self.rows - over, self.rows)

    def ready(self, step: int) -> bool:
        """Whether `share` can be called for this step."""
        return self.ended or (step + 1) * self.step_rows <= self.rows

    def share(self, step: int, rank: int) -> Share | None:
        """A worker's rows of a step; None after its last. Call it only when `ready`."""
        first = step * self.step_rows
        left = min(self.rows - first, self.step_rows)
        if left <= 0:
            return None
        if left == self.step_rows:
            begin = first + rank * self.batch_size
            return Share(self._slices(begin, begin + self.batch_size))
        each, over = divmod(left, self.workers)
        if not self.equal:
            begin = first + rank * each + min(rank, over)
            rows = each + (rank < over)
            return Share(self._slices(begin, begin + rows)) if rows else Share(())
        if not self.pad:
            begin = first + rank * each
            return Share(self._slices(begin, begin + each)) if each >= self.least else None
        each += over > 0
        begin, stop = first + rank * each, first + (rank + 1) * each
        own = self._slices(min(begin, self.rows), min(stop, self.rows))
        missing = each - sum(s.stop - s.start for s in own)
        # Fewer rows than workers: repeat the first rows for workers that would get none.
        again = tuple(self._slices(first + i % left, first + i % left + 1)[0] for i in range(missing))
        return Share(own + again, padded=missing)

    def slices_of(self, rows: range) -> tuple[Slice, ...]:
        """The blocks and rows behind row numbers."""
        return self._slices(rows.start, rows.stop)

    def block_done(self, block: int, step: int) -> bool:
        """Whether no step from `step` on needs this block."""
        return self._stop(block) <= step * self.step_rows

    def may_remain(self, block: int) -> bool:
        """Whether this block would contain remaining rows if the stream ended now."""
        return self._stop(block) > self.rows - self.workers * self.least

    def _stop(self, block: int) -> int:
        return self.starts[block + 1] if block + 1 < len(self.starts) else self.rows

    def _slices(self, begin: int, stop: int) -> tuple[Slice, ...]:
        found: list[Slice] = []
        block = bisect_right(self.starts, begin) - 1
        while begin < stop:
            end = self._stop(block)
            upto = min(stop, end)
            if upto > begin:
                offset = self.skipped[block] - self.starts[block]
                found.append(Slice(block, begin + offset, upto + offset))
            begin = upto
            block += 1
        return tuple(found)
