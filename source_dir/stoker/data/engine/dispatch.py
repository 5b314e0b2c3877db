"""Head: sends the pieces of all passes to hosts as chain tasks, and takes in their blocks.

Chain tasks are plain Ray tasks that give block after block. One pass follows the other in the same
queue, so no slot is idle at an epoch's end; a host is sent a few tasks more than it has slots for, so
none is idle between tasks; and a task holds several pieces where these are short.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Any

from stoker.data.coordinator.accounting import DataError
from stoker.data.engine.deadlines import reread_wait_s
from stoker.data.engine.placement import ChainHost, Placement
from stoker.data.engine.recovery import Recovery
from stoker.data.engine.running import Line, Numbered, Running
from stoker.data.engine.sending import Sender, let_go
from stoker.data.engine.tasks import Reports

if TYPE_CHECKING:
    from stoker.data.coordinator.attempt import Attempt

TASK_S = 1.0
"""Aimed-at duration of a task: long against Ray's cost per task, short against an epoch."""
MOST_PIECES = 16
"""Pieces of one task at most."""
REPORT_S = 0.3
"""Blocks that are made within this time share one message of reports."""
HUNGRY_STEPS = 8
"""With fewer steps than this ready, hosts that train help to preprocess."""
LOOK_EVERY_S = 2.0
NO_HOST_DEADLINE_S = 180.0
REPORTS_S = 30.0
"""Reports are small and travel with Ray's own messages, but for those of very many bad records."""


