"""Decides what chain workers do next; part of an attempt, guarded by the service's lock.

A chain worker that has nothing to do claims work here, so what to read next, where, and what to retry
elsewhere is decided as late as possible: by what train workers need and which host asks. Blocks are delivered
in their order within the shard and, if `data.order` is exact, in the order of the shards. What a lost chain
worker had not delivered is given to others, and blocks that were lost with their host are made again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from stoker.errors import DataError, explain
from stoker.protocol import Care, Claim, DataCursor, Failure, Made, PassPlan, Process, Shard
from stoker.read.sources import reread_wait_s
from stoker.serve import items
from stoker.serve.items import Held, Holdings, Item, Numbered, ReadyBlock
from stoker.serve.passes import Pass, Passes, pack_work
from stoker.serve.pool import LOOK_AHEAD, Pool, is_hungry
from stoker.serve.recovery import Recovery

if TYPE_CHECKING:
    from stoker.serve.attempt import Attempt


OVERFULL = 1.25
"""Above this multiple of the budget, work in progress ends after its next block."""
ABANDONED_S = 10.0
"""Time for a chain worker to finish its block after its pass was abandoned."""
Inherited = tuple[PassPlan, dict[int, dict[int, ReadyBlock]]]
"""Ready blocks of a pass in a replaced attempt: by shard, and by index in it."""


class Planner:
    """See the module. Above `budget_bytes` of ready blocks and beyond two steps, nothing more starts.

    Without a `lister`, the attempt adds passes and their shards. What the planner `before` has ready is used.
    """

    def __init__(
        self,
        attempt: Attempt,
        pool: Pool,
        budget_bytes: int,
        numbers: count[int],
        holdings: Holdings,
        lister: Lister | None = None,
        before: Planner | None = None,
    ) -> None:
        self.attempt, self.pool, self.budget_bytes, self._lister = attempt, pool, budget_bytes, lister
        self.affinity, self.holdings = attempt.keeping, holdings
        self.recovery = Recovery(attempt, pool)
        self.passes: list[Pass] = []
        """Passes that are being produced."""
        self.open: list[Pass] = []
        """Passes whose blocks may still be needed."""
        self.again: list[Item] = []
        """Items to retry, on another host if possible."""
        self.active: dict[str, Item] = {}
        """Items in progress, by chain worker."""
        self.lost: WeakValueDictionary[tuple[Pass, int, int], ReadyBlock] = WeakValueDictionary()
        """Blocks that are made again, by pass, shard and index."""
        self.inherited: dict[tuple[str, int], Inherited] = before.hand_over() if before else {}
        self._abandoned: dict[str, float] = {}
        """Chain workers that work on abandoned passes, and when they are ended if they still do."""
        self.shard_s: dict[str, float] = {}
        """Smoothed seconds per shard of a split."""
        self._preparing, self._numbers, self.early = Preparing(pool), numbers, Held()
        """`early`: blocks reported but not delivered."""

    def end(self) -> None:
        if self._lister:
            self._lister.end()

    def advance(self) -> None:
        """End passes that are complete and start the next ones; raises why one cannot be listed or ended."""
        for pass_ in [pass_ for pass_ in self.passes if self._listed(pass_) and pass_.complete()]:
            self.passes.remove(pass_)
            self.attempt.produced(pass_)
        if self._lister:
            self.passes += self._lister.begin(self.attempt.open_passes())
        self.open += [pass_ for pass_ in self.passes if pass_ not in self.open]

    def look(self, now: float) -> list[str]:
        """Called periodically: take back late work; the chain workers whose processes hang and must end."""
        self.advance()
        self.pool.avoided = self.recovery.patience.avoided(now)
        if self.affinity is not None:
            self.affinity.hosts_are(self.pool.hosts)
        self.pool.bound = self.attempt.bound()
        overdue, hung = self.recovery.overdue(self.active, self.again, now)
        for worker in overdue:
            self._take_back(worker, 0.0)
        late = [worker for worker, due in self._abandoned.items() if now > due]
        for worker in late:
            del self._abandoned[worker]
        return hung + late

    def claim(self, by: Process) -> Claim | None:
        """Work for a chain worker that has none, or none any more; None: there is none now."""
        self._abandoned.pop(by.worker, None)
        before = self.active.get(by.worker)
        if before is not None and before.by.token == by.token:
            self._done(by.worker)
        elif before is not None:
            before.died = before.node == by.node  # otherwise its host was lost, and Ray has restarted it here
            if not before.died:
                self.attempt.repeats(before.pass_.plan.split, before.name)
            self._take_back(by.worker, 0.0)
        item = self._next(by)
        return None if item is None else self._given(item, by)

    def _given(self, item: Item, by: Process) -> Claim | None:
        item.begun(by, next(self._numbers))
        self.active[by.worker] = item
        if item.stop is None:
            item.pass_.begin(item.shards, by.worker)
        split, wait_s, died, item.died = item.pass_.plan.split, 0.0, item.died, False
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
        return Claim(item.number, item.pass_.plan, work, care, wait_s)

    def upcoming(self, by: Process) -> Shard | None:
        """A chain worker starts its last shard: the one that it will probably get next."""
        item, pass_ = self.active.get(by.worker), next(self.startable(by.worker), None)
        if item is None or pass_ is None or self.affinity is not None:
            return None
        other = pass_.plan.split != item.pass_.plan.split
        return None if other else self._preparing.announce(self._near(pass_), by.worker)[1]

    def _next(self, by: Process) -> Item | None:
        now = time.monotonic()
        for item in self.again:
            if item.not_before <= now and self.pool.may_work(by.node, item.tried):
                self.again.remove(item)
                return item
        may_work = self.pool.may_work(by.node)
        for pass_ in self.startable(by.worker):
            if may_work or pass_.is_reader(by.worker):
                return self._begin(pass_, by)
        return None

    def startable(self, worker: str) -> Iterator[Pass]:
        """Passes that can start work of a chain worker now, most urgent first."""
        passes = list(self.passes)
        if not self.attempt.in_order:
            # Of passes equally far ahead of their consumers, the one that got work longest ago is first.
            passes.sort(key=lambda each: (each.rows_ahead + each.shards_under_way, each.served))
        for pass_ in passes:
            listed = self._listed(pass_)
            offers = listed and pass_.offers(worker, self.pool.is_lost)
            if listed and (self._wanted(pass_) or (offers and pass_.waited_for)):
                if offers:
                    yield pass_
            elif self.attempt.in_order:
                return

    def _listed(self, pass_: Pass) -> bool:
        """Whether shards of a pass are known; ready blocks of the attempt before take their place."""
        listed = pass_.listed()
        for shard in self._inherit(pass_) if listed else ():
            self._deliver(pass_, shard)
        return listed

    def hand_over(self) -> dict[tuple[str, int], Inherited]:
        """Drop all blocks; the ready ones are for the next attempt, which may begin before them."""
        found = dict(self.inherited)
        for pass_ in self.attempt.open_passes():
            if pass_ not in self.open or not pass_.has_shards:
                continue
            ready: dict[int, dict[int, ReadyBlock]] = {}
            for block in (*pass_.needed, *pass_.early()):
                if not block.lost:
                    ready.setdefault(block.report.shard, {})[block.report.nth] = block
            found[pass_.key] = pass_.plan, ready
        for pass_ in self.open:
            pass_.clear()
        return found

    def _inherit(self, pass_: Pass) -> list[int]:
        """Put ready blocks of the attempt before into a pass, as far as there is no gap; their shards."""
        legacy = self.inherited.pop(pass_.key, None)
        # An epoch that was resumed may have had blocks of another size.
        if legacy is None or legacy[0] != pass_.plan:
            return []
        taken = pass_.inherit(legacy[1])
        for block in taken:
            if block.report.rows:
                self.early.add(block)
        return list(dict.fromkeys(block.report.shard for block in taken))

    def _begin(self, pass_: Pass, by: Process) -> Item:
        split, work, most = pass_.plan.split, self._near(pass_), self._most(pass_, pass_.left)
        if self.affinity is None:
            shards, store = self._preparing.take(work, by.worker, most), [False] * most
        else:
            # In exact order, blocks that come early must wait, so limit how far ahead a host may choose.
            far = 1 if pass_.rows_ahead < pass_.step_rows else 2 * self.pool.slots
            look = min(far, LOOK_AHEAD) if pass_.exact else LOOK_AHEAD
            shards, store = self.affinity.take_work(split, work, by.node, most, look)
        pass_.under_way += 1
        pass_.served = next(self._numbers)
        pass_.shards_under_way += len(shards)
        return Item(pass_, self._name(split, shards), shards, store)

    def _near(self, pass_: Pass) -> deque[Numbered]:
        """The shards of a pass that the next item is chosen from: as many as anything here looks at."""
        return pass_.near(LOOK_AHEAD + items.MOST_SHARDS + 2 * self.pool.slots)

    def _name(self, split: str, shards: list[Numbered]) -> str:
        return f"{self.recovery.what(split, shards)} (task {next(self._numbers)})"

    def _most(self, pass_: Pass, left: int) -> int:
        if pass_.streams:
            return 1
        return items.shards_per_item(left, self.pool.slots, self.shard_s.get(pass_.plan.alike))

    def _wanted(self, pass_: Pass) -> bool:
        short = pass_.rows_ahead + pass_.shards_under_way * pass_.plan.block_records < 2 * pass_.step_rows
        return short or self._held_bytes() < self.budget_bytes

    @property
    def hungry(self) -> bool:
        room = self._held_bytes() < self.budget_bytes / 2
        return bool(self.passes) and is_hungry(self.attempt.open_passes(), room)

    def _held_bytes(self) -> int:
        return items.in_budget([self.early, *(s.held for s in self.attempt.open_passes())], self.budget_bytes)

    def reported(self, by: Process, number: int, made: Made) -> bool:
        self._abandoned.pop(by.worker, None)
        item, report = self.active.get(by.worker), made.report
        if item is None or item.number != number:
            self.holdings.discard(by.node, made.file)
            return False
        pass_ = item.pass_
        if self.affinity is not None:
            self.affinity.used(by.node, made.cache_usage)
        self.recovery.patience.took(pass_.plan.alike, by.node, report.seconds)
        shard = next((shard for n, shard, _ in item.shards if n == report.shard), None)
        block = ReadyBlock(report, by.node, made.file, shard)
        if item.stop is not None:
            self._remade(pass_, block)
        elif pass_.report(block):
            if report.rows:
                self.holdings.keep(block)
                self.early.add(block)
            self._deliver(pass_, report.shard)
        else:
            self.holdings.discard(by.node, made.file)
        for passed in item.reported(report):
            self._close(pass_, passed)
        return self._goes_on(item)

    def _goes_on(self, item: Item) -> bool:
        pass_ = item.pass_
        if item.stop is not None:
            return True
        if pass_.streams and item.shards:
            return self._reads_on(item)
        overfull = self._held_bytes() > OVERFULL * self.budget_bytes
        leaves = item.node in self.pool.closing
        if item.shards and (leaves or (overfull and not self._needed(item))):
            pass_.work.extendleft(reversed(self.hand_back(item.by.worker)))
            return False
        return True

    def _reads_on(self, item: Item) -> bool:
        """Whether a chain worker makes the next batch of its stream now, or what it asks for."""
        pass_, worker, lost = item.pass_, item.by.worker, self.pool.is_lost
        enough = item.node in self.pool.closing or pass_.far_ahead(item.shards[0][0])
        if not (enough or any(each.offers(worker, lost) and each.waited_for for each in self.passes)):
            return True
        pass_.work.extend(self.hand_back(worker))
        return False

    def hand_back(self, worker: str) -> list[Numbered]:
        """End the work of a chain worker after what it has delivered; returns the shards left."""
        item = self.active[worker]
        shards, item.shards = item.shards, []
        self._done(worker)
        return shards

    def _needed(self, item: Item) -> bool:
        """Whether the next two steps wait for this item."""
        pass_ = item.pass_
        if pass_.exact and pass_.turn not in {number for number, _, _ in item.shards}:
            return False
        return pass_.rows_ahead < 2 * pass_.step_rows

    def leave(self, worker: str) -> Item:
        """Remove the item of a chain worker from those in progress."""
        return self.active.pop(worker)

    def _close(self, pass_: Pass, shard: int) -> None:
        pass_.close(shard)
        self._deliver(pass_, shard)

    def _deliver(self, pass_: Pass, number: int) -> None:
        for block in pass_.deliverable(number):
            if block.report.rows:
                self.early.add(block, -1)
            self.attempt.deliver(pass_, block)

    def ended(self, by: Process) -> None:
        if by.worker in self.active:
            self._done(by.worker)

    def _done(self, worker: str) -> None:
        item = self.leave(worker)
        self.attempt.suspects.ended(item.name)
        if item.stop is not None:
            self._refuse_not_remade(item)
            return
        pass_, alike = item.pass_, item.pass_.plan.alike
        pass_.under_way -= 1
        pass_.shards_under_way -= item.count
        for shard, _, _ in item.shards:
            self._close(pass_, shard)
        seconds = item.seconds / item.count
        self.shard_s[alike] = max(0.8 * self.shard_s.get(alike, seconds) + 0.2 * seconds, 1e-6)

    def failed(self, by: Process, number: int, failure: Failure) -> None:
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
        for pass_ in self.open if gone else ():
            mine = [b for b in (*pass_.early(), *pass_.needed) if b in gone]
            runs: list[list[ReadyBlock]] = []
            for block in sorted(mine, key=lambda b: (b.report.shard, b.report.nth)):
                block.lost = True
                self.lost[pass_, block.report.shard, block.report.nth] = block
                if runs and _follows(block, runs[-1][-1]):
                    runs[-1].append(block)
                else:
                    runs.append([block])
            for run in runs:
                shards = [(run[0].report.shard, run[0].shard or Shard(""), run[0].report.nth)]
                name = self._name(pass_.plan.split, shards)
                self.again.insert(0, Item(pass_, name, shards, [False], stop=run[-1].report.nth + 1))

    def _remade(self, pass_: Pass, block: ReadyBlock) -> None:
        report = block.report
        known = self.lost.pop((pass_, report.shard, report.nth), None)
        if known is None:
            self.holdings.discard(block.node, block.file)
            return
        if not known.is_remade_as(block):
            raise DataError(
                f"{self._lost_block(pass_, known)} differs from what it was: the data has changed"
            )
        self.holdings.move(known, block.node, block.file)

    def _refuse_not_remade(self, item: Item) -> None:
        for number, _, first in item.shards:
            for nth in range(first, item.stop or 0):
                if (block := self.lost.get((item.pass_, number, nth))) is not None:
                    raise DataError(
                        f"{self._lost_block(item.pass_, block)} does not exist: the data has changed"
                    )

    def _lost_block(self, pass_: Pass, block: ReadyBlock) -> str:
        report = block.report
        what = self.recovery.what(pass_.plan.split, [(report.shard, block.shard or Shard(""), 0)])
        return f"{what}: block {report.nth}, which was lost with its host and made again,"

    def abandon(self, pass_: Pass) -> None:
        """The rest of a pass is not needed: end chain workers that still work on it after `ABANDONED_S`."""
        for worker in [worker for worker, item in self.active.items() if item.pass_ is pass_]:
            self.leave(worker)
            self._abandoned[worker] = time.monotonic() + ABANDONED_S
        for block in pass_.early():
            if block.report.rows:
                self.early.add(block, -1)
        if pass_ in self.passes:
            self.passes.remove(pass_)
        self.close(pass_)

    def close(self, pass_: Pass) -> None:
        self.open = [each for each in self.open if each is not pass_]
        self.again = [item for item in self.again if item.pass_ is not pass_]


def _follows(block: ReadyBlock, before: ReadyBlock) -> bool:
    return (block.report.shard, block.report.nth) == (before.report.shard, before.report.nth + 1)


BLOCKS_AHEAD_PER_SLOT = 2
"""Blocks of a recipe's dataset that may wait for preprocessing, per slot."""


