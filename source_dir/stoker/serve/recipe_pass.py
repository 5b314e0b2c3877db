"""The passes of a recipe: how they are produced, and how their rows are given to train workers.

Rows are numbered as blocks arrive. Step s takes the next workers × batch_size rows, and worker r takes the
r-th batch_size of them. The rest at the end is divided evenly. For training, what does not divide remains
(dropped, or padded with repeated rows), and so do all rows of a last step that gives each worker fewer than a
limit; for validation every row goes to exactly one worker.

Train workers request the same steps in the same sequence, each at its own pace and ahead of its training.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.errors import DataError, Failure
from stoker.events import kinds
from stoker.protocol import (
    ID_COLUMN,
    BadRecord,
    BlockSlice,
    DataCursor,
    Schema,
    StepAssignment,
    StepKey,
)
from stoker.serve.accounting import EpochAccount, refuse_over_budget
from stoker.serve.blocks.client import Transport
from stoker.serve.cursor import Trail, fresh, ids_of_rows
from stoker.serve.items import ReadyBlock
from stoker.serve.passes import Pass, Passes, ServiceState
from stoker.serve.planner import PlannedAttempt

PASSES_AHEAD = 2
"""How many passes may be produced beyond the consumed one. Without a limit, small data would run ahead for
all epochs and take CPUs from training."""
BLOCKS_AHEAD = 2
"""Blocks of a recipe's dataset that may wait for preprocessing, per slot."""
KEPT_STEPS = 4096
"""Steps before the slowest train worker's next one for which a position can be asked: more than it may have
requested and not used."""


def least_rows(remainder: str | int, batch_size: int) -> int:
    """The fewest rows of a train worker in a training step, by `data.remainder`.

    Two by default: batch normalisation cannot train on one record where it sees one value per channel.
    """
    return min(remainder if isinstance(remainder, int) else 2, batch_size)


class Slice(NamedTuple):
    """Rows start … stop-1 of a block; blocks are numbered in order of arrival."""

    block: int
    start: int
    stop: int


@dataclass(frozen=True)
class Share:
    slices: tuple[Slice, ...]
    padded: int = 0


