"""An attempt: passes from their production until they are used up, or until their work fails for good."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from stoker.errors import DataError
from stoker.events import kinds
from stoker.protocol import BadRecord, CarriedAccount, DataCursor, ItemStart
from stoker.serve.accounting import ChainCosts, EpochAccount, refuse_over_budget
from stoker.serve.cursor import Trail, arrival
from stoker.serve.items import Holdings, ReadyBlock
from stoker.serve.passes import Pass, Passes
from stoker.serve.planner import Lister, Planner
from stoker.serve.pool import CacheAffinity, Pool
from stoker.serve.recipe_pass import Pace, RecipePass, Signal, Splitter
from stoker.serve.recovery import Suspects

PASSES_AHEAD = 2
"""How many passes may be produced beyond the consumed one. Without a limit, small data would run ahead for
all epochs and take CPUs from training."""


class Locks(NamedTuple):
    """Conditions of the service's one lock."""

    changed: threading.Condition
    """Threads that decide what to produce wait on it."""
    has_work: threading.Condition
    """Chain workers wait on it for work."""
    ready: threading.Condition
    """Consumers wait on it for their rows; the block that completes a step wakes them."""

    @classmethod
    def new(cls) -> Locks:
        lock = threading.RLock()
        return cls(*(threading.Condition(lock) for _ in range(3)))


class Attempt(ABC):
    """Passes that one planner produces, until their work fails for good."""

    in_order = True
    """Whether a pass is begun only once enough of those before it is ready."""
    planner: Planner | None = None
    """None until there are chain workers."""

    def __init__(
        self,
        number: int,
        locks: Locks,
        suspects: Suspects,
        keeping: CacheAffinity | None = None,
    ) -> None:
        self.number, self.suspects, self.keeping = number, suspects, keeping
        self.changed, self.has_work, self.ready = locks
        self.failure = ""
        self.replaced = False

    @property
    def over(self) -> bool:
        return self.replaced or bool(self.failure)

    @property
    def why_over(self) -> str:
        return self.failure or "this attempt is over"

    @property
    @abstractmethod
    def all_produced(self) -> bool:
        """Whether no further pass is to be produced."""

    @abstractmethod
    def open_passes(self) -> Sequence[Pass]:
        """The passes that may be produced now, the most urgent first."""

    def bound(self) -> set[str]:
        """Chain workers with a state that no other has."""
        return set()

    @abstractmethod
    def deliver(self, pass_: Pass, block: ReadyBlock) -> None:
        """Planner's call: a block in its turn."""

    @abstractmethod
    def produced(self, pass_: Pass) -> None:
        """Planner's call: a pass has delivered all its blocks."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Emit one line for the user."""

    def fail(self, reason: str) -> None:
        with self.changed:
            self.failure = self.failure or reason
            self.changed.notify_all()
            self.ready.notify_all()

    def stalled(self, pass_: Pass, reason: str) -> None:
        """A pass has waited longer than its `stall_s`: raises if that ends this attempt."""
        raise DataError(reason)

    def repeats(self, split: str, task: str) -> None:  # noqa: B027 - a script has no such account
        """Work is done again, because its host or process was lost."""

    def task_starts(self, split: str, task: str, retry: int) -> ItemStart | None:
        """Work starts that was started before: how to begin; None: do not start it."""
        if retry:
            self.repeats(split, task)
        try:
            start = self.suspects.starts(task, split, retry)
            self.refuse_deadly(split)
        except DataError as error:
            self.fail(str(error))
            return None
        return start

    def refuse_deadly(self, split: str) -> None:  # noqa: B027 - a script has no such account
        """Fail if too many records have killed their process."""


class Beginning(NamedTuple):
    workers: int
    epoch: int
    position: DataCursor | None


