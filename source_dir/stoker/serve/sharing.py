"""Cluster: the blocks that runs with the same `data.share` make for one another.

A block depends on the records, the chain, the seed and the epoch alone, so whichever run makes it first makes
it for all. Each run has its own planner, order, data cursor and accounting; only its chain workers, before
they make a block, ask for it here:

    chain worker                →  take(place, nth)  →  the block  |  "make"  |  "wait": it is being made
    coordinator of its maker    →  offer(place, block)

Recent blocks are kept for runs that are behind, as many as fit. What a run does not find here, it makes
itself, so the worst that a lost block, host or run can cost is repeated work. A run that is a little further
behind, such as one that has just started, gets all CPUs until it has caught up: otherwise both would make
every block from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from stoker.messages import SERVED_FROM_BYTES, BlockReport, EpochPlan, Work
from stoker.read.identity import agree
from stoker.read.sources import digest
from stoker.serve import ray_internals
from stoker.serve.deadlines import LEAST_S, LEAST_SHARE
from stoker.serve.shards import Loaded, tables_of

WAIT_S, LOOK_AGAIN_S = 2.0, 0.5
"""How long one call waits for a block that is being made, and how often it looks."""
CATCH_UP_S = 30.0
"""A run that makes what another had so recently gets the CPUs first, for so long in all."""
LEAST_PATIENCE_S, TIMES_TYPICAL = 5.0, 4.0
"""A maker that is silent for so long, or for this multiple of the longest recent block, does not count."""
MOST_BLOCKS = 10_000
"""Blocks that are kept, however small."""
LEFT_S = 0.5
"""How long others wait for the last blocks of a maker that has stopped: Ray Data takes them every 0.1 s."""
ANSWER_S, FETCH_S = 10.0, 5.0
AWAY_S = 30.0
"""How long a chain worker makes everything itself after a call without an answer."""
LOOK_EVERY_S = 5.0


class Shared(NamedTuple):
    """Chain worker ↔ window: a block that exists."""

    table: list[Any]
    """Its reference; empty: none of its records is left."""
    report: BlockReport
    run: str
    """The run that made it, and with which it ends."""


Answer = Shared | Literal["make", "wait"]
"""Window → chain worker: the block; or make the shard from here on; or ask again."""


@dataclass
class Making:
    """Window: a shard in progress."""

    run: str
    maker: str
    nth: int
    """Index of the block that comes next."""
    since: float


@dataclass
class Window:
    """Cluster: recent blocks and who makes which; pure.

    Args:
        most_bytes: of the blocks that are kept.
    """

    most_bytes: int
    runs: dict[str, dict[str, str]] = field(default_factory=dict)
    """What the blocks of each run depend on."""
    blocks: dict[tuple[str, int], Shared] = field(default_factory=dict)
    """By place and index in it; oldest first."""
    making: dict[str, Making] = field(default_factory=dict)
    """By place."""
    passed: dict[str, dict[str, float]] = field(default_factory=dict)
    """Places that each run has recently come to, oldest first, and when."""
    waited: dict[str, tuple[float, float]] = field(default_factory=dict)
    """How long each run has waited until others caught up, and when it last did."""
    bytes: int = 0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=101))
    """Durations of recent blocks."""

    def join(self, run: str, depends_on: dict[str, str]) -> str:
        """A run begins; returns what differs from the runs that have joined, or nothing."""
        for other in self.runs.values():
            for name, value in depends_on.items():
                if not agree(other.get(name, ""), value):  # how much two runs sampled may differ
                    return name
        self.runs[run] = depends_on
        return ""

    def take(self, run: str, place: str, nth: int, maker: str, now: float) -> Answer:
        """The block at a place, or who makes it."""
        if run not in self.runs:  # the actor was started again
            return "make"
        if (found := self.blocks.get((place, nth))) is not None:
            self._passes(run, place, now)
            return found
        at = self.making.get(place)
        # One that has far to go is not worth waiting for.
        is_coming = (
            at is not None and at.maker != maker and 0 <= nth - at.nth <= 1 and self._is_alive(at, now)
        )
        if is_coming or self._is_awaited(run, now):
            return "wait"
        self.making[place] = Making(run, maker, nth, now)
        self._passes(run, place, now)
        return "make"

    def _patience_s(self) -> float:
        longest_s = max(self.recent_s, default=0.0)
        return min(max(LEAST_PATIENCE_S, TIMES_TYPICAL * longest_s), CATCH_UP_S)

    def _is_alive(self, at: Making, now: float) -> bool:
        return now - at.since < self._patience_s()

    def _passes(self, run: str, place: str, now: float) -> None:
        passed = self.passed.setdefault(run, {})
        passed.setdefault(place, now)
        while passed and now - passed[oldest := next(iter(passed))] > CATCH_UP_S:
            del passed[oldest]

    def _is_awaited(self, run: str, now: float) -> bool:
        """Whether another run makes what this one had a moment ago, and so can catch up."""
        self.making = {place: at for place, at in self.making.items() if self._is_alive(at, now)}
        passed = self.passed.get(run, {})
        behind = (place for place, at in self.making.items() if at.run != run)
        waited, last = self.waited.get(run, (0.0, now))
        if waited > CATCH_UP_S or not any(now - passed.get(p, now - CATCH_UP_S) < CATCH_UP_S for p in behind):
            return False
        # Its chain workers ask again and again while they wait.
        self.waited[run] = (waited + min(now - last, 2 * LOOK_AGAIN_S), now)
        return True

    def offer(self, place: str, block: Shared, now: float) -> None:
        """A block was made; the oldest ones give way."""
        report = block.report
        if block.run not in self.runs:  # it has just ended
            return
        self.recent_s.append(report.seconds)
        if report.last:
            self.making.pop(place, None)
        elif (at := self.making.get(place)) is not None:
            at.nth, at.since = report.nth + 1, now
        if (place, report.nth) not in self.blocks:
            self.blocks[place, report.nth] = block
            self.bytes += report.bytes_out
        while self.blocks and (self.bytes > self.most_bytes or len(self.blocks) > MOST_BLOCKS):
            self._drop(next(iter(self.blocks)))

    def left(self, place: str, maker: str, now: float) -> None:
        """A maker stops before the end of its shard; its last blocks are on their way."""
        if (at := self.making.get(place)) is not None and at.maker == maker:
            at.since = now - self._patience_s() + LEFT_S

    def _drop(self, which: tuple[str, int]) -> None:
        self.bytes -= self.blocks.pop(which).report.bytes_out

    def lost(self, place: str, nth: int, run: str) -> None:
        """A block cannot be fetched; `run`: nor can the others of its run, which has ended."""
        for which in [
            which for which, block in self.blocks.items() if which == (place, nth) or block.run == run
        ]:
            self._drop(which)

    def ended(self, run: str) -> None:
        """Forget a run that is over."""
        self.lost("", 0, run)
        for each in (self.runs, self.passed, self.waited):
            each.pop(run, None)
        self.making = {place: at for place, at in self.making.items() if at.run != run}


def patience_s(stall_s: float) -> float:
    """Head: how long a chain worker may wait for another run without being late itself.

    Args:
        stall_s: `data.stall_timeout_s`.
    """
    return min(max(LEAST_SHARE * stall_s, LEAST_S) / 2, CATCH_UP_S)


class WindowActor:
    """Cluster: `Window` as a detached actor with zero CPUs, named by `data.share`; ends with its last run."""

    def __init__(self, most_bytes: int) -> None:
        self._window = Window(most_bytes)
        self._news: dict[str, asyncio.Event] = {}
        self._watch: asyncio.Task[None] | None = None

    async def join(self, me: Any, run: str, depends_on: dict[str, str]) -> str:
        """Driver's call: see `Window.join`.

        Args:
            me: this actor's handle.
            run: id of its Ray job, "/" and anything that tells its runs apart.
            depends_on: what its blocks depend on.
        """
        await self._forget_ended()
        differs = self._window.join(run, depends_on)
        self._watch = self._watch or asyncio.create_task(self._until_the_last_run(me))
        return differs

    async def take(self, run: str, place: str, nth: int, maker: str) -> Answer:
        """Chain worker's call: see `Window.take`; waits a moment before it answers "wait".

        Args:
            run: as it joined.
            place: identifies a shard of a pass.
            nth: index of the block in it.
            maker: identifies the caller.
        """
        until = time.monotonic() + WAIT_S
        while True:
            now = time.monotonic()
            found = self._window.take(run, place, nth, maker, now)
            if found != "wait" or now > until:
                return found
            news = self._news.setdefault(place, asyncio.Event())
            try:
                await asyncio.wait_for(news.wait(), LOOK_AGAIN_S)
            except TimeoutError:
                self._news.pop(place, None)

    async def offer(self, place: str, block: Shared) -> None:
        """Coordinator's call: see `Window.offer`."""
        self._window.offer(place, block, time.monotonic())
        self._tell(place)

    async def left(self, place: str, maker: str) -> None:
        """Chain worker's call: see `Window.left`."""
        self._window.left(place, maker, time.monotonic())

    async def lost(self, place: str, nth: int, run: str) -> None:
        """Chain worker's call: see `Window.lost`."""
        self._window.lost(place, nth, run)

    def _tell(self, place: str) -> None:
        if (news := self._news.pop(place, None)) is not None:
            news.set()

    async def _forget_ended(self) -> None:
        with contextlib.suppress(Exception):  # Ray's control store may be restarting
            jobs = await asyncio.to_thread(ray_internals.ended_jobs)
            for run in [run for run in self._window.runs if run.partition("/")[0] in jobs]:
                self._window.ended(run)

    async def _until_the_last_run(self, me: Any) -> None:
        import ray

        while self._window.runs:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._forget_ended()
        ray.kill(me)


