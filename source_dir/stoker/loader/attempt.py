"""Head: open passes over loaders, and their batches that are ready.

The planner sees it in place of a recipe's attempt.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, cast

from stoker.config.schema import Config
from stoker.errors import DataError
from stoker.messages import Claim, EpochPlan, Made, Process, Shard, Start
from stoker.serve.items import Held, Holdings, Item, Line, Numbered, ReadyBlock
from stoker.serve.planner import Planner
from stoker.serve.pool import Pool
from stoker.serve.suspects import Suspects

STREAM_AHEAD = 4
"""Batches that one worker of an iterable dataset may be ahead."""
ABANDONED_S = 10.0
"""Time for a chain worker to finish its batch after its pass was abandoned."""
Place = tuple[int, int]
"""Number of the shard, and number of the block in it."""


@dataclass(eq=False)
class LoaderPass:
    """Head: one iteration over one loader, by one rank; the service's lock guards it."""

    streams: int
    """Workers of an iterable dataset, one shard each; 0 if map-style, with one shard per group of batches."""
    ready: dict[Place, ReadyBlock] = field(default_factory=dict)
    given: dict[Place, ReadyBlock] = field(default_factory=dict)
    """Those that the script is fetching."""
    failed: dict[Place, str] = field(default_factory=dict)
    next: Place = (0, 0)
    """Next block for the script."""
    known: int = 0
    """Number of submitted shards."""
    total: int | None = None
    """Number of shards that will be submitted, once known. Calls of a script can overtake each other."""
    owners: dict[int, str] = field(default_factory=dict)
    """Chain worker that began a stream: it alone continues it, because another would read it again."""
    step_rows: int = 1
    ended: bool = False

    @property
    def held(self) -> Held:
        return Held(sum(block.report.bytes_out for block in self.ready.values()))

    @property
    def blocks(self) -> dict[Place, ReadyBlock]:
        """Blocks that are needed, as a recipe's pass has them."""
        return self.ready | self.given

    @property
    def rows_ahead(self) -> int:
        """Number of consecutive ready blocks, starting with the next one."""
        if self.streams:
            return len(self.ready) // self.streams
        first = self.next[0]
        return next(n for n in count() if (first + n, 0) not in self.ready)

    def ahead_of(self, shard: int) -> int:
        """Number of ready blocks of a shard."""
        return sum(place[0] == shard for place in self.ready)

    def urgency(self, work: Numbered) -> tuple[bool, int]:
        """Sort key for workers of an iterable dataset: the next one first, then the one least ahead."""
        return work[0] != self.next[0], self.ahead_of(work[0])


class LoaderSettings:
    """Head: stands in for the passes of a recipe."""

    def __init__(self, stall_s: float) -> None:
        data = Config().data.model_copy(update={"order": "any", "stall_timeout_s": stall_s})
        self.config = Config().model_copy(update={"data": data})


class LoaderPlanner(Planner):
    """Head: planner whose passes can be abandoned and whose streams of iterable datasets share processes.

    A stream stays with the chain worker that began it, which sets it aside while others need the process.
    """

    abandoned: dict[str, float]
    """Chain workers that work on abandoned passes, and when to kill them if they still do."""

    def __init__(
        self, attempt: Any, pool: Pool, budget_bytes: int, numbers: count[int], holdings: Holdings
    ) -> None:
        super().__init__(attempt, pool, budget_bytes, numbers, holdings)
        self.abandoned = {}
        self._asking = ""
        """The chain worker that asks for work; empty: none."""

    def claim(self, by: Process) -> Claim | None:
        """As the planner's."""
        self.abandoned.pop(by.worker, None)
        self._asking = by.worker
        claim = super().claim(by)
        self._asking = ""
        if claim is not None:
            item = self.active[by.worker]
            made: Any = item.line.stream
            if made.streams:
                made.owners |= {shard: by.worker for shard, _, _ in item.shards}
        return claim

    def _own(self, line: Line) -> list[Numbered]:
        """Work of a pass that the asking chain worker may do."""
        owners = cast(LoaderPass, line.stream).owners
        return [w for w in line.work if self._may(owners.get(w[0], ""))]

    def _may(self, owner: str) -> bool:
        return not owner or not self._asking or owner == self._asking or self.pool.is_lost(owner)

    def startable(self) -> Iterator[Line]:
        """Passes that may start work, the one least ahead first, because scripts may wait for any of them.

        Workers of an iterable dataset that are far enough ahead are not started.
        """
        for line in sorted(self.lines, key=lambda each: each.stream.rows_ahead + each.shards_under_way):
            made: Any = line.stream
            if made.streams:
                own = sorted(self._own(line), key=made.urgency)
                line.work = deque([*own, *(work for work in line.work if work not in own)])
                if line.work and (not own or made.ahead_of(own[0][0]) >= STREAM_AHEAD):
                    continue
            # The budget does not hold back the stream that the script waits for.
            if self._wanted(line) or (made.streams and line.work and not made.urgency(line.work[0])[0]):
                yield line

    def _next(self, by: Process) -> Item | None:
        """As the planner's; a chain worker may continue its streams also where it gets no other work."""
        item = super()._next(by)
        for line in self.startable() if item is None else ():
            made: Any = line.stream
            if line.work and made.owners.get(line.work[0][0]) == by.worker:
                return self._begin(line, by)
        return item

    def makes_way(self, worker: str, ahead: int) -> bool:
        """Whether a chain worker must set a stream aside for others; it continues it later.

        Args:
            worker: its id.
            ahead: number of its ready batches.
        """
        line = self.active[worker].line
        made: Any = line.stream
        self._asking = worker
        urgent = any(not made.urgency(work)[0] for work in self._own(line))
        others = ahead >= STREAM_AHEAD and (self.again or any(each.work for each in self.startable()))
        self._asking = ""
        if urgent or others:
            line.work.extend(self.hand_back(worker))
            return True
        return False

    def drop(self, line: Line) -> None:
        """Abandon a pass."""
        for worker in [worker for worker, item in self.active.items() if item.line is line]:
            self.leave(worker)
            self.abandoned[worker] = time.monotonic() + ABANDONED_S
        for block in line.early():
            if block.report.rows:
                self.early.add(block, -1)
        if line in self.lines:
            self.lines.remove(line)
        self.reconciled(line.stream)

    def reported(self, by: Process, number: int, made: Made) -> bool:
        """As the planner's."""
        self.abandoned.pop(by.worker, None)
        return super().reported(by, number, made)

    def look(self, now: float) -> list[str]:
        """Same as the planner's; also returns chain workers that still work on an abandoned pass."""
        passes: list[Any] = [line.stream for line in self.lines]
        self.pool.bound = {owner for owners in self.attempt.kept(passes) for owner in owners.values()}
        late = [worker for worker, due in self.abandoned.items() if now > due]
        for worker in late:
            del self.abandoned[worker]
        return super().look(now) + late


