"""A pass over one split of a recipe, and how its rows are given to train workers.

Rows are numbered as blocks arrive. Step s takes the next workers × batch_size rows, and worker r takes the
r-th batch_size of them. The rest at the end is divided evenly. For training, fewer rows than workers remain
(dropped, or padded with repeated rows), or all of a last step that gives each worker fewer rows than a limit;
for validation every row goes to exactly one worker.

Train workers request the same steps in the same sequence, each at its own pace. What all of them do after the
same step, they do at the first step that none of them has requested yet.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.errors import DataError
from stoker.protocol import ID_COLUMN, BlockReport, BlockSlice, DataCursor, Schema, StepAssignment
from stoker.serve.accounting import EpochAccount
from stoker.serve.blocks.client import Transport
from stoker.serve.cursor import Trail
from stoker.serve.items import Held, ReadyBlock
from stoker.serve.passes import Pass

KEPT_STEPS = 4096
"""Steps before the slowest train worker's next one for which a position can be asked: more than it may have
requested and not used."""
StepKey = tuple[int, bool, int]
"""(epoch, whether in the validation that follows its training, step of the pass)."""


class Pace:
    """The latest step that each rank has requested."""

    def __init__(self) -> None:
        self.asked: dict[int, StepKey] = {}

    def ask(self, rank: int, epoch: int, step: int, val: bool = False) -> None:
        """A rank requests a step."""
        self.asked[rank] = (epoch, val, step)

    def first_unasked(self) -> StepKey:
        """The first step that no rank has requested; it may lie beyond the end of its pass."""
        epoch, val, step = max(self.asked.values(), default=(0, False, -1))
        return epoch, val, step + 1


class Signal:
    """A request that every rank sees from the same step on."""

    def __init__(self) -> None:
        self.since: StepKey | None = None

    def request(self, pace: Pace) -> None:
        """Make the request; a pending one stays as it is."""
        if self.since is None:
            self.since = pace.first_unasked()

    def due(self, epoch: int, step: int, val: bool = False) -> bool:
        """Whether a rank that takes this step must see it."""
        return self.since is not None and (epoch, val, step) >= self.since


def least_rows(remainder: str | int, batch_size: int) -> int:
    """The fewest rows of a train worker in a training step, by `data.remainder`."""
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
    """Takes blocks, returns shares.

    Args:
        workers: number of train workers.
        batch_size: rows of each in a step.
        equal: all workers get the same number of rows in each step.
        remainder: `data.remainder`.
    """

    def __init__(self, workers: int, batch_size: int, *, equal: bool, remainder: str | int = "drop") -> None:
        self.workers, self.batch_size, self.equal = workers, batch_size, equal
        self.pad, self.least = remainder == "pad", least_rows(remainder, batch_size)
        self.first = 0
        """The first block that is known; those before it are not needed."""
        self.starts: list[int] = []
        self.skipped: list[int] = []
        self.rows = 0
        self.ended = False

    def add(self, rows: int, skip: int = 0) -> int:
        """Add a block; returns its number."""
        self.starts.append(self.rows)
        self.skipped.append(skip)
        self.rows += rows - skip
        return self.first + len(self.starts) - 1

    def forget(self, before: int) -> None:
        """The blocks before this one are not needed any more."""
        gone = before - self.first
        if 2 * gone > len(self.starts):  # so that each is moved once, on average
            del self.starts[:gone], self.skipped[:gone]
            self.first = before

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

    def has(self, step: int) -> bool:
        """Whether there is such a step. Call it only when `ready`."""
        left = min(self.rows - step * self.step_rows, self.step_rows)
        part = left < self.step_rows and self.equal and not self.pad
        return left > 0 and (not part or left // self.workers >= self.least)

    def share(self, step: int, rank: int) -> Share | None:
        """A worker's rows of a step; None after its last. Call it only when `ready`."""
        if not self.has(step):
            return None
        first = step * self.step_rows
        left = min(self.rows - first, self.step_rows)
        if left == self.step_rows:
            begin = first + rank * self.batch_size
            return Share(self.slices(begin, begin + self.batch_size))
        each, over = divmod(left, self.workers)
        if not self.equal:
            begin = first + rank * each + min(rank, over)
            rows = each + (rank < over)
            return Share(self.slices(begin, begin + rows)) if rows else Share(())
        if not self.pad:
            begin = first + rank * each
            return Share(self.slices(begin, begin + each))
        each += over > 0
        begin, stop = first + rank * each, first + (rank + 1) * each
        own = self.slices(min(begin, self.rows), min(stop, self.rows))
        missing = each - sum(s.stop - s.start for s in own)
        # Fewer rows than workers: repeat the first rows for workers that would get none.
        again = tuple(self.slices(first + i % left, first + i % left + 1)[0] for i in range(missing))
        return Share(own + again, padded=missing)

    def block_done(self, block: int, step: int) -> bool:
        """Whether no step from `step` on needs this block."""
        return self._stop(block) <= step * self.step_rows

    def may_remain(self, block: int) -> bool:
        """Whether this block would contain remaining rows if the stream ended now."""
        return self._stop(block) > self.rows - self.workers * self.least

    def _stop(self, block: int) -> int:
        after = block + 1 - self.first
        return self.starts[after] if after < len(self.starts) else self.rows

    def slices(self, begin: int, stop: int) -> tuple[Slice, ...]:
        """The blocks and rows behind the row numbers begin … stop-1."""
        found: list[Slice] = []
        block = self.first + bisect_right(self.starts, begin) - 1
        while begin < stop:
            end = self._stop(block)
            upto = min(stop, end)
            if upto > begin:
                offset = self.skipped[block - self.first] - self.starts[block - self.first]
                found.append(Slice(block, begin + offset, upto + offset))
            begin = upto
            block += 1
        return tuple(found)


