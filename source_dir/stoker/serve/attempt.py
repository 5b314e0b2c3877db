"""Head: one start of training: its passes, from production to reconciled accounts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from stoker.errors import DataError, SchemaError
from stoker.messages import BadRecord, CarriedAccount, DataCursor, Start
from stoker.serve.accounting import ChainCosts, EpochAccount, refuse_over_budget
from stoker.serve.affinity import CacheAffinity
from stoker.serve.cursor import Trail, arrival
from stoker.serve.items import Holdings, ReadyBlock
from stoker.serve.listing import Lister
from stoker.serve.passes import Passes
from stoker.serve.planner import Planner
from stoker.serve.pool import Pool
from stoker.serve.signals import OneTimeSignal, Pace, Signal
from stoker.serve.splitter import Splitter
from stoker.serve.streams import Stream
from stoker.serve.suspects import Suspects

STREAMS_AHEAD = 2
"""How many passes may be produced beyond the consumed one. Without a limit, small data would run ahead for
all epochs and take CPUs from training."""


class Beginning(NamedTuple):
    """Head: where an attempt begins, and with how many train workers."""

    workers: int
    epoch: int
    position: DataCursor | None


class Attempt:
    """Head: see the module. Part of the coordinator, whose lock guards it.

    Args:
        number: from 0.
        workers: number of train workers.
        passes: what to read.
        totals: records of each split; None: unknown.
        start: where training starts.
        changed: of the coordinator's lock; notified when there may be something else to produce.
        ready: of the same lock; notified when ranks may continue.
        chain: receives chain costs, by split.
        event: receives (event, values).
        keeping: cache affinity of hosts; None: no cache.
        suspects: records that kill their process.
    """

    def __init__(
        self,
        number: int,
        workers: int,
        passes: Passes,
        totals: dict[str, int | None],
        start: DataCursor,
        changed: threading.Condition,
        ready: threading.Condition,
        chain: dict[str, ChainCosts],
        event: Callable[..., None],
        keeping: CacheAffinity | None,
        suspects: Suspects,
    ) -> None:
        self.suspects = suspects
        self.number, self.workers, self.passes, self.totals = number, workers, passes, totals
        self.changed, self.ready, self.has_work = changed, ready, changed
        self.chain, self.event, self.keeping = chain, event, keeping
        self.failure = ""
        self.beginning: Beginning | None = None
        self.ahead = False
        """Whether it produces for train workers that have not begun it yet."""
        self.lost_at: float | None = None
        """When a train worker of the attempt before was lost; None once training has rows again."""
        self.replaced = False
        """Whether a later attempt has begun."""
        self.pace, self.stop, self.checkpoint = Pace(), Signal(), OneTimeSignal(workers)
        self.streams: dict[tuple[str, int], Stream] = {}
        """Passes being produced or consumed, in order; earlier ones are reconciled."""
        self.planner: Planner | None = None
        """Decides what to read next; None until there are chain workers."""
        self._last = False
        """Whether no further passes will be opened."""
        self._coming = self._passes(start)
        self._open()

    @property
    def over(self) -> bool:
        return self.replaced or bool(self.failure)

    @property
    def why_over(self) -> str:
        return self.failure or "this attempt is over"

    def fail(self, reason: str) -> None:
        """End this attempt; the first reason is kept."""
        with self.changed:
            self.failure = self.failure or reason
            self.changed.notify_all()
            self.ready.notify_all()

    def recovered(self, asked: float) -> None:
        """Training has its first rows after a loss, which it requested at this `time.monotonic()`."""
        if self.lost_at is not None:
            now = time.monotonic()
            self.event("recovered", seconds=round(now - self.lost_at, 3), data_s=round(now - asked, 3))
            self.lost_at = None

    def _passes(self, start: DataCursor) -> Iterator[Stream]:
        config = self.passes.config
        remainder = config.data.remainder
        due = start.unvalidated
        if due is not None and "val" in self.totals:
            splitter = Splitter(self.workers, config.train.batch_size, equal=False)
            yield Stream(splitter, EpochAccount("val", due), self.totals["val"])
            if due == start.epoch:
                return  # train.max_steps has ended training within this epoch
        for epoch in range(start.epoch, config.train.epochs):
            for split, total in self.totals.items():
                train = split == "train"
                splitter = Splitter(self.workers, config.train.batch_size, equal=train, remainder=remainder)
                if not train:
                    yield Stream(splitter, EpochAccount(split, epoch), total)
                    continue
                if epoch != start.epoch:
                    start = start.model_copy(
                        update={
                            "epoch": epoch, "rows": 0, "done": [], "partial": {}, "books": CarriedAccount(),
                            "plan": self.passes.identity(start.plan.fingerprint, start.plan.unstable),
                            "unvalidated": None,
                        }
                    )  # fmt: skip
                yield Stream(splitter, EpochAccount(split, epoch, carried=start.books), total, Trail(start))

    def _open(self) -> None:
        """Open the passes that may be produced now."""
        while len(self.streams) <= STREAMS_AHEAD:
            stream = next(self._coming, None)
            if stream is None:
                self._last = True
                return
            self.streams[stream.account.split, stream.account.epoch] = stream

    def reconcile(self, stream: Stream, remaining: list[int], cut_at: int | None = None) -> None:
        """Close the account of a pass and move to the next.

        Args:
            stream: every rank has reported what it used of it.
            remaining: ids of the rows that no worker took.
            cut_at: the steps after which a limit ends the pass and the training; None: it is complete.
        """
        which = (stream.account.split, stream.account.epoch)
        try:
            self.event("records", **stream.reconcile(remaining) if cut_at is None else stream.cut(cut_at))
        except DataError as error:
            self.fail(str(error))
            return
        if cut_at is not None:
            return
        if self.keeping is not None:
            figures = self.keeping.figures(*which, stream.account.by_node)
            self.event("cache", **figures)
            if line := self.keeping.lacking(figures):
                self.event("note", text=line)
        del self.streams[which]
        if self.planner is not None:
            self.planner.reconciled(stream)
        self._open()

    def produce(
        self,
        pool: Pool,
        buffer_bytes: int,
        numbers: count[int],
        holdings: Holdings,
        before: Planner | None = None,
    ) -> None:
        """Let chain workers request work.

        Args:
            pool: the hosts.
            buffer_bytes: budget for ready blocks.
            numbers: numbers claims.
            holdings: knows where blocks are.
            before: of the attempt that this one replaces.
        """
        self.planner = Planner(self, pool, buffer_bytes, numbers, holdings, Lister(self, pool), before)

    def open_streams(self) -> list[Stream]:
        """The passes that may be produced now, in order."""
        return list(self.streams.values())

    @property
    def all_produced(self) -> bool:
        """Whether all records of the run have been preprocessed."""
        return self._last and all(stream.ended for stream in self.streams.values())

    def note(self, text: str) -> None:
        """Emit one line for the user."""
        with self.changed:
            self.event("note", text=text)

    def deliver(self, stream: Stream, block: ReadyBlock) -> None:
        """Planner's call: a block in its turn."""
        report = block.report
        with self.changed:
            rows = stream.splitter.rows
            if self.account(stream, block) and report.rows:
                stream.arrived(block)
                if stream.trail is not None and not stream.trail.start.by_row:
                    self.event("blocks", epoch=stream.account.epoch, blocks=[arrival(report)])
            self.changed.notify_all()
            if rows // stream.splitter.step_rows != stream.splitter.rows // stream.splitter.step_rows:
                self.ready.notify_all()

    def produced(self, stream: Stream) -> None:
        """A pass has delivered all its blocks."""
        with self.changed:
            stream.splitter.end()
            stream.account.check_budget(self.passes.config.data.bad_record_budget, stream.account.read)
            rows, split = stream.splitter.rows, stream.account.split
            if stream.account.carried.trained == 0 and stream.splitter.share(0, 0) is None:
                few = f"{rows} records, too few for a batch on each train worker (data.remainder)"
                raise DataError(f"the {split} split has {few if rows else 'no records'}")
            self.event("produced", split=stream.account.split, epoch=stream.account.epoch)
            self.changed.notify_all()
            self.ready.notify_all()

    def repeats(self, split: str, task: str) -> None:
        """Work is done again, because its host or process was lost."""
        self.event("work_repeated", split=split, work=task)

    def task_starts(self, split: str, task: str, retry: int) -> Start | None:
        """A restarted task starts: how to begin; None: do not start it."""
        if retry:
            self.repeats(split, task)
        try:
            start = self.suspects.starts(task, split, retry)
            deadly = self.suspects.of(split)
            if deadly and (total := self.totals[split]) is not None:
                # Check now, not when the block arrives: its other records may be just as bad.
                budget, first = self.passes.config.data.bad_record_budget, next(iter(deadly.items()))
                of = f"{total} {split} records"
                refuse_over_budget(len(deadly), total, of, budget, BadRecord(*first))
        except DataError as error:
            self.fail(str(error))
            return None
        return start

    def account(self, stream: Stream, block: ReadyBlock) -> bool:
        """Count the report of a block; False if it was already counted."""
        split, epoch, report = stream.account.split, stream.account.epoch, block.report
        if not stream.reported(report, block.node):
            return False
        if report.schemas:
            try:
                stream.schema = self.passes.agree(split, report.schemas)
            except SchemaError as error:
                self.fail(str(error))
                return False
        if not block.counted:
            block.counted = True
            self.chain[split].take(report, block.node)
        for bad in report.bad:
            self.event("quarantined", split=split, epoch=epoch, key=bad.key, reason=bad.reason)
        try:
            stream.account.check_budget(self.passes.config.data.bad_record_budget, stream.total)
        except DataError as error:
            self.fail(str(error))
        return True
