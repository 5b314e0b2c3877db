"""Head: sends the pieces of all passes to hosts as chain tasks, and takes in their blocks.

Chain tasks are plain Ray tasks that give block after block. One pass follows the other in the same
queue, so no slot is idle at an epoch's end; a host is sent a few tasks more than it has slots for, so
none is idle between tasks; and a task holds several pieces where these are short.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from stoker.data.chain import BlockReport
from stoker.data.keeping import Keeping
from stoker.data.ledger import DataError
from stoker.data.pipeline import MAX_TASK_RETRIES, Passes, pack_work
from stoker.data.placement import ChainHost, Placement
from stoker.data.sources import Piece
from stoker.data.streams import Stream
from stoker.data.tasks import EpochPlan, Reports, run_pieces

TASK_S = 1.0
"""Aimed-at duration of a task: long against Ray's cost per task, short against an epoch."""
MOST_PIECES = 16
"""Pieces of one task at most."""
REPORT_S = 0.3
"""Blocks that are made within this time share one message of reports."""
BLOCKS_AHEAD = 4
"""Blocks that a task may have ready without being asked for them; then it waits."""
HUNGRY_STEPS = 8
"""With fewer steps than this ready, hosts that train help to preprocess."""
LOOK_FOR_HOSTS_S = 2.0
NO_HOST_DEADLINE_S = 180.0


@dataclass(eq=False)
class Running:
    """Head: a chain task that was sent."""

    generator: Any
    line: Line
    node: str
    pieces: int
    per_report: int
    blocks: deque[Any] = field(default_factory=deque)
    """Blocks whose reports have not come yet."""
    waiting: deque[tuple[Any, BlockReport, str]] = field(default_factory=deque)
    """(block, report, node) of those that came before their turn, in exact order."""
    seconds: float = 0.0
    ended: bool = False


@dataclass(eq=False)
class Line:
    """Head: what is left to send of a pass, and what of it is under way."""

    stream: Stream
    plan: EpochPlan
    coming: Future[deque[tuple[int, Piece, int]]]
    work: deque[tuple[int, Piece, int]] | None = None
    """Pieces in the order of the pass; None until they are listed."""
    running: deque[Running] = field(default_factory=deque)
    """In the order in which they were sent."""

    def listed(self) -> bool:
        """Whether the pieces are known."""
        if self.work is None and self.coming.done():
            self.work = self.coming.result()
        return self.work is not None


