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
from itertools import islice
from weakref import WeakValueDictionary

from stoker.errors import DataError, Failure
from stoker.protocol import Claim, Made, Process, RetryContext, Shard, Work
from stoker.read.sources import reread_wait_s
from stoker.serve.items import ReadyBlock
from stoker.serve.passes import Attempt, Pass
from stoker.serve.pool import LOOK_AHEAD, Pool
from stoker.serve.recovery import MOST_SHARDS, Item, Recovery, shards_per_item

HUNGRY_STEPS, STARVED_STEPS = 8, 2
"""With fewer ready steps than this, training hosts help to preprocess: the first if there is room for more
blocks, the second in any case."""
OVERFULL = 1.25
"""Above this multiple of the budget, work in progress ends after its next block."""
ABANDONED_S = 10.0
"""Time for a chain worker to finish its block after its pass was abandoned."""


class Planner:
    """See the module."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt, self.shared = attempt, attempt.shared
        self.recovery = Recovery(attempt, self.shared.pool)
        self.passes: list[Pass] = []
        """Passes that are being produced."""
        self.open: list[Pass] = []
        """Passes whose blocks may still be needed."""
        self.again: list[Item] = []
        self.active: dict[str, Item] = {}
        """Items in progress, by chain worker."""
        self.lost: WeakValueDictionary[tuple[Pass, int, int], ReadyBlock] = WeakValueDictionary()
        """Blocks that are made again, by pass, shard and index."""
        self._abandoned: dict[str, float] = {}
        """Chain workers that work on abandoned passes, and when they are ended if they still do."""
        self.shard_s: dict[str, float] = {}
        """Smoothed seconds per shard of a split."""
        self.early_bytes = 0
        """Of the blocks reported but not delivered."""
        self._preparing = Preparing(self.shared.pool)

    def advance(self) -> None:
        """End passes that are complete and start the next ones; raises why one cannot be listed or ended."""
        for pass_ in [pass_ for pass_ in self.passes if pass_.complete()]:
            self.passes.remove(pass_)
            self.attempt.produced(pass_)
        self.passes += self.attempt.begun()
        self.open += [pass_ for pass_ in self.passes if pass_ not in self.open]

    def look(self, now: float) -> list[str]:
        """Called periodically: take back late work; the chain workers whose processes hang and must end."""
        self.advance()
        self.shared.pool.avoided = self.recovery.patience.avoided(now)
        if self.shared.affinity is not None:
            self.shared.affinity.hosts_are(self.shared.pool.hosts)
        self.shared.pool.bound = self.attempt.bound()
        overdue, hung = self.recovery.overdue(self.active, self.again, now)
        for worker in overdue:
            self._take_back(worker, 0.0)
        # Those that have copies of a dataset end only if its next pass waits too long.
        due = [worker for worker, at in self._abandoned.items() if now > at]
        late = [worker for worker in due if worker not in self.shared.pool.bound]
        for worker in late:
            del self._abandoned[worker]
        return hung + late

    def claim(self, by: Process) -> Claim | None:
        """Work for a chain worker that has none, or none any more; None: there is none now."""
        self._abandoned.pop(by.worker, None)
        self.ended(by)
        self.advance()  # what has ended may complete a pass
        self.begins(by)
        item = self._next(by)
        return None if item is None else self._given(item, by)

    def _given(self, item: Item, by: Process) -> Claim | None:
        item.by, item.number, item.quiet_since = by, next(self.shared.numbers), time.monotonic()
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
            wait_s, names = start
        # What a script's loader tells is for messages alone, so it costs no record.
        names = names or (item.late > 0 and not self.attempt.in_order)
        known = self._known(item)
        # The good records of a lost block could be read.
        last_try = item.stop is None and reread_wait_s(OSError(), item.failures) is None
        care = RetryContext(item.name, known, names, last_try)
        return Claim(item.number, item.pass_.plan, [*item.shards], care, wait_s)

    def _known(self, item: Item) -> dict[str, str]:
        """Records to quarantine unread: name → reason. What is made again keeps its bad records, which may be
        readable now; a record that is deadly elsewhere may be a good one of a lost block."""
        first_try = item.stop is not None and not item.tried
        known = {} if first_try else dict(self.attempt.suspects.of(item.pass_.plan.split))
        for each in item.shards:
            known |= item.pass_.quarantined.get(each.number, {})
            for nth in range(each.skip, each.stop or 0):
                if (block := self.lost.get((item.pass_, each.number, nth))) is not None:
                    known |= {bad.called: bad.reason for bad in block.report.bad}
        return known

    def upcoming(self, by: Process) -> Shard | None:
        """A chain worker starts its last shard: the one that it will probably get next."""
        item, pass_ = self.active.get(by.worker), next(self.startable(by.worker), None)
        if item is None or pass_ is None or self.shared.affinity is not None:
            return None
        other = pass_.plan.split != item.pass_.plan.split
        return None if other else self._preparing.announce(self._near(pass_), by.worker).shard

    def _next(self, by: Process) -> Item | None:
        now = time.monotonic()
        for item in self.again:
            if item.not_before <= now and self.shared.pool.may_work(by.node, item.tried):
                self.again.remove(item)
                return item
        may_work = self.shared.pool.may_work(by.node)
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
            listed = pass_.listed()
            offers = listed and pass_.offers(worker, self.shared.pool.is_lost)
            if listed and (self._wanted(pass_) or (offers and pass_.waited_for)):
                if offers:
                    yield pass_
            elif self.attempt.in_order:
                return

    def _begin(self, pass_: Pass, by: Process) -> Item:
        split, work = pass_.plan.split, self._near(pass_)
        shard_s = self.shard_s.get(pass_.plan.alike)
        most = 1 if pass_.streams else shards_per_item(pass_.left, self.shared.pool.slots, shard_s)
        if self.shared.affinity is None:
            shards = self._preparing.take(work, by.worker, most)
        else:
            # In exact order, blocks that come early must wait, so limit how far ahead a host may choose.
            far = 1 if pass_.rows_ahead < pass_.step_rows else 2 * self.shared.pool.slots
            look = min(far, LOOK_AHEAD) if pass_.plan.exact else LOOK_AHEAD
            shards = self.shared.affinity.take_work(split, work, by.node, most, look)
        pass_.under_way += 1
        pass_.served = next(self.shared.numbers)
        pass_.shards_under_way += len(shards)
        return Item(pass_, self._name(split, shards), shards)

    def _near(self, pass_: Pass) -> deque[Work]:
        """The shards of a pass that the next item is chosen from: as many as anything here looks at."""
        return pass_.near(LOOK_AHEAD + MOST_SHARDS + 2 * self.shared.pool.slots)

    def _name(self, split: str, shards: list[Work]) -> str:
        return f"{self.recovery.what(split, shards)} (task {next(self.shared.numbers)})"

    def _wanted(self, pass_: Pass) -> bool:
        short = (
            pass_.rows_ahead + pass_.shards_under_way * pass_.plan.block_records
            < 2 * pass_.step_rows
        )
        return short or self._held_bytes() < self.shared.budget_bytes

    @property
    def hungry(self) -> bool:
        """Whether so little is ready that training hosts are to help."""
        ready = 0.0
        for pass_ in self.attempt.open_passes():
            ready += pass_.rows_ahead / pass_.step_rows
            if not pass_.ended:
                break  # ready data of later passes does not help while this one is short
        room = self._held_bytes() < self.shared.budget_bytes / 2
        few = ready < STARVED_STEPS or (ready < HUNGRY_STEPS and room)
        return bool(self.passes) and few

    def _held_bytes(self) -> int:
        return self.early_bytes + sum(each.held_bytes for each in self.attempt.open_passes())

    def reported(self, by: Process, number: int, made: Made) -> bool:
        self._abandoned.pop(by.worker, None)
        item, report = self.active.get(by.worker), made.report
        if item is None or item.number != number:
            self.shared.holdings.discard(by.node, made.file)
            return False
        pass_ = item.pass_
        if report.shard < 0:
            item.quiet_since = pass_.skipped = time.monotonic()
            return True
        if self.shared.affinity is not None:
            self.shared.affinity.used(by.node, made.cache_usage)
        self.recovery.patience.took(pass_.plan.alike, by.node, report.seconds)
        shard = next((each.shard for each in item.shards if each.number == report.shard), None)
        block = ReadyBlock(report, by.node, made.file, shard)
        if item.stop is not None:
            self._remade(pass_, block)
        elif pass_.report(block):
            if report.rows:
                self.shared.holdings.keep(block)
                self.early_bytes += report.bytes_out
            self._deliver(pass_, report.shard)
        else:
            self.shared.holdings.discard(by.node, made.file)
        for passed in item.reported(report):
            self._close(pass_, passed)
        return self._goes_on(item)

    def _goes_on(self, item: Item) -> bool:
        pass_ = item.pass_
        if item.stop is not None:
            return True
        if pass_.streams and item.shards:
            return self._reads_on(item)
        overfull = self._held_bytes() > OVERFULL * self.shared.budget_bytes
        leaves = item.node in self.shared.pool.closing
        if item.shards and (leaves or (overfull and not self._needed(item))):
            pass_.work.extendleft(reversed(self.hand_back(item.by.worker)))
            return False
        return True

    def _reads_on(self, item: Item) -> bool:
        """Whether a chain worker makes the next batch of its stream now, or what it asks for."""
        pass_, worker, lost = item.pass_, item.by.worker, self.shared.pool.is_lost
        enough = item.node in self.shared.pool.closing or pass_.far_ahead(item.shards[0].number)
        asked = (each for each in self.passes if each.offers(worker, lost) and each.waited_for)
        if not enough and next(asked, None) is None:
            return True
        pass_.work.extend(self.hand_back(worker))
        return False

    def hand_back(self, worker: str) -> list[Work]:
        """End the work of a chain worker after what it has delivered; returns the shards left."""
        item = self.active[worker]
        shards, item.shards = item.shards, []
        self._done(worker)
        return shards

    def _needed(self, item: Item) -> bool:
        """Whether the next two steps wait for this item."""
        pass_ = item.pass_
        if pass_.plan.exact and pass_.turn not in {each.number for each in item.shards}:
            return False
        return pass_.rows_ahead < 2 * pass_.step_rows

    def _close(self, pass_: Pass, shard: int) -> None:
        pass_.close(shard)
        self._deliver(pass_, shard)

    def _deliver(self, pass_: Pass, number: int) -> None:
        for block in pass_.deliverable(number):
            if block.report.rows:
                self.early_bytes -= block.report.bytes_out
            self.attempt.deliver(pass_, block)

    def ended(self, by: Process) -> None:
        """A process asks for more, or leaves: it has made what it had."""
        item = self.active.get(by.worker)
        if item is not None and item.by.token == by.token:
            self._done(by.worker)

    def begins(self, by: Process) -> None:
        """A process works on nothing yet: what its worker still has was broken off, and is made again."""
        item = self.active.get(by.worker)
        if item is None:
            return
        # On another host: that of before was lost, and Ray has restarted it here.
        item.died = item.by.token != by.token and item.node == by.node
        if not item.died:
            self.attempt.repeats(item.pass_.plan.split, item.name)
        self._take_back(by.worker, 0.0)

    def _done(self, worker: str) -> None:
        item = self.active.pop(worker)
        self.attempt.suspects.ended(item.name)
        if item.stop is not None:
            self._refuse_not_remade(item)
            return
        pass_, alike = item.pass_, item.pass_.plan.alike
        pass_.under_way -= 1
        pass_.shards_under_way -= item.count
        for each in item.shards:
            self._close(pass_, each.number)
        seconds = item.seconds / item.count
        self.shard_s[alike] = max(0.8 * self.shard_s.get(alike, seconds) + 0.2 * seconds, 1e-6)

    def failed(self, by: Process, number: int, failure: Failure, retries: int) -> None:
        item = self.active.get(by.worker)
        if item is not None and item.number == number:
            self._take_back(by.worker, self.recovery.failed(item, failure, retries))

    def _take_back(self, worker: str, wait_s: float) -> None:
        item = self.active[worker]
        if not item.shards:
            self._done(worker)
            return
        del self.active[worker]
        item.tried.add(item.node)
        item.not_before = time.monotonic() + wait_s
        # Lost blocks first, since a consumer may wait for one already.
        self.again.insert(len(self.again) if item.stop is None else 0, item)

    def lose(self, gone: Iterable[ReadyBlock]) -> None:
        """Blocks are no longer where they were: let chain workers make those again that are needed."""
        gone, lost = {block for block in gone if not block.lost and block.report.rows}, list[Item]()
        for pass_ in self.open if gone else ():
            # A block that several passes need is made again for the first of them.
            mine = [b for b in (*pass_.early(), *pass_.needed) if b in gone and not b.lost]
            runs: list[list[ReadyBlock]] = []
            follows = None
            for block in sorted(mine, key=lambda b: (b.report.shard, b.report.nth)):
                place = block.report.shard, block.report.nth
                block.lost = True
                self.lost[pass_, *place] = block
                if place != follows:
                    runs.append([])
                runs[-1].append(block)
                follows = place[0], place[1] + 1
            for run in runs:
                first, stop = run[0].report, run[-1].report.nth + 1
                work = [
                    Work(first.shard, run[0].shard or Shard(""), first.nth, store=False, stop=stop)
                ]
                lost.append(Item(pass_, self._name(pass_.plan.split, work), work))
        self.again = [*lost, *self.again]

    def _remade(self, pass_: Pass, block: ReadyBlock) -> None:
        report = block.report
        known = self.lost.pop((pass_, report.shard, report.nth), None)
        if known is None:
            self.shared.holdings.discard(block.node, block.file)
            return
        what = self._lost_block(pass_, known)
        if known.records != block.records:
            text = f"{what} differs from what it was: the data has changed"
            raise DataError(text, key="block.remade")
        if known.report.digest != report.digest:
            self.attempt.differs(pass_.plan.split, what)
        self.shared.holdings.move(known, block.node, block.file)

    def _refuse_not_remade(self, item: Item) -> None:
        for each in item.shards:
            for nth in range(each.skip, item.stop or 0):
                if (block := self.lost.get((item.pass_, each.number, nth))) is not None:
                    what = self._lost_block(item.pass_, block)
                    text = f"{what} does not exist: the data has changed"
                    raise DataError(text, key="block.remade")

    def _lost_block(self, pass_: Pass, block: ReadyBlock) -> str:
        report = block.report
        what = self.recovery.what(pass_.plan.split, [Work(report.shard, block.shard or Shard(""))])
        return f"{what}: block {report.nth}, which was lost with its host and made again,"

    def abandon(self, pass_: Pass) -> None:
        """The rest of a pass is not needed: end chain workers that still work on it after `ABANDONED_S`."""
        for worker in [worker for worker, item in self.active.items() if item.pass_ is pass_]:
            del self.active[worker]
            self._abandoned[worker] = time.monotonic() + ABANDONED_S
        for block in pass_.early():
            if block.report.rows:
                self.early_bytes -= block.report.bytes_out
        if pass_ in self.passes:
            self.passes.remove(pass_)
        self.close(pass_)

    def close(self, pass_: Pass) -> None:
        self.open = [each for each in self.open if each is not pass_]
        self.again = [item for item in self.again if item.pass_ is not pass_]


class PlannedAttempt(Attempt):
    planner: Planner | None = None


PREPARED_S = 10.0
"""For this long, other chain workers leave a shard to the one that prepares it."""


class Preparing:
    """Which chain worker is fetching which shard before it is given it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._shards: dict[str, tuple[float, Work]] = {}
        """By chain worker: since when, and which."""

    def announce(self, work: deque[Work], process: str) -> Work:
        (shard,) = self._first(work, process, 1)
        self._shards[process] = time.monotonic(), shard
        return shard

    def take(self, work: deque[Work], process: str, most: int) -> list[Work]:
        """Remove the next shards of a chain worker: first the one that it prepares, last those of others."""
        shards = self._first(work, process, most)
        for shard in shards:
            work.remove(shard)
        return shards

    def _first(self, work: deque[Work], process: str, most: int) -> list[Work]:
        own = self._shards.pop(process, (0.0, None))[1]
        near = list(
            islice(work, most if own is None and not self._shards else most + 2 * self._pool.slots)
        )
        now = time.monotonic()
        self._shards = {
            p: (at, shard) for p, (at, shard) in self._shards.items() if now - at < PREPARED_S
        }
        others = [shard for _, shard in self._shards.values()]
        return sorted(near, key=lambda shard: (shard != own, shard in others))[:most]