class Lister:
    """Lists the shards of upcoming passes in a thread, because there may be many or listing is slow."""

    def __init__(self, attempt: Attempt, passes: Passes, start: DataCursor, pool: Pool) -> None:
        self.attempt, self.passes, self.start, self.pool = attempt, passes, start, pool
        self._begun: set[tuple[str, int]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shards")

    def end(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def begin(self, passes: Iterable[Pass]) -> list[Pass]:
        new = [each for each in passes if each.key not in self._begun]
        for pass_ in new:
            self._begun.add(pass_.key)
            if not pass_.has_shards:
                self._thread.submit(self._execute, pass_)
                continue
            start = self.start if pass_.key == ("train", self.start.epoch) else None
            pass_.coming = self._thread.submit(self.passes.rest, pass_.plan, start)
            pass_.coming.add_done_callback(lambda _: self._tell())
        return new

    def _tell(self) -> None:
        with self.attempt.changed:
            self.attempt.has_work.notify_all()

    def _execute(self, pass_: Pass) -> None:
        """Thread: turn the blocks of a recipe's dataset into shards, a few ahead of the chain."""
        changed = self.attempt.changed
        try:
            for shard in self.passes.blocks(pass_.plan):
                with changed:
                    pass_.work.append(shard)
                    self.attempt.has_work.notify()
                    while len(pass_.work) > BLOCKS_AHEAD_PER_SLOT * max(self.pool.slots, 1):
                        if self.attempt.over:
                            break
                        changed.wait(1.0)
                    if self.attempt.over:
                        return
        except Exception as error:
            self.attempt.fail(explain(error))
        with changed:
            pass_.listing = False
            self.attempt.has_work.notify_all()


PREPARED_S = 10.0
"""For this long, other chain workers leave a shard to the one that prepares it."""


class Preparing:
    """Which chain worker is fetching which shard before it is given it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._shards: dict[str, tuple[float, Numbered]] = {}
        """By chain worker: since when, and which."""

    def announce(self, work: deque[Numbered], process: str) -> Numbered:
        (shard,) = self._first(work, process, 1)
        self._shards[process] = time.monotonic(), shard
        return shard

    def take(self, work: deque[Numbered], process: str, most: int) -> list[Numbered]:
        """Remove the next shards of a chain worker: first the one that it prepares, last those of others."""
        shards = self._first(work, process, most)
        for shard in shards:
            work.remove(shard)
        return shards

    def _first(self, work: deque[Numbered], process: str, most: int) -> list[Numbered]:
        own = self._shards.pop(process, (0.0, None))[1]
        near = list(islice(work, most if own is None and not self._shards else most + 2 * self._pool.slots))
        now = time.monotonic()
        self._shards = {p: (at, shard) for p, (at, shard) in self._shards.items() if now - at < PREPARED_S}
        others = [shard for _, shard in self._shards.values()]
        return sorted(near, key=lambda shard: (shard != own, shard in others))[:most]