class Share:
    """Coordinator and chain worker: this run's side of the window; travels in its Setup.

    Args:
        window: handle of the actor.
        run: as it joined.
        patience_s: how long a chain worker waits for one block before it makes the block itself.
    """

    def __init__(self, window: Any, run: str, patience_s: float) -> None:
        self._window, self._run, self._patience_s = window, run, patience_s
        self._away_until = 0.0

    @property
    def _is_away(self) -> bool:
        return time.monotonic() < self._away_until

    def blocks(
        self, loaded: Loaded, plan: EpochPlan, work: Work, maker: str
    ) -> Iterator[tuple[Any, BlockReport]]:
        """The blocks of a shard as tables, each with its report: made here, or by another run.

        Args:
            loaded: source and chain of the split.
            plan: the pass.
            work: the shard.
            maker: identifies the caller.
        """
        import ray

        shard, nth = work.shard, work.skip
        # Runs may find the same files at different paths.
        place = digest(plan, work.number, shard.called, shard.start, shard.stop, shard.rows, shard.items)
        started = time.perf_counter()
        while True:
            found: Any = "make" if self._is_away else self._ask("take", self._run, place, nth, maker)
            if found == "make" or (found == "wait" and time.perf_counter() - started > self._patience_s):
                yield from self._made(loaded, plan, work._replace(skip=nth), place, maker)
                return
            if found == "wait":
                continue
            try:
                table = ray.get(found.table[0], timeout=FETCH_S) if found.table else None
            except ray.exceptions.RayError as error:
                gone = isinstance(error, ray.exceptions.OwnerDiedError)
                self._ask("lost", place, nth, found.run if gone else "")
                continue
            seconds = time.perf_counter() - started
            yield table, replace(found.report, seconds=seconds, costs={}, place="", shared=True)
            if found.report.last:
                return
            nth, started = nth + 1, time.perf_counter()

    def _made(
        self, loaded: Loaded, plan: EpochPlan, work: Work, place: str, maker: str
    ) -> Iterator[tuple[Any, BlockReport]]:
        whole = False
        try:
            for table, report in tables_of(loaded, plan, work):
                # What cannot be read here and now may be readable elsewhere.
                if not any(bad.passing for bad in report.bad):
                    report.place, whole = place, report.last
                yield table, report
        finally:
            if not whole and not self._is_away:
                self._window.left.remote(place, maker)

    def offer(self, report: BlockReport, reference: Any) -> None:
        """Coordinator: a block that was made here has arrived, or has no rows."""
        import ray

        if report.rows and report.bytes_out < SERVED_FROM_BYTES:
            # Ray would keep the value of such an object if this process drops it before the window does.
            try:
                reference = ray.put(ray.get(reference, timeout=FETCH_S))
            except ray.exceptions.RayError:
                return
        kept = [reference] if report.rows else []
        self._window.offer.remote(report.place, Shared(kept, report, self._run))

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The window's answer; "make" if there is none."""
        import ray

        try:
            return ray.get(getattr(self._window, method).remote(*arguments), timeout=ANSWER_S)
        except ray.exceptions.RayError:
            self._away_until = time.monotonic() + AWAY_S
            return "make"