class Dispatcher:
    """Head: one per attempt, a thread of the coordinator.

    Args:
        attempt: whose passes are produced.
        me: handle of the coordinator, for tasks that have something to say.
        hosts: the hosts that preprocess, as they are now.
        budget_bytes: of blocks that are ready; beyond two steps nothing more is made then.
    """

    def __init__(
        self, attempt: Attempt, me: Any, hosts: Callable[[], list[ChainHost]], budget_bytes: int
    ) -> None:
        self.attempt, self.hosts, self.budget_bytes = attempt, hosts, budget_bytes
        self.passes, self.keeping = attempt.passes, attempt.keeping
        self.exact = self.passes.config.data.order == "exact"
        self.lines: list[Line] = []
        self.placement = Placement()
        self.recovery = Recovery(attempt, self.placement)
        self.sender = Sender(attempt, me)
        self.piece_s: dict[str, float] = {}
        """Seconds that a piece of a split takes, smoothed."""
        self._listed: set[tuple[str, int]] = set()
        self._by_generator: dict[Any, Running] = {}
        self._again: list[Running] = []
        """Tasks that wait to be sent again."""
        self._numbers = count()
        self._early_bytes = 0
        """Of blocks that came before their turn."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pieces")
        self._look_at = 0.0
        self._seen_hosts = time.monotonic()

    def run(self) -> None:
        """Thread: until the attempt is over.

        Raises:
            Exception: whatever ended a task; DataError where no host may preprocess.
        """
        try:
            while not self.attempt.over:
                if time.monotonic() >= self._look_at:
                    self._look_at = time.monotonic() + LOOK_EVERY_S
                    self._look_for_hosts()
                    self._look_for_late()
                self._open()
                self._send_again()
                self._send()
                for task in self._ready():
                    self._take(task)
                self._close()
        finally:
            self._end()

    def _open(self) -> None:
        """List the pieces of the passes that come next, in another thread: there may be many."""
        for stream in self.attempt.open_streams():
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
                self.attempt.produced(line.stream)

    def _look_for_hosts(self) -> None:
        self.placement.update(self.hosts())
        self.placement.avoided = self.recovery.patience.avoided(time.monotonic())
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

    def _look_for_late(self) -> None:
        """Take back what a host should have given by now.

        Raises:
            DataError: nobody gives it.
        """
        now, before, reads_all = time.monotonic(), Counter[str](), self._reads_all()
        hung: set[str] = set()
        tasks = [task for line in self.lines for task in line.running if not task.ended]
        for task in tasks:
            host = self.placement.hosts.get(task.node)
            # Ray starts the tasks of a host in turn, and this one when a slot is free.
            task.queued = task.generator is not None and (host is None or before[task.node] >= host.slots)
            before[task.node] += task.generator is not None
            if (task.queued and host and not task.late) or not (reads_all or self._needed(task)):
                task.quiet_since = task.stuck_since = now
            elif self.recovery.is_late(task, now):
                self.recovery.late(task)
                hung.add(task.node)
                self._take_back(task, 0.0)
        for task in tasks:
            if task.queued and task.generator is not None and task.node in hung & self.placement.avoided:
                self._take_back(task, 0.0)

    def _take_back(self, task: Running, wait_s: float) -> None:
        """Let what a task has not given yet be sent again."""
        if not task.pieces:
            self._ended(task)
            return
        gave = task.gave
        generator = task.took_back(wait_s)
        del self._by_generator[generator]
        let_go(generator, gave)
        self.placement.end(task.node)
        self._again.append(task)

    def _send_again(self) -> None:
        for task in list(self._again):
            if time.monotonic() < task.not_before:
                continue
            if node := self.placement.choose(hungry=True, tried=task.tried):
                self._again.remove(task)
                self._launch(task, node)

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

    def _host_for(self, split: str, work: deque[Numbered]) -> str:
        """Where the next task of a pass goes: to a host that keeps something of what comes next."""
        keeper = ""
        if self.keeping is not None:
            keeper = self.keeping.next_keeper(split, work, self.placement.has_room, self.exact)
        return self.placement.choose(self._hungry(), keeper)

    def _wanted(self, line: Line) -> bool:
        stream = line.stream
        under_way = sum(task.count for task in line.running) * line.plan.block_records
        if stream.rows_ahead + under_way < 2 * stream.splitter.step_rows:
            return True
        return self._held_bytes() < self.budget_bytes

    def _hungry(self) -> bool:
        streams = self.attempt.open_streams()
        ready = sum(stream.rows_ahead / stream.splitter.step_rows for stream in streams)
        return ready < HUNGRY_STEPS and self._held_bytes() < self.budget_bytes / 2

    def _held_bytes(self) -> int:
        return self._early_bytes + sum(stream.held_bytes for stream in self.attempt.open_streams())

    def _start(self, line: Line, work: deque[Numbered], node: str) -> None:
        split = line.plan.split
        count = self._pieces_per_task(split, len(work))
        per_report = min(count, max(1, int(REPORT_S / self.piece_s.get(split, REPORT_S))))
        if self.keeping is None:
            pieces, store = [work.popleft() for _ in range(count)], [False] * count
        else:
            pieces, store = self.keeping.take_work(split, work, node, count, self.exact)
        name = f"{self.recovery.what(split, pieces)} (task {self.attempt.number}/{next(self._numbers)})"
        task = Running(line, name, pieces, store, per_report)
        line.running.append(task)
        self._launch(task, node)

    def _launch(self, task: Running, node: str) -> None:
        """Send what a task has not given yet."""
        last_try = reread_wait_s(OSError(), task.failures) is None
        generator = self.sender.send(task, node, self.recovery.is_last(task, node), last_try)
        task.sent(generator, node)
        self._by_generator[generator] = task
        self.placement.send(node)

    def _pieces_per_task(self, split: str, left: int) -> int:
        """As many as fill `TASK_S`, but so that what is left still spreads over all slots."""
        fill = int(TASK_S / self.piece_s.get(split, TASK_S))
        spread = left // max(2 * self.placement.slots, 1)
        return max(1, min(fill, spread, MOST_PIECES))

    def _ready(self) -> list[Running]:
        """Tasks that have something new, of those whose blocks are wanted."""
        import ray

        all_of_them = self._reads_all()
        wanted = [g for g, task in self._by_generator.items() if all_of_them or self._needed(task)]
        if not wanted:
            with self.attempt.changed:
                self.attempt.changed.wait(0.1)
            return []
        ready, _ = ray.wait(wanted, num_returns=1, timeout=0.05, fetch_local=False)
        if ready and len(wanted) > 1:
            ready, _ = ray.wait(wanted, num_returns=len(wanted), timeout=0, fetch_local=False)
        return [self._by_generator[generator] for generator in ready]

    def _reads_all(self) -> bool:
        """Whether blocks are taken from all tasks: while there is room for them, and where slots must come
        free for a task that train workers wait for, because others hold them until their blocks are taken."""
        if self._held_bytes() <= self.budget_bytes:
            return True
        first = [line.running[0] for line in self.lines if line.running]
        return any(self._needed(task) for task in self._again + [task for task in first if task.queued])

    def _needed(self, task: Running) -> bool:
        """Whether the next two steps wait for this task."""
        if self.exact and task.line.running[0] is not task:
            return False
        stream = task.line.stream
        return stream.rows_ahead < 2 * stream.splitter.step_rows

    def _take(self, task: Running) -> None:
        """Take one object of a task: a block, reports, or its end."""
        task.quiet_since = time.monotonic()
        try:
            reference = next(task.generator)
        except StopIteration:
            if not task.blocks or self._report(task, task.blocks.pop()):
                self._ended(task)
            return
        if len(task.blocks) == task.per_report:
            self._report(task, reference)
        else:
            task.blocks.append(reference)

    def _report(self, task: Running, reference: Any) -> bool:
        """Deliver the blocks whose reports have come; False where the task failed and is sent again.

        Raises:
            Exception: it failed for good.
        """
        import ray

        try:
            reports: Reports = ray.get(reference, timeout=REPORTS_S)
        except ray.exceptions.RayError as error:
            self._take_back(task, self.recovery.failed(task, error))
            return False
        if self.keeping is not None:
            self.keeping.used(reports.node, reports.usage)
        for report in reports.blocks:
            block = task.blocks.popleft()
            task.reported(report)
            self.recovery.patience.took(task.line.plan.split, task.node, report.seconds)
            if self.exact:
                task.waiting.append((block, report, reports.node))
                self._early_bytes += report.bytes_out
            else:
                self.attempt.deliver(task.line.stream, block, report, reports.node)
        if self.exact:
            self._deliver_in_order(task.line)
        return True

    def _deliver_in_order(self, line: Line) -> None:
        while line.running:
            first = line.running[0]
            while first.waiting:
                block, report, node = first.waiting.popleft()
                self._early_bytes -= report.bytes_out
                self.attempt.deliver(line.stream, block, report, node)
            if not first.ended:
                return
            line.running.popleft()

    def _ended(self, task: Running) -> None:
        del self._by_generator[task.generator]
        self.placement.end(task.node)
        task.ended = True
        split, seconds = task.line.plan.split, task.seconds / task.count
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