class Splitter:
    """Takes blocks, returns shares; with `equal`, all workers get the same number of rows in each step."""

    def __init__(
        self, workers: int, batch_size: int, *, equal: bool, remainder: str | int = "drop"
    ) -> None:
        self.workers, self.batch_size, self.equal = workers, batch_size, equal
        self.pad, self.least = remainder == "pad", least_rows(remainder, batch_size)
        self.first = 0
        """The first block that is known; those before it are not needed."""
        self.starts: list[int] = []
        self.skipped: list[int] = []
        self.rows = 0
        self.ended = False

    def add(self, rows: int, skip: int = 0) -> int:
        self.starts.append(self.rows)
        self.skipped.append(skip)
        self.rows += rows - skip
        return self.first + len(self.starts) - 1

    def forget(self, before: int) -> None:
        gone = before - self.first
        if 2 * gone > len(self.starts):  # so that each is moved once, on average
            del self.starts[:gone], self.skipped[:gone]
            self.first = before

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
        each, over = divmod(left, self.workers)
        if not self.equal or not self.pad:
            over = 0 if self.equal else over  # left out, or one more for the first ranks
            begin = first + rank * each + min(rank, over)
            return Share(self.slices(begin, begin + each + (rank < over)))
        each = max(each + (over > 0), self.least)
        begin, stop = first + rank * each, first + (rank + 1) * each
        own = self.slices(min(begin, self.rows), min(stop, self.rows))
        missing = each - sum(s.stop - s.start for s in own)
        # Too few rows: repeat the first ones for workers that would get fewer than `least`.
        again = tuple(
            self.slices(first + i % left, first + i % left + 1)[0] for i in range(missing)
        )
        return Share(own + again, padded=missing)

    def block_done(self, block: int, step: int) -> bool:
        return self._stop(block) <= step * self.step_rows

    def may_remain(self, block: int) -> bool:
        """Whether this block would contain remaining rows if the stream ended now."""
        return self._stop(block) > self.rows - self.workers * self.least

    def _stop(self, block: int) -> int:
        after = block + 1 - self.first
        return self.starts[after] if after < len(self.starts) else self.rows

    def slices(self, begin: int, stop: int) -> tuple[Slice, ...]:
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
    finished: dict[int, Used] = field(default_factory=dict)
    reconciled: bool = False
    slowest: int = 0
    """The step that the slowest rank requests next."""
    fetched: dict[int, int] = field(default_factory=dict)
    """By rank: it has fetched all steps before this one."""
    held_bytes: int = 0

    def __post_init__(self) -> None:
        self.step_rows = self.splitter.step_rows

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
        self.shards.clear()
        self.blocks.clear()

    def arrived(self, block: ReadyBlock) -> None:
        rows = block.report.rows
        skip = self.trail.arrive(block.report.shard, rows) if self.trail is not None else 0
        if skip < rows:
            self.blocks[self.splitter.add(rows, skip)] = block
            self.held_bytes += block.report.bytes_out

    def portion(self, step: int, rank: int) -> StepAssignment | None:
        share = self.splitter.share(step, rank)
        self.steps[rank] = step + 1
        if len(self.steps) == self.splitter.workers:
            self.slowest = min(self.steps.values())
        if share is None:
            return None
        return StepAssignment(
            [self._rows(part) for part in share.slices], share.padded, schema=self.schema
        )

    def slices(self, step: int, rank: int) -> list[int]:
        """Where a rank's rows of a step are: shard, block in it, its ids, first row and end of each."""
        share, found = self.splitter.share(step, rank), list[int]()
        for part in share.slices if share else ():
            report = self.blocks[part.block].report
            found += [report.shard, report.nth, ids_of_rows(report), part.start, part.stop]
        return found

    def _rows(self, part: Slice) -> BlockSlice:
        return self.blocks[part.block].part(part.start, part.stop)

    def release(self) -> None:
        if len(self.fetched) < self.splitter.workers:
            return
        step = min(self.fetched.values())
        # Blocks are needed in the order of their numbers, so stop at the first that is needed.
        while self.blocks:
            number = next(iter(self.blocks))
            if not self.splitter.block_done(number, step) or self.splitter.may_remain(number):
                break
            self.held_bytes -= self.blocks.pop(number).report.bytes_out
            self.splitter.forget(number + 1)
        if self.trail is not None:
            self.trail.leave((self.slowest - KEPT_STEPS) * self.step_rows)

    def position(self, steps: int, id_sum: int) -> DataCursor:
        """Position of a training pass after some steps of this attempt, unless it has forgotten them."""
        if self.trail is None or not self.splitter.ready(steps - 1):
            raise ValueError(
                f"{self.account.split} epoch {self.account.epoch}: step {steps} is not reached"
            )
        rows = steps * self.splitter.step_rows
        if self.splitter.ended:
            rows = min(rows, self.splitter.remainder.start)
        position = self.trail.after(rows, id_sum)
        self.account.trained = position.books.trained
        return position

    def unused(self) -> list[BlockSlice]:
        rows = self.splitter.remainder
        return [self._rows(part) for part in self.splitter.slices(rows.start, rows.stop)]

    def reconcile(self, remaining: list[int]) -> dict[str, Any]:
        used = list(self.finished.values())
        rows, padded = sum(u[0] for u in used), sum(u[2] for u in used)
        self.account.use(rows, padded, sum(u[1] for u in used), remaining)
        counts = self.account.reconcile(self.total)
        self.reconciled = True
        self.blocks.clear()
        self.held_bytes = 0
        return {"split": self.account.split, "remainder_ids": remaining, **counts}

    def cut(self, steps: int) -> dict[str, Any]:
        """Book a training pass that a limit ends after these steps of this attempt; its place stays."""
        used = sum(rows - padded for rows, _, padded in self.finished.values())
        given = self.position(steps, 0).books.trained - self.account.carried.trained
        if used != given:
            raise DataError(
                f"train epoch {self.account.epoch + 1}: {given} records were given out, but {used} trained",
                key="account.counts",
            )
        self.reconciled = True
        return {"split": "train", **self.account.counts(self.total)}


class Beginning(NamedTuple):
    workers: int
    epoch: int
    position: DataCursor | None


