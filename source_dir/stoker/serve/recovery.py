"""What happens to work that fails, is late or kills its process.

Ray restarts a task whenever its process dies, without limit, so a record that kills its process would do so
forever. A restarted task therefore reports here first. From its third start on, it reports each record before
starting it; the record in progress at two deaths is quarantined, in all later passes too. Blame
ends once the task is complete. If no single record is to blame, the run ends after a few deaths.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from stoker.errors import DataError, Failure
from stoker.protocol import Work
from stoker.read.sources import reread_wait_s
from stoker.serve.items import Item
from stoker.serve.pool import Pool, others

if TYPE_CHECKING:
    from stoker.serve.passes import Attempt


PLAIN_STARTS = 2
"""Deaths after which a task reports each record; fewer if its split has deadly records."""
NAMED_DEATHS = 2
"""Deaths during one record before it is quarantined: one may be chance."""
UNNAMED_DEATHS = 6
"""Deaths of one task, with no record to blame, before the run ends."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 20.0
"""Delay before a restarted process begins, so that a host that is short of memory recovers. A process killed
during the delay has started no record."""
REASON = (
    f"its process died {NAMED_DEATHS} times while this record was read or preprocessed"
    " (killed for memory, or a crash in native code)"
)


@dataclass
class Suspect:
    """A task whose process died or that missed its deadline."""

    deaths: int = 0
    unnamed: int = 0
    """Deaths with no record to blame."""
    key: str = ""
    """The record in progress; empty: none."""
    doing: str = "starting"
    blamed: list[tuple[str, str]] = field(default_factory=list)
    """Split and key of the record in progress at each death; none once the work is complete."""
    ended: bool = False
    """The work is complete; it starts again only if its blocks were lost with their host."""


class Suspects:
    """Finds records that kill the process that works on them. One per run, guarded by the service's lock."""

    def __init__(self) -> None:
        self.deadly: dict[str, dict[str, str]] = {}
        """By split: key of a quarantined record → reason."""
        self.tasks: dict[str, Suspect] = {}

    def of(self, split: str) -> dict[str, str]:
        return self.deadly.setdefault(split, {})

    def starts(self, task: str, split: str, retry: int) -> tuple[float, bool]:
        """How long a task waits that was started before, and whether it reports each record then."""
        suspect = self.tasks.get(task)
        if suspect is None:
            self.tasks[task] = suspect = Suspect(deaths=retry, unnamed=retry)
            if not retry:
                return 0.0, True
        elif suspect.ended:
            suspect.ended = False
        else:
            suspect.deaths += 1
            self._blame(suspect, split)
        if suspect.unnamed >= UNNAMED_DEATHS:
            raise DataError(
                f"{task}: its process died {suspect.deaths} times, the last time {suspect.doing}, and no"
                " record is to blame: look for a crash in native code in the chain, or give hosts more memory"
            )
        suspect.key, suspect.doing = "", "starting"
        # A single death usually means a lost host: restart at once.
        quarantined = self.of(split)
        open_cases = sum(of == split and key not in quarantined for of, key in self._blamed())
        waits = suspect.unnamed + open_cases - PLAIN_STARTS
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**waits) if waits >= 0 else 0.0
        return wait_s, suspect.deaths >= PLAIN_STARTS or bool(quarantined)

    def _blame(self, suspect: Suspect, split: str) -> None:
        if not suspect.key:
            suspect.unnamed += 1
            return
        suspect.blamed.append((split, suspect.key))
        if self._blamed().count((split, suspect.key)) >= NAMED_DEATHS:
            self.of(split)[suspect.key] = REASON

    def _blamed(self) -> list[tuple[str, str]]:
        return [record for suspect in self.tasks.values() for record in suspect.blamed]

    def begins(self, task: str, split: str, key: str) -> str:
        """A task is about to start a record: why it must not; empty: it may."""
        if reason := self.of(split).get(key):
            return reason
        self.does(task, f"at record {key}")
        self.tasks[task].key = key
        return ""

    def does(self, task: str, what: str) -> None:
        suspect = self.tasks.setdefault(task, Suspect())
        suspect.key, suspect.doing = "", what

    def ended(self, task: str) -> None:
        if (suspect := self.tasks.get(task)) is not None:
            suspect.ended, suspect.unnamed, suspect.blamed = True, 0, []

    def doing(self, task: str) -> str:
        suspect = self.tasks.get(task)
        return suspect.doing if suspect else ""


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
            self.attempt.stalled(pass_, f"{self._who(item)}: {waited}, tried {item.late + 1} times")
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
        text = f"{self._who(item)}: no result for {now - item.quiet_since:.0f} s; {self._elsewhere(item)}"
        if others(self.pool.hosts, {item.node}) != {item.node}:
            seconds = self.patience.avoid(item.node, now)
            self.pool.avoided = self.patience.avoided(now)
            text += f"; this host gets no work for {seconds:.0f} s"
        item.late += 1
        self.attempt.note(text)

    def _who(self, item: Item) -> str:
        doing = self.attempt.suspects.doing(item.name)
        where = f"host {self.pool.name(item.node)}: {self.what(item.pass_.plan.split, item.shards)}"
        return f"{where}, {doing}" if doing else where

    def _elsewhere(self, item: Item) -> str:
        if others(self.pool.hosts, {item.node}) == {item.node}:
            return "retrying on this host (no other available)"
        return "retrying on another host"