class LoaderAttempt:
    """Head: see the module. Ends when work fails for good; the next pass starts another attempt.

    Args:
        number: from 0 on.
        passes: with the settings of the planner.
        pool: the hosts.
        budget_bytes: of batches that are kept ready.
        numbers: numbers claims.
        holdings: knows where blocks are.
        changed: the service's lock; notified where what is to be made may have changed.
        ready: of the same lock; notified where scripts may go on.
        note: takes one line for people.
        copies: the owners of the streams of all loaders with `persistent_workers`.
    """

    keeping = None
    all_produced = False
    """Whether no pass has been open for a while; a script may open further ones."""

    def __init__(
        self,
        number: int,
        passes: LoaderSettings,
        pool: Pool,
        budget_bytes: int,
        numbers: count[int],
        holdings: Holdings,
        changed: threading.Condition,
        ready: threading.Condition,
        note: Callable[[str], None],
        copies: dict[str, dict[int, str]],
    ) -> None:
        self.number, self.passes = number, passes
        self.changed, self.ready, self.note, self.copies = changed, ready, note, copies
        self.has_work = changed
        self.suspects = Suspects()
        self.failure = ""
        self.lines: dict[str, Line] = {}
        """Open passes."""
        self._opened = 0
        """Passes; tells them apart where they have a split in common."""
        self.planner = LoaderPlanner(self, pool, budget_bytes, numbers, holdings)

    @property
    def over(self) -> bool:
        return bool(self.failure)

    def fail(self, reason: str) -> None:
        """End all passes; the first reason counts."""
        for line in self.lines.values():
            reason = reason.replace(f"{line.plan.split} shard", "DataLoader")
        with self.changed:
            self.failure = self.failure or reason
            self.changed.notify_all()
            self.ready.notify_all()

    def open_streams(self) -> list[Any]:
        """The passes that are produced now, the one with least ahead first."""
        return sorted((line.stream for line in self.lines.values()), key=lambda each: each.rows_ahead)

    def kept(self, passes: list[LoaderPass]) -> list[dict[int, str]]:
        """The owners of all streams: their chain workers should stay."""
        return [*self.copies.values(), *(each.owners for each in passes)]

    def open(self, key: str, split: str, streams: int) -> None:
        """A script begins to iterate."""
        self._opened += 1
        plan = EpochPlan(seed=self._opened, epoch=0, split=split, shuffle=False, block_records=1)
        made = LoaderPass(streams, owners=self.copies.get(split, {}))
        line = Line(made, plan, None, exact=False, single=bool(streams))
        self.lines[key], self.all_produced = line, False
        self.planner.lines.append(line)

    def submit(self, key: str, shards: list[tuple[int, Shard, int]], total: int | None) -> None:
        """More to be made of a pass.

        Args:
            key: of the pass.
            shards: number, what it is, blocks to skip.
            total: how many there are in all, once that is known.
        """
        line = self.lines.get(key)
        if line is None:
            return
        made: Any = line.stream
        for number, shard, skip in shards:
            line.work.append((number, replace(shard, home=made.owners.get(number, "")), skip))
        made.known += len(shards)
        made.total = made.total if total is None else total
        if made.total is not None and made.known >= made.total:
            line.listing = False
        self.has_work.notify(max(len(shards), 1))

    def close(self, key: str) -> None:
        """A script has come to the end of a pass, or does not want the rest."""
        if (line := self.lines.pop(key, None)) is not None:
            self.planner.drop(line)
            self.changed.notify_all()

    def deliver(self, stream: LoaderPass, block: ReadyBlock) -> None:
        """Planner's call: a block is here."""
        report = block.report
        place = report.shard, report.nth
        if report.bad:
            stream.failed[place] = report.bad[0].reason
        elif report.rows:
            stream.ready[place] = block
        self.changed.notify_all()
        if place == stream.next:
            self.ready.notify_all()

    def produced(self, stream: LoaderPass) -> None:
        """Planner's call: all of a pass was made."""
        stream.ended = True
        self.ready.notify_all()

    def repeats(self, split: str, task: str) -> None:
        """Planner's call: work is done again; a script's run does not report it."""

    def task_starts(self, split: str, task: str, retry: int) -> Start | None:
        """Planner's call: work begins that was begun before: how; None: not at all."""
        try:
            return self.suspects.starts(task, split, retry)
        except DataError as error:
            self.fail(str(error))
            return None