class RecipeAttempt(PlannedAttempt):
    """One start of training: its passes, from production to reconciled accounts."""

    def __init__(
        self,
        number: int,
        workers: int,
        passes: Passes,
        totals: dict[str, int | None],
        start: DataCursor,
        shared: ServiceState,
    ) -> None:
        super().__init__(number, shared)
        self.workers, self.passes, self.totals, self.start = workers, passes, totals, start
        self.beginning: Beginning | None = None
        self.ahead = False
        """Whether it produces for train workers that have not begun it yet."""
        self.lost_at: float | None = None
        """When a train worker of the attempt before was lost; None once training has rows again."""
        self.begun_steps: dict[int, StepKey | None] = {}
        """By rank that has held its next step back for a stop: the last step that it has begun."""
        self.open: dict[tuple[str, int], RecipePass] = {}
        """Passes being produced or consumed, in order; earlier ones are reconciled."""
        self._last = False
        self._coming = self._passes(start)
        self._begun: set[tuple[str, int]] = set()
        self._listing = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._open()

    def recovered(self, asked: float) -> None:
        """Training has its first rows after a loss, which it requested at this `time.monotonic()`."""
        if self.lost_at is not None:
            now = time.monotonic()
            seconds, data_s = round(now - self.lost_at, 3), round(now - asked, 3)
            self.shared.event(kinds.Recovered(seconds=seconds, data_s=data_s))
            self.lost_at = None

    def _passes(self, start: DataCursor) -> Iterator[RecipePass]:
        due = start.unvalidated
        if due is not None and "val" in self.totals:
            yield self._pass("val", due)
            if due == start.epoch:
                return  # train.max_steps has ended training within this epoch
        for epoch in range(start.epoch, self.passes.config.train.epochs):
            if epoch != start.epoch:
                plan = start.plan
                plan = self.passes.identity(plan.fingerprint, plan.validation)
                start = fresh(epoch, plan, start.by_row)
            for split in self.totals:
                yield self._pass(split, epoch, start if split == "train" else None)

    def _pass(self, split: str, epoch: int, start: DataCursor | None = None) -> RecipePass:
        config = self.passes.config
        splitter = Splitter(
            self.workers,
            config.train.batch_size,
            equal=split == "train",
            remainder=config.data.remainder,
        )
        return RecipePass(
            plan=self.passes.plan(split, epoch, start),
            number=epoch,
            has_shards=self.passes.has_shards(split),
            splitter=splitter,
            account=EpochAccount.since(split, epoch, start),
            total=self.totals[split],
            trail=Trail(start) if start else None,
            quarantined=start.quarantined if start else {},
            stall_s=config.data.stall_timeout_s,
        )

    def _open(self) -> None:
        while len(self.open) <= PASSES_AHEAD:
            pass_ = next(self._coming, None)
            if pass_ is None:
                self._last = True
                return
            self.open[pass_.key] = pass_

    def reconcile(self, pass_: RecipePass, remaining: list[int], cut_at: int | None = None) -> None:
        """Close the account of a pass that every rank has used; a limit may have ended it after `cut_at`."""
        try:
            counts = pass_.reconcile(remaining) if cut_at is None else pass_.cut(cut_at)
            self.shared.event(kinds.RecordsCounted(**counts))
        except DataError as error:
            self.fail(error.failure)
            return
        if cut_at is not None:
            return
        if (affinity := self.shared.affinity) is not None:
            figures = affinity.figures(*pass_.key, pass_.account.by_node)
            self.shared.event(kinds.CacheUsed(**figures))
            if line := affinity.lacking(figures, self.passes.share or 1.0):
                self.shared.event(kinds.Note(text=line))
        del self.open[pass_.key]
        if self.planner is not None:
            self.planner.close(pass_)
        self._open()

    def begun(self) -> list[Pass]:
        new: list[Pass] = [each for each in self.open.values() if each.key not in self._begun]
        for pass_ in new:
            self._begun.add(pass_.key)
            # In a thread, as there may be many shards, or listing is slow.
            if not pass_.has_shards:
                self._listing.submit(self._execute, pass_)
                continue
            start = self.start if pass_.key == ("train", self.start.epoch) else None
            pass_.coming = self._listing.submit(self.passes.rest, pass_.plan, start)
            pass_.coming.add_done_callback(lambda _: self._listed())
        return new

    def _listed(self) -> None:
        with self.shared.changed:
            self.shared.has_work.notify_all()

    def _execute(self, pass_: Pass) -> None:
        """Thread: turn the blocks of a recipe's dataset into shards, a few ahead of the chain."""
        try:
            for shard in self.passes.blocks(pass_.plan):
                with self.shared.changed:
                    pass_.work.append(shard)
                    self.shared.has_work.notify()
                    while not self.over and len(pass_.work) > BLOCKS_AHEAD * max(
                        self.shared.pool.slots, 1
                    ):
                        self.shared.changed.wait(1.0)
                    if self.over:
                        return
        except Exception as error:
            self.fail(Failure.of(error))
        with self.shared.changed:
            pass_.listing = False
            self.shared.has_work.notify_all()

    def replace(self) -> None:
        """Another attempt begins: nothing of this one is kept, whoever still refers to it."""
        self.replaced = True
        self._listing.shutdown(wait=False, cancel_futures=True)
        for pass_ in self.open.values():
            pass_.clear()

    def open_passes(self) -> list[RecipePass]:
        return list(self.open.values())

    @property
    def all_produced(self) -> bool:
        return self._last and all(each.ended for each in self.open.values())

    def deliver(self, pass_: Pass, block: ReadyBlock) -> None:
        report, mine = block.report, self.open[pass_.key]
        with self.shared.changed:
            rows = mine.splitter.rows
            self.account(mine, block)
            if report.rows:
                mine.arrived(block)
            self.shared.changed.notify_all()
            if rows // mine.splitter.step_rows != mine.splitter.rows // mine.splitter.step_rows:
                self.shared.ready.notify_all()

    def produced(self, pass_: Pass) -> None:
        mine = self.open[pass_.key]
        with self.shared.changed:
            mine.splitter.ended = True
            mine.account.check_budget(self.passes.config.data.bad_record_budget, mine.account.read)
            rows, split = mine.splitter.rows, mine.account.split
            if mine.account.carried.trained == 0 and not mine.splitter.has(0):
                few = f"{rows} records, too few for a batch on each train worker (data.remainder)"
                text = f"the {split} split has {few if rows else 'no records'}"
                raise DataError(text, key="data.remainder")
            self.shared.event(kinds.PassProduced(split=split, epoch=mine.account.epoch))
            self.shared.changed.notify_all()
            self.shared.ready.notify_all()

    def repeats(self, split: str, task: str) -> None:
        self.shared.event(kinds.WorkRepeated(split=split, work=task))

    def refuse_deadly(self, split: str) -> None:
        """Check now, not when the block arrives: its other records may be just as bad."""
        deadly = self.suspects.of(split)
        if deadly and (total := self.totals[split]) is not None:
            budget, first = self.passes.config.data.bad_record_budget, next(iter(deadly.items()))
            of = f"{total} {split} records"
            refuse_over_budget(len(deadly), total, of, budget, BadRecord(*first))

    def account(self, pass_: RecipePass, block: ReadyBlock) -> None:
        split, epoch, report = pass_.account.split, pass_.account.epoch, block.report
        pass_.account.take(report, block.node)
        if pass_.trail is not None and not pass_.trail.report(report):
            nth, number = report.nth, report.shard
            self.differs(
                split, f"{split} shard number {number}: block {nth}, which was trained in part,"
            )
        if report.schemas:
            pass_.schema = self.passes.agree(split, report.schemas)
        self.shared.chain[split].take(report, block.node)
        for bad in report.bad:
            self.shared.event(
                kinds.RecordQuarantined(split=split, epoch=epoch, key=bad.key, reason=bad.reason)
            )
        pass_.account.check_budget(self.passes.config.data.bad_record_budget, pass_.total)


def ids_of(rows: list[BlockSlice], transport: Transport) -> list[int]:
    """The record ids of some rows; fetches them, so no lock may be held."""
    found: list[int] = []
    for part in rows:
        columns, start, stop, _ = transport.rows(part)
        found += columns[ID_COLUMN][start:stop].tolist()
    return found