Used = tuple[int, int, int]
"""What one rank has used: rows (including padded ones), sum of their ids, number of padded rows."""


@dataclass(eq=False, kw_only=True)
class RecipePass(Pass):
    """Gives each rank its rows of each step, and accounts for all records."""

    splitter: Splitter
    account: EpochAccount
    total: int | None
    trail: Trail | None = None
    """For training passes: the order of arrivals, from which the position follows."""
    schema: Schema | None = None
    """Schema of the split, set by the run's first block; each block is compared with it."""
    blocks: dict[int, ReadyBlock] = field(default_factory=dict)
    """Blocks still needed, by number."""
    steps: dict[int, int] = field(default_factory=dict)
    """Next step of each rank."""
    finished: dict[int, Used] = field(default_factory=dict)
    reconciled: bool = False
    slowest: int = 0
    """The step that the slowest rank requests next."""
    fetched: dict[int, int] = field(default_factory=dict)
    """By rank: it has fetched all steps before this one."""

    def __post_init__(self) -> None:
        self._held = Held()
        self.step_rows = self.splitter.step_rows

    @property
    def held(self) -> Held:
        return self._held

    @property
    def needed(self) -> list[ReadyBlock]:
        return list(self.blocks.values())

    @property
    def ended(self) -> bool:
        return self.splitter.ended

    @property
    def rows_ahead(self) -> int:
        return self.splitter.rows - self.slowest * self.step_rows

    def clear(self) -> None:
        super().clear()
        self.blocks.clear()

    def reported(self, report: BlockReport, node: str) -> None:
        """A chain worker on a node has made a block.

        Raises:
            DataError: it is not the next one of its shard.
        """
        self.account.take(report, node)
        if self.trail is not None:
            self.trail.report(report)

    def arrived(self, block: ReadyBlock) -> None:
        """A block has arrived; its report came earlier."""
        rows = block.report.rows
        skip = self.trail.arrive(block.report.shard, rows) if self.trail is not None else 0
        if skip < rows:
            self.blocks[self.splitter.add(rows, skip)] = block
            self.held.add(block)

    def portion(self, step: int, rank: int) -> StepAssignment | None:
        """A worker's rows of a step, which must be ready; None after its last."""
        share = self.splitter.share(step, rank)
        self.steps[rank] = step + 1
        if len(self.steps) == self.splitter.workers:
            self.slowest = min(self.steps.values())
        if share is None:
            return None
        return StepAssignment([self._rows(part) for part in share.slices], share.padded, schema=self.schema)

    def _rows(self, part: Slice) -> BlockSlice:
        return self.blocks[part.block].part(part.start, part.stop)

    def release(self) -> None:
        """Drop the blocks that every worker has fetched."""
        if len(self.fetched) < self.splitter.workers:
            return
        step = min(self.fetched.values())
        # Blocks are needed in the order of their numbers, so stop at the first that is needed.
        while self.blocks:
            number = next(iter(self.blocks))
            if not self.splitter.block_done(number, step) or self.splitter.may_remain(number):
                break
            self.held.add(self.blocks.pop(number), -1)
            self.splitter.forget(number + 1)
        if self.trail is not None:
            self.trail.leave((self.slowest - KEPT_STEPS) * self.step_rows)

    def position(self, steps: int, id_sum: int) -> DataCursor:
        """Position of a training pass after some steps of this attempt.

        Raises:
            ValueError: it has not given out that many steps, or has forgotten them.
        """
        if self.trail is None or not self.splitter.ready(steps - 1):
            raise ValueError(f"{self.account.split} epoch {self.account.epoch}: step {steps} is not reached")
        rows = steps * self.splitter.step_rows
        if self.splitter.ended:
            rows = min(rows, self.splitter.remainder.start)
        position = self.trail.after(rows, id_sum)
        self.account.trained = position.books.trained
        return position

    def unused(self) -> list[BlockSlice]:
        """The rows that no worker takes."""
        rows = self.splitter.remainder
        return [self._rows(part) for part in self.splitter.slices(rows.start, rows.stop)]

    def reconcile(self, remaining: list[int]) -> dict[str, Any]:
        """Close the account.

        Returns:
            The counts and the ids of the rows that no worker took.

        Raises:
            DataError: records were lost, duplicated or exchanged.
        """
        used = list(self.finished.values())
        rows, padded = sum(u[0] for u in used), sum(u[2] for u in used)
        self.account.use(rows, padded, sum(u[1] for u in used), remaining)
        counts = self.account.reconcile(self.total)
        self.reconciled = True
        self.blocks.clear()
        self._held = Held()
        return {"split": self.account.split, "remainder_ids": remaining, **counts}

    def cut(self, steps: int) -> dict[str, Any]:
        """Book a training pass that a limit ends after these steps of this attempt; its place stays.

        Raises:
            DataError: the train workers used other rows than they were given.
        """
        used = sum(rows - padded for rows, _, padded in self.finished.values())
        given = self.position(steps, 0).books.trained - self.account.carried.trained
        if used != given:
            raise DataError(
                f"train epoch {self.account.epoch + 1}: {given} records were given out, but {used} trained"
            )
        self.reconciled = True
        return {"split": "train", **self.account.counts(self.total)}


def ids_of(rows: list[BlockSlice], transport: Transport) -> list[int]:
    """The record ids of some rows; fetches them, so no lock may be held.

    Raises:
        DataError: a block is not available.
    """
    found: list[int] = []
    for part in rows:
        columns, start, stop, _ = transport.rows(part)
        found += columns[ID_COLUMN][start:stop].tolist()
    return found