class RecipeAttempt(Attempt):
    """One start of training: its passes, from production to reconciled accounts."""

    def __init__(
        self,
        number: int,
        workers: int,
        passes: Passes,
        totals: dict[str, int | None],
        start: DataCursor,
        locks: Locks,
        chain: dict[str, ChainCosts],
        event: Callable[[kinds.Event], None],
        keeping: CacheAffinity | None,
        suspects: Suspects,
    ) -> None:
        super().__init__(number, locks, suspects, keeping)
        self.workers, self.passes, self.totals, self.start = workers, passes, totals, start
        self.chain, self.event = chain, event
        self.beginning: Beginning | None = None
        self.ahead = False
        """Whether it produces for train workers that have not begun it yet."""
        self.lost_at: float | None = None
        """When a train worker of the attempt before was lost; None once training has rows again."""
        self.pace, self.stop = Pace(), Signal()
        self.open: dict[tuple[str, int], RecipePass] = {}
        """Passes being produced or consumed, in order; earlier ones are reconciled."""
        self._last = False
        self._coming = self._passes(start)
        self._open()

    def recovered(self, asked: float) -> None:
        """Training has its first rows after a loss, which it requested at this `time.monotonic()`."""
        if self.lost_at is not None:
            now = time.monotonic()
            seconds, data_s = round(now - self.lost_at, 3), round(now - asked, 3)
            self.event(kinds.Recovered(seconds=seconds, data_s=data_s))
            self.lost_at = None

    def _passes(self, start: DataCursor) -> Iterator[RecipePass]:
        due = start.unvalidated
        if due is not None and "val" in self.totals:
            yield self._pass("val", due)
            if due == start.epoch:
                return  # train.max_steps has ended training within this epoch
        for epoch in range(start.epoch, self.passes.config.train.epochs):
            if epoch != start.epoch:
                start = start.model_copy(
                    update={
                        "epoch": epoch, "rows": 0, "done": [], "partial": {}, "books": CarriedAccount(),
                        "plan": self.passes.identity(start.plan.fingerprint, start.plan.unstable),
                        "unvalidated": None,
                    }
                )  # fmt: skip
            for split in self.totals:
                yield self._pass(split, epoch, start if split == "train" else None)

    def _pass(self, split: str, epoch: int, start: DataCursor | None = None) -> RecipePass:
        config = self.passes.config
        splitter = Splitter(
            self.workers, config.train.batch_size, equal=split == "train", remainder=config.data.remainder
        )
        return RecipePass(
            plan=self.passes.plan(split, epoch, start),
            number=epoch,
            exact=config.data.order == "exact",
            has_shards=self.passes.has_shards(split),
            splitter=splitter,
            account=EpochAccount.since(split, epoch, start),
            total=self.totals[split],
            trail=Trail(start) if start else None,
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
            self.event(kinds.RecordsCounted(**counts))
        except DataError as error:
            self.fail(str(error))
            return
        if cut_at is not None:
            return
        if self.keeping is not None:
            figures = self.keeping.figures(*pass_.key, pass_.account.by_node)
            self.event(kinds.CacheUsed(**figures))
            if line := self.keeping.lacking(figures):
                self.event(kinds.Note(text=line))
        del self.open[pass_.key]
        if self.planner is not None:
            self.planner.close(pass_)
        self._open()

    def produce(
        self,
        pool: Pool,
        buffer_bytes: int,
        numbers: count[int],
        holdings: Holdings,
        before: Planner | None = None,
    ) -> None:
        lister = Lister(self, self.passes, self.start, pool)
        self.planner = Planner(self, pool, buffer_bytes, numbers, holdings, lister, before)

    def open_passes(self) -> list[RecipePass]:
        return list(self.open.values())

    @property
    def all_produced(self) -> bool:
        return self._last and all(each.ended for each in self.open.values())

    def note(self, text: str) -> None:
        """Emit one line for the user."""
        with self.changed:
            self.event(kinds.Note(text=text))

    def deliver(self, pass_: Pass, block: ReadyBlock) -> None:
        report, mine = block.report, self.open[pass_.key]
        with self.changed:
            rows = mine.splitter.rows
            self.account(mine, block)
            if report.rows:
                mine.arrived(block)
                if mine.trail is not None and not mine.trail.start.by_row:
                    self.event(kinds.BlocksArrived(epoch=mine.account.epoch, blocks=[arrival(report)]))
            self.changed.notify_all()
            if rows // mine.splitter.step_rows != mine.splitter.rows // mine.splitter.step_rows:
                self.ready.notify_all()

    def produced(self, pass_: Pass) -> None:
        mine = self.open[pass_.key]
        with self.changed:
            mine.splitter.end()
            mine.account.check_budget(self.passes.config.data.bad_record_budget, mine.account.read)
            rows, split = mine.splitter.rows, mine.account.split
            if mine.account.carried.trained == 0 and not mine.splitter.has(0):
                few = f"{rows} records, too few for a batch on each train worker (data.remainder)"
                raise DataError(f"the {split} split has {few if rows else 'no records'}")
            self.event(kinds.PassProduced(split=split, epoch=mine.account.epoch))
            self.changed.notify_all()
            self.ready.notify_all()

    def repeats(self, split: str, task: str) -> None:
        self.event(kinds.WorkRepeated(split=split, work=task))

    def refuse_deadly(self, split: str) -> None:
        """Check now, not when the block arrives: its other records may be just as bad."""
        deadly = self.suspects.of(split)
        if deadly and (total := self.totals[split]) is not None:
            budget, first = self.passes.config.data.bad_record_budget, next(iter(deadly.items()))
            refuse_over_budget(len(deadly), total, f"{total} {split} records", budget, BadRecord(*first))

    def account(self, pass_: RecipePass, block: ReadyBlock) -> None:
        split, epoch, report = pass_.account.split, pass_.account.epoch, block.report
        pass_.reported(report, block.node)
        if report.schemas:
            pass_.schema = self.passes.agree(split, report.schemas)
        if not block.counted:
            block.counted = True
            self.chain[split].take(report, block.node)
        for bad in report.bad:
            self.event(kinds.RecordQuarantined(split=split, epoch=epoch, key=bad.key, reason=bad.reason))
        pass_.account.check_budget(self.passes.config.data.bad_record_budget, pass_.total)