class Dispatcher:
    """Head: one per attempt, a thread of the coordinator.

    Args:
        passes: what to read.
        changed: the coordinator's lock; told whenever something is there or was consumed.
        streams: the passes that may be produced now, in order.
        deliver: takes a block, its report and the node that made it.
        produced: is told when a pass has given all its blocks.
        over: whether this attempt has ended.
        hosts: the hosts that preprocess.
        budget_bytes: of blocks that are ready; beyond two steps nothing more is made then.
        keeping: which host keeps what across epochs; None: none does.
    """

    def __init__(
        self,
        passes: Passes,
        changed: threading.Condition,
        streams: Callable[[], list[Stream]],
        deliver: Callable[[Stream, Any, BlockReport, str], None],
        produced: Callable[[Stream], None],
        over: Callable[[], bool],
        hosts: Callable[[], list[ChainHost]],
        budget_bytes: int,
        keeping: Keeping | None = None,
    ) -> None:
        self.passes, self.changed, self.streams, self.keeping = passes, changed, streams, keeping
        self.deliver, self.produced = deliver, produced
        self.over, self.hosts, self.budget_bytes = over, hosts, budget_bytes
        self.exact = passes.config.data.order == "exact"
        self.lines: list[Line] = []
        self.placement = Placement()
        self.piece_s: dict[str, float] = {}
        """Seconds that a piece of a split takes, smoothed."""
        self._listed: set[tuple[str, int]] = set()
        self._by_generator: dict[Any, Running] = {}
        self._early_bytes = 0
        """Of blocks that came before their turn."""
        self._setups: dict[str, Any] = {}
        self._tasks: dict[tuple[str, str], Any] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pieces")
        self._look_at = 0.0
        self._seen_hosts = time.monotonic()

    def run(self) -> None:
        """Thread: until the attempt is over.

        Raises:
            Exception: whatever ended a task; DataError where no host may preprocess.
        """
        try:
            while not self.over():
                self._look_for_hosts()
                self._open()
                self._send()
                for task in self._ready():
                    self._take(task)
                self._close()
        finally:
            self._end()

    def _open(self) -> None:
        """List the pieces of the passes that come next, in another thread: there may be many."""
        for stream in self.streams():
            key = (stream.books.split, stream.books.epoch)
            if key in self._listed or not self.passes.has_pieces(stream.books.split):
                continue
            self._listed.add(key)
            start = stream.trail.start if stream.trail else None
            plan = self.passes.plan(*key, start)
            self.lines.append(Line(stream, plan, self._pool.submit(self.passes.pieces, plan, start)))

    def _close(self) -> None:
        for line in [line for line in self.lines if line.listed()]:
            if not line.work and not line.running:
                self.lines.remove(line)
                self.produced(line.stream)

    def _look_for_hosts(self) -> None:
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_FOR_HOSTS_S
        self.placement.update(self.hosts())
        if self.keeping is not None:
            self.keeping.hosts_are(self.placement.hosts)
        if self.placement.hosts:
            self._seen_hosts = time.monotonic()
            return
        # One that was lost may come back; without its group another does not take its place.
        data = self.passes.config.data
        deadline = min(NO_HOST_DEADLINE_S, data.stall_timeout_s)
        if time.monotonic() - self._seen_hosts > deadline:
            groups = ", ".join(data.preprocess_on)
            which = f"data.preprocess_on names {groups} alone" if groups else "none offers CPUs to Ray"
            raise DataError(f"no host that may preprocess for {deadline:.0f} s: {which}")

    def _send(self) -> None:
        """Send tasks while hosts have room and data is wanted, one pass after the other."""
        for line in self.lines:
            if not line.listed():
                return
            while line.work:
                node = self._host_for(line.plan.split, line.work) if self._wanted(line) else ""
                if not node:
                    return
                self._start(line, line.work, node)

    def _host_for(self, split: str, work: deque[tuple[int, Piece, int]]) -> str:
        """Where the next task of a pass goes: to a host that keeps something of what comes next."""
        keeper = ""
        if self.keeping is not None:
            keeper = self.keeping.next_keeper(split, work, self.placement.has_room, self.exact)
        return self.placement.choose(self._hungry(), keeper)

    def _wanted(self, line: Line) -> bool:
        stream = line.stream
        under_way = sum(task.pieces for task in line.running) * line.plan.block_records
        if stream.rows_ahead + under_way < 2 * stream.splitter.step_rows:
            return True
        return self._held_bytes() < self.budget_bytes

    def _hungry(self) -> bool:
        streams = self.streams()
        ready = sum(stream.rows_ahead / stream.splitter.step_rows for stream in streams)
        return ready < HUNGRY_STEPS and self._held_bytes() < self.budget_bytes / 2

    def _held_bytes(self) -> int:
        return self._early_bytes + sum(stream.held_bytes for stream in self.streams())

    def _start(self, line: Line, work: deque[tuple[int, Piece, int]], node: str) -> None:
        split = line.plan.split
        count = self._pieces_per_task(split, len(work))
        per_report = min(count, max(1, int(REPORT_S / self.piece_s.get(split, REPORT_S))))
        if self.keeping is None:
            pieces, store = [work.popleft() for _ in range(count)], [False] * count
        else:
            pieces, store = self.keeping.take_work(split, work, node, count, self.exact)
        key, setup = self._setup(split)
        task_of = self._remote(node, split)
        generator = task_of.remote(key, setup, line.plan, pack_work(pieces, store), per_report)
        task = Running(generator, line, node, len(pieces), per_report)
        self._by_generator[generator] = task
        line.running.append(task)
        self.placement.send(node)

    def _pieces_per_task(self, split: str, left: int) -> int:
        """As many as fill `TASK_S`, but so that what is left still spreads over all slots."""
        fill = int(TASK_S / self.piece_s.get(split, TASK_S))
        spread = left // max(2 * self.placement.slots, 1)
        return max(1, min(fill, spread, MOST_PIECES))

    def _setup(self, split: str) -> tuple[str, list[Any]]:
        import ray

        if split not in self._setups:
            self._setups[split] = ray.put(self.passes.setup(split))
        reference = self._setups[split]
        return reference.hex(), [reference]

    def _remote(self, node: str, split: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if (node, split) not in self._tasks:
            # Soft: where its host is lost, a task, or one that makes lost blocks again, runs elsewhere.
            affinity = NodeAffinitySchedulingStrategy(node, soft=True)
            self._tasks[node, split] = ray.remote(run_pieces).options(
                name=f"chain-{split}",
                num_cpus=1,
                num_returns="streaming",
                max_retries=MAX_TASK_RETRIES,
                scheduling_strategy=affinity,
                _generator_backpressure_num_objects=2 * BLOCKS_AHEAD,
            )
        return self._tasks[node, split]

    def _ready(self) -> list[Running]:
        """Tasks that have something new, of those whose blocks are wanted."""
        import ray

        full = self._held_bytes() > self.budget_bytes
        wanted = [task.generator for task in self._by_generator.values() if not full or self._needed(task)]
        if not wanted:
            with self.changed:
                self.changed.wait(0.1)
            return []
        ready, _ = ray.wait(wanted, num_returns=1, timeout=0.05, fetch_local=False)
        if ready and len(wanted) > 1:
            ready, _ = ray.wait(wanted, num_returns=len(wanted), timeout=0, fetch_local=False)
        return [self._by_generator[generator] for generator in ready]

    def _needed(self, task: Running) -> bool:
        """Whether the next two steps wait for this task."""
        if self.exact and task.line.running[0] is not task:
            return False
        stream = task.line.stream
        return stream.rows_ahead < 2 * stream.splitter.step_rows

    def _take(self, task: Running) -> None:
        """Take one object of a task: a block, reports, or its end."""
        try:
            reference = next(task.generator)
        except StopIteration:
            if task.blocks:
                self._report(task, task.blocks.pop())
            self._ended(task)
            return
        if len(task.blocks) == task.per_report:
            self._report(task, reference)
        else:
            task.blocks.append(reference)

    def _report(self, task: Running, reference: Any) -> None:
        """Deliver the blocks whose reports have come; where the task failed, getting them raises why."""
        import ray

        reports: Reports = ray.get(reference)
        if self.keeping is not None:
            self.keeping.used(reports.node, reports.usage)
        for report in reports.blocks:
            block = task.blocks.popleft()
            task.seconds += report.seconds
            if self.exact:
                task.waiting.append((block, report, reports.node))
                self._early_bytes += report.bytes_out
            else:
                self.deliver(task.line.stream, block, report, reports.node)
        if self.exact:
            self._deliver_in_order(task.line)

    def _deliver_in_order(self, line: Line) -> None:
        while line.running:
            first = line.running[0]
            while first.waiting:
                block, report, node = first.waiting.popleft()
                self._early_bytes -= report.bytes_out
                self.deliver(line.stream, block, report, node)
            if not first.ended:
                return
            line.running.popleft()

    def _ended(self, task: Running) -> None:
        del self._by_generator[task.generator]
        self.placement.end(task.node)
        task.ended = True
        split, seconds = task.line.plan.split, task.seconds / task.pieces
        before = self.piece_s.get(split, seconds)
        self.piece_s[split] = max(0.8 * before + 0.2 * seconds, 1e-6)
        if self.exact:
            self._deliver_in_order(task.line)
        else:
            task.line.running.remove(task)

    def _end(self) -> None:
        import ray

        self._pool.shutdown(wait=False, cancel_futures=True)
        for generator in self._by_generator:
            # With its process: an import that is interrupted (torch's, numpy's) cannot be repeated there,
            # and the next attempt's tasks would fail in it.
            ray.cancel(generator, force=True)
        self._by_generator.clear()

