"""What happens to work that fails or is late."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from stoker.errors import Failure
from stoker.protocol import BlockReport, Process, Work
from stoker.read.sources import reread_wait_s
from stoker.serve.passes import Attempt, Pass
from stoker.serve.pool import Pool, others

ITEM_S = 2.0
"""Target duration of an item."""
SLOTS_PER_SECOND = 500
"""Maximum number of items that start per second: with many slots they get longer."""
MOST_SHARDS = 16
NOBODY = Process("", "", "")


def shards_per_item(left: int, slots: int, shard_s: float | None) -> int:
    """As many as fill `ITEM_S`, limited so that the rest still spreads over all slots."""
    seconds = max(ITEM_S, slots / SLOTS_PER_SECOND)
    fill = int(seconds / shard_s) if shard_s else 1
    return max(1, min(fill, left // (2 * max(slots, 1)), MOST_SHARDS, left))


@dataclass(eq=False)
class Item:
    """A few shards read by one chain worker. Unreported work can move to another worker, starting at
    the next block."""

    pass_: Pass
    name: str
    """Name for messages and for calls of chain workers."""
    shards: list[Work]
    """Shards with unreported blocks."""
    number: int = -1
    """Number of its present claim; -1: none."""
    by: Process = NOBODY
    """The chain worker that has it, or had it last."""
    died: bool = False
    seconds: float = 0.0
    tried: set[str] = field(default_factory=set)
    failures: int = 0
    late: int = 0
    not_before: float = 0.0
    quiet_since: float = field(default_factory=time.monotonic)
    """Time of the last report of its chain worker."""
    stuck_since: float = field(default_factory=time.monotonic)
    """Time of the last report, across all workers that tried it."""

    def __post_init__(self) -> None:
        self.count, self.stop = len(self.shards), self.shards[0].stop
        """If it has a `stop`, it only replaces blocks that were lost."""

    @property
    def node(self) -> str:
        return self.by.node

    def reported(self, report: BlockReport) -> list[int]:
        """Mark a block as made, so that a retry skips it; the shards before it, which are complete."""
        self.quiet_since = self.stuck_since = time.monotonic()
        at = next((n for n, shard in enumerate(self.shards) if shard.number == report.shard), None)
        if at is None or report.nth < self.shards[at].skip:
            return []
        passed = [shard.number for shard in self.shards[:at]]
        del self.shards[:at]
        number, shard, _, store, stop = self.shards[0]
        self.shards[0] = Work(number, shard, report.nth + 1, store, stop)
        if report.last:
            del self.shards[0]
        self.seconds += report.seconds
        return passed


LEAST_SHARE, LEAST_S = 0.1, 5.0
"""Minimum deadline of a block, as a share of its pass's `stall_s` and in seconds."""
TIMES_TYPICAL = 20.0
"""A block is late after this multiple of the median duration of its split's blocks."""
UNKNOWN_SHARE = 0.5
"""Deadline as a share of `stall_s` before the first block of a split has arrived."""
START_UP = 2.0
"""Factor for the first block of a host, which includes process start and imports."""
GIVE_UP_SHARE, LEAST_GIVE_UP_S = 0.9, 30.0
"""Share of `stall_s` after which the pass ends and names the stuck work, before its consumers time out
without that information."""
AVOID_S, LONGEST_AVOID_S = 120.0, 1920.0
FORGIVEN_S = 3600.0
KNOWN = 101


def give_up_s(stall_s: float) -> float:
    """A pass ends if no awaited block arrives for this long."""
    return max(GIVE_UP_SHARE * stall_s, LEAST_GIVE_UP_S)


