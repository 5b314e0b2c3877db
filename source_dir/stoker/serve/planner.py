"""Decides what chain workers do next; part of an attempt, guarded by the service's lock.

A chain worker that has nothing to do claims work here, so what to read next, where, and what to retry
elsewhere is decided as late as possible: by what train workers need and which host asks. Blocks are delivered
in their order within the shard and, if `data.order` is exact, in the order of the shards. What a lost chain
worker had not delivered is given to others, and blocks that were lost with their host are made again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import count, takewhile
from typing import Any
from weakref import WeakValueDictionary

from stoker.errors import DataError
from stoker.messages import Care, Claim, EpochPlan, Failure, Made, Process, Shard
from stoker.read.sources import reread_wait_s
from stoker.serve import items
from stoker.serve.affinity import LOOK_AHEAD
from stoker.serve.items import Held, Holdings, Item, Line, Numbered, ReadyBlock
from stoker.serve.listing import Lister
from stoker.serve.passes import pack_work
from stoker.serve.pool import Pool, is_hungry
from stoker.serve.preparing import Preparing
from stoker.serve.recovery import Recovery

OVERFULL = 1.25
"""Above this multiple of the budget, work in progress ends after its next block."""
Inherited = tuple[EpochPlan, dict[int, dict[int, ReadyBlock]]]
"""Ready blocks of a pass in a replaced attempt: by shard, and by index in it."""


class Planner:
    """See the module.

    Args:
        attempt: whose passes are produced.
        pool: the hosts.
        budget_bytes: of ready blocks; above it and beyond two steps, nothing more starts.
        numbers: numbers claims and work, over all attempts.
        holdings: knows where blocks are.
        lister: lists what passes read; None: the attempt adds lines and their shards.
        before: of the attempt that this one replaces; its ready blocks are used.
    """

    def __init__(
        self,
        attempt: Any,
        pool: Pool,
        budget_bytes: int,
        numbers: count[int],
        holdings: Holdings,
        lister: Lister | None = None,
        before: Planner | None = None,
    ) -> None:
        self.attempt, self.pool, self.budget_bytes, self._lister = attempt, pool, budget_bytes, lister
        self.passes, self.affinity, self.holdings = attempt.passes, attempt.keeping, holdings
        self.exact, self.recovery = self.passes.config.data.order == "exact", Recovery(attempt, pool)
        self.lines: list[Line] = []
        self.open: list[Line] = []
        """Lines whose blocks may still be needed; those that are produced included."""
        self.again: list[Item] = []
        """Items to retry, on another host if possible."""
        self.active: dict[str, Item] = {}
        """Items in progress, by chain worker."""
        self.lost: WeakValueDictionary[tuple[Line, int, int], ReadyBlock] = WeakValueDictionary()
        """Blocks that are made again, by line, shard and index."""
        self.inherited: dict[tuple[str, int], Inherited] = before.hand_over() if before else {}
        self.shard_s: dict[str, float] = {}
        """Smoothed seconds per shard of a split."""
        self._preparing, self._numbers, self.early = Preparing(pool), numbers, Held()
        """`early`: blocks reported but not delivered."""

    def close(self) -> None:
        """Stop: the attempt is over."""
        if self._lister:
            self._lister.close()

    def advance(self) -> None:
        """End passes that are complete and start the next ones; raises why one cannot be listed or ended."""
        for line in [line for line in self.lines if self._listed(line) and line.ended()]:
            self.lines.remove(line)
            self.attempt.produced(line.stream)
        if self._lister:
            self._lister.open(self.lines)
        self.open += [line for line in self.lines if line not in self.open]

    def look(self, now: float) -> list[str]:
        """Called periodically: take back late work; the chain workers whose processes hang and must be ended.

        Raises:
            DataError: late work has failed on every host.
        """
        self.advance()
        self.pool.avoided = self.recovery.patience.avoided(now)
        if self.affinity is not None:
            self.affinity.hosts_are(self.pool.hosts)
        overdue, hung = self.recovery.overdue(self.active, self.again, now)
        for worker in overdue:
            self._take_back(worker, 0.0)
        return hung

    def claim(self, by: Process) -> Claim | None:
        """Work for a chain worker that has none, or none any more; None: there is none now."""
        before = self.active.get(by.worker)
        if before is not None and before.by.token == by.token:
            self._done(by.worker)
        elif before is not None:
            before.died = before.node == by.node  # otherwise its host was lost, and Ray has restarted it here
            if not before.died:
                self.attempt.repeats(before.line.plan.split, before.name)
            self._take_back(by.worker, 0.0)
        item = self._next(by)
        return None if item is None else self._given(item, by)

    def _given(self, item: Item, by: Process) -> Claim | None:
        item.begun(by, next(self._numbers))
        self.active[by.worker] = item
        split, wait_s, died, item.died = item.line.plan.split, 0.0, item.died, False
        names = self.recovery.names_records(item, by.node)
        if died or names:
            start = self.attempt.task_starts(split, item.name, int(died))
            if start is None:
                del self.active[by.worker]
                return None
            names, wait_s = start.names, start.wait_s
        known = dict(self.attempt.suspects.of(split))
        last_try = reread_wait_s(OSError(), item.failures) is None
        care = Care(item.name, self.attempt.number, known, names, last_try)
        work = pack_work(item.shards, item.store, item.stop)
        return Claim(item.number, item.line.plan, work, care, wait_s)

    def upcoming(self, by: Process) -> Shard | None:
        """A chain worker starts its last shard: the one that it will probably get next."""
        item, line = self.active.get(by.worker), next(self.startable(), None)
        if item is None or line is None or not line.work or self.affinity is not None:
            return None
        other = line.plan.split != item.line.plan.split
        return None if other else self._preparing.announce(line.work, by.worker)[1]

    def _next(self, by: Process) -> Item | None:
        now = time.monotonic()
        for item in self.again:
            if item.not_before <= now and self.pool.may_work(by.node, item.tried):
                self.again.remove(item)
                return item
        if not self.pool.may_work(by.node):
            return None
        for line in self.startable():
            if line.work:
                return self._begin(line, by)
        return None

    def startable(self) -> Iterator[Line]:
        """Passes that can start more work now, most urgent first."""
        return takewhile(lambda line: self._listed(line) and self._wanted(line), self.lines)

    def _listed(self, line: Line) -> bool:
        """Whether shards of a pass are known; ready blocks of the attempt before take their place."""
        listed = line.listed()
        for shard in self._inherit(line) if listed else ():
            self._deliver(line, shard)
        return listed

    def hand_over(self) -> dict[tuple[str, int], Inherited]:
        """Give the ready blocks to the attempt that replaces this one, and drop what it cannot use.

        Training returns to a checkpoint, and what was ready beyond it still is.
        """
        found = dict(self.inherited)
        for stream in self.attempt.open_streams():
            line = next((line for line in self.open if line.stream is stream), None)
            if line is None or not self.passes.has_shards(line.plan.split):
                continue
            ready: dict[int, dict[int, ReadyBlock]] = {}
            for block in (*stream.blocks.values(), *line.early()):
                if not block.lost:
                    ready.setdefault(block.report.shard, {})[block.report.nth] = block
            found[stream.account.split, stream.account.epoch] = line.plan, ready
        for line in self.open:
            line.stream.blocks.clear()
            line.shards.clear()
        return found

    def _inherit(self, line: Line) -> list[int]:
        """Put ready blocks of the attempt before into a line; the shards that have such blocks.

        Of a shard it takes those that follow what training has consumed without a gap.
        """
        account = getattr(line.stream, "account", None)  # only passes of recipes have one
        legacy = self.inherited.pop((account.split, account.epoch), None) if account else None
        # An epoch that was resumed may have had blocks of another size.
        if legacy is None or legacy[0] != line.plan:
            return []
        taken = line.inherit(legacy[1])
        for block in taken:
            if block.report.rows:
                self.early.add(block)
        return list(dict.fromkeys(block.report.shard for block in taken))

    def _begin(self, line: Line, by: Process) -> Item:
        split, work, most = line.plan.split, line.work, self._most(line, len(line.work))
        if self.affinity is None:
            shards, store = self._preparing.take(work, by.worker, most), [False] * most
        else:
            # In exact order, blocks that come early must wait, so limit how far ahead a host may choose.
            far = 1 if line.stream.rows_ahead < line.stream.step_rows else 2 * self.pool.slots
            look = min(far, LOOK_AHEAD) if self.exact else LOOK_AHEAD
            shards, store = self.affinity.take_work(split, work, by.node, most, look)
        line.begin(shards)
        line.under_way += 1
        line.shards_under_way += len(shards)
        return Item(line, self._name(split, shards), shards, store)

    def _name(self, split: str, shards: list[Numbered]) -> str:
        return f"{self.recovery.what(split, shards)} (task {next(self._numbers)})"

    def _most(self, line: Line, left: int) -> int:
        return items.shards_per_item(left, self.pool.slots, self.shard_s.get(line.plan.split), line.single)

    def _wanted(self, line: Line) -> bool:
        stream, under_way = line.stream, line.shards_under_way * line.plan.block_records
        short = stream.rows_ahead + under_way < 2 * stream.step_rows
        return short or self._held_bytes() < self.budget_bytes

    @property
    def hungry(self) -> bool:
        """Whether so little is ready that training hosts must help."""
        room = self._held_bytes() < self.budget_bytes / 2
        return bool(self.lines) and is_hungry(self.attempt.open_streams(), room)

    def _held_bytes(self) -> int:
        return items.in_budget(
            [self.early, *(s.held for s in self.attempt.open_streams())], self.budget_bytes
        )

    def reported(self, by: Process, number: int, made: Made) -> bool:
        """A chain worker has made a block; whether it continues.

        Args:
            by: the chain worker.
            number: of its claim.
            made: the block.
        """
        item, report = self.active.get(by.worker), made.report
        if item is None or item.number != number:
            self.holdings.discard(by.node, made.file)
            return False
        line = item.line
        if self.affinity is not None:
            self.affinity.used(by.node, made.cache_usage)
        self.recovery.took(line.plan.split, by.node, report)
        shard = next((shard for n, shard, _ in item.shards if n == report.shard), None)
        block = ReadyBlock(report, by.node, made.file, shard)
        if item.stop is not None:
            self._remade(line, block)
        elif line.report(block):
            if report.rows:
                self.holdings.keep(block)
                self.early.add(block)
            self._deliver(line, report.shard)
        else:
            self.holdings.discard(by.node, made.file)
        for passed in item.reported(report):
            self._close(line, passed)
        return self._goes_on(item)

    def _goes_on(self, item: Item) -> bool:
        line = item.line
        if item.stop is not None:
            return True
        overfull = not line.single and self._held_bytes() > OVERFULL * self.budget_bytes
        leaves = item.node in self.pool.closing
        if item.shards and (leaves or (overfull and not self._needed(item))):
            line.work.extendleft(reversed(self.hand_back(item.by.worker)))
            return False
        return True

    def hand_back(self, worker: str) -> list[Numbered]:
        """End the work of a chain worker after what it has delivered; returns the shards left."""
        item = self.active[worker]
        shards, item.shards = item.shards, []
        self._done(worker)
        return shards

    def _needed(self, item: Item) -> bool:
        """Whether the next two steps wait for this item."""
        line = item.line
        if self.exact and line.turns and line.turns[0] not in {number for number, _, _ in item.shards}:
            return False
        return line.stream.rows_ahead < 2 * line.stream.step_rows

    def leave(self, worker: str) -> Item:
        """Remove the item of a chain worker from those in progress."""
        return self.active.pop(worker)

    def _close(self, line: Line, shard: int) -> None:
        line.close(shard)
        self._deliver(line, shard)

    def _deliver(self, line: Line, number: int) -> None:
        for block in line.deliverable(number):
            if block.report.rows:
                self.early.add(block, -1)
            self.attempt.deliver(line.stream, block)

    def ended(self, by: Process) -> None:
        """A chain worker has finished its work."""
        if by.worker in self.active:
            self._done(by.worker)

    def _done(self, worker: str) -> None:
        item = self.leave(worker)
        self.attempt.suspects.ended(item.name)
        if item.stop is not None:
            self._refuse_not_remade(item)
            return
        line, split = item.line, item.line.plan.split
        line.under_way -= 1
        line.shards_under_way -= item.count
        for shard, _, _ in item.shards:
            self._close(line, shard)
        seconds = item.seconds / item.count
        self.shard_s[split] = max(0.8 * self.shard_s.get(split, seconds) + 0.2 * seconds, 1e-6)

    def failed(self, by: Process, number: int, failure: Failure) -> None:
        """A chain worker failed at its work.

        Raises:
            DataError: it has failed for good.
        """
        item = self.active.get(by.worker)
        if item is not None and item.number == number:
            self._take_back(by.worker, self.recovery.failed(item, failure))

    def _take_back(self, worker: str, wait_s: float) -> None:
        """Requeue the undelivered part of an item."""
        item = self.active[worker]
        if not item.shards:
            self._done(worker)
            return
        self.leave(worker)
        item.tried.add(item.node)
        item.not_before = time.monotonic() + wait_s
        self.again.append(item)

    def lose(self, gone: Iterable[ReadyBlock]) -> None:
        """Blocks are no longer where they were: let chain workers make those again that are needed."""
        gone = {block for block in gone if not block.lost and block.report.rows}
        for line in self.open if gone else ():
            mine = [b for b in (*line.early(), *line.stream.blocks.values()) if b in gone]
            runs: list[list[ReadyBlock]] = []
            for block in sorted(mine, key=lambda b: (b.report.shard, b.report.nth)):
                block.lost = True
                self.lost[line, block.report.shard, block.report.nth] = block
                if runs and _follows(block, runs[-1][-1]):
                    runs[-1].append(block)
                else:
                    runs.append([block])
            for run in runs:
                shards = [(run[0].report.shard, run[0].shard or Shard(""), run[0].report.nth)]
                name = self._name(line.plan.split, shards)
                self.again.insert(0, Item(line, name, shards, [False], stop=run[-1].report.nth + 1))

    def _remade(self, line: Line, block: ReadyBlock) -> None:
        report = block.report
        known = self.lost.pop((line, report.shard, report.nth), None)
        if known is None:
            self.holdings.discard(block.node, block.file)
            return
        if not known.is_remade_as(block):
            raise DataError(f"{self._lost_block(line, known)} differs from what it was: the data has changed")
        self.holdings.move(known, block.node, block.file, gone=True)

    def _refuse_not_remade(self, item: Item) -> None:
        for number, _, first in item.shards:
            for nth in range(first, item.stop or 0):
                if (block := self.lost.get((item.line, number, nth))) is not None:
                    raise DataError(
                        f"{self._lost_block(item.line, block)} does not exist: the data has changed"
                    )

    def _lost_block(self, line: Line, block: ReadyBlock) -> str:
        report = block.report
        what = self.recovery.what(line.plan.split, [(report.shard, block.shard or Shard(""), 0)])
        return f"{what}: block {report.nth}, which was lost with its host and made again,"

    def reconciled(self, stream: Any) -> None:
        """A pass is over: its blocks are not needed."""
        self.open = [line for line in self.open if line.stream is not stream]
        self.again = [item for item in self.again if item.line.stream is not stream]


def _follows(block: ReadyBlock, before: ReadyBlock) -> bool:
    return (block.report.shard, block.report.nth) == (before.report.shard, before.report.nth + 1)