@dataclass
class Patience:
    """Deadlines for work, and how long to avoid a host. One per attempt."""

    _taken: dict[str, deque[float]] = field(default_factory=dict)
    _seen: set[tuple[str, str]] = field(default_factory=set)
    _avoided: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Node → (until when, for how long)."""

    def took(self, split: str, node: str, seconds: float) -> None:
        self._taken.setdefault(split, deque(maxlen=KNOWN)).append(seconds)
        self._seen.add((split, node))

    def deadline_s(self, split: str, node: str, late: int, stall_s: float) -> float:
        taken = self._taken.get(split)
        if not taken:
            return UNKNOWN_SHARE * stall_s * 2.0**late
        least = max(LEAST_SHARE * stall_s, LEAST_S, TIMES_TYPICAL * median(taken))
        return least * (1.0 if (split, node) in self._seen else START_UP) * 2.0**late

    def avoid(self, node: str, now: float) -> float:
        """A host was late: how many seconds it gets no work. Doubles each time that comes soon."""
        until, before = self._avoided.get(node, (0.0, 0.0))
        again = before and now - until < FORGIVEN_S
        seconds = min(2 * before, LONGEST_AVOID_S) if again else AVOID_S
        self._avoided[node] = (now + seconds, seconds)
        return seconds

    def avoided(self, now: float) -> set[str]:
        return {node for node, (until, _) in self._avoided.items() if now < until}


class Recovery:
    """Part of the planner. It decides; the planner reassigns the work."""

    def __init__(self, attempt: Attempt, pool: Pool) -> None:
        self.attempt, self.pool = attempt, pool
        self.patience = Patience()

    def what(self, split: str, shards: list[Work]) -> str:
        if not shards:
            return split
        first, last = (
            each.shard.called or f"number {each.number}" for each in (shards[0], shards[-1])
        )
        return f"{split} shard {first}" if len(shards) == 1 else f"{split} shards {first} … {last}"

    def failed(self, item: Item, failure: Failure, retries: int) -> float:
        """Seconds until work is tried again; raises its failure after the last of its `retries`."""
        item.failures += 1
        if not retries:
            raise failure.error()
        what = self.what(item.pass_.plan.split, item.shards)
        if item.failures > retries:
            names = ", ".join(sorted(map(self.pool.name, {*item.tried, item.node})))
            text = f"{what}: failed {item.failures} times, on {names}: {failure.text}"
            raise replace(failure, text=text).error()
        wait_s, how = reread_wait_s(OSError(), item.failures - 1) or 0.0, self._elsewhere(item)
        host = self.pool.name(item.node)
        self.attempt.note(f"host {host}: {what}: {failure}; {how} in {wait_s:.0f} s")
        return wait_s

    def overdue(
        self, active: Mapping[str, Item], waiting: list[Item], now: float
    ) -> tuple[list[str], list[str]]:
        """Chain workers whose work must be done again elsewhere, and those of them that are late."""
        workers, hung = [], []
        for worker, item in active.items():
            if not self.pool.is_gone(item.node):
                if not self.is_late(item, now, in_work=True):
                    continue
                self.late(item)
                hung.append(worker)
            self.attempt.repeats(item.pass_.plan.split, item.name)
            workers.append(worker)
        for item in waiting:
            self.is_late(item, now, in_work=False)
        return workers, hung

    def is_late(self, item: Item, now: float, in_work: bool) -> bool:
        """Whether work has been silent for too long; stalls a pass that waits for it and has nothing left."""
        pass_ = item.pass_
        # A recipe's train workers wait for its first pass alone, scripts for each of theirs.
        awaited = not self.attempt.in_order or next(iter(self.attempt.open_passes()), None) is pass_
        stuck_s = now - max(item.stuck_since, pass_.skipped)
        if awaited and pass_.rows_ahead < pass_.step_rows and stuck_s > give_up_s(pass_.stall_s):
            waited = f"no result for {stuck_s:.0f} s ({pass_.stall_key}: {pass_.stall_s:.0f})"
            self.attempt.stalled(pass_, f"{self.who(item)}: {waited}, tried {item.late + 1} times")
        return in_work and now - item.quiet_since > self._limit_s(item, item.node)

    def names_records(self, item: Item, node: str) -> bool:
        """Whether late work that starts on a host now could not be late once more before the run gives up;
        then it reports each record, which takes longer."""
        left_s = give_up_s(item.pass_.stall_s) - (time.monotonic() - item.stuck_since)
        return item.late > 0 and self._limit_s(item, node) > left_s

    def _limit_s(self, item: Item, node: str) -> float:
        pass_ = item.pass_
        limit_s = self.patience.deadline_s(pass_.plan.alike, node, item.late, pass_.stall_s)
        # A stream may pause, and another process would read all of it again; one that hangs gets that chance.
        return max(limit_s, 0.5 * pass_.stall_s) if pass_.streams else limit_s

    def late(self, item: Item) -> None:
        now = time.monotonic()
        text = f"{self.who(item)}: no result for {now - item.quiet_since:.0f} s; {self._elsewhere(item)}"
        if others(self.pool.hosts, {item.node}) != {item.node}:
            seconds = self.patience.avoid(item.node, now)
            self.pool.avoided = self.patience.avoided(now)
            text += f"; this host gets no work for {seconds:.0f} s"
        item.late += 1
        self.attempt.note(text)

    def who(self, item: Item) -> str:
        doing = self.attempt.suspects.doing(item.name)
        where = f"host {self.pool.name(item.node)}: {self.what(item.pass_.plan.split, item.shards)}"
        return f"{where}, {doing}" if doing else where

    def _elsewhere(self, item: Item) -> str:
        if others(self.pool.hosts, {item.node}) == {item.node}:
            return "retrying on this host (no other available)"
        return "retrying on another host"
