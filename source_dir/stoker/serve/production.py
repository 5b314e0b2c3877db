"""Head: the part of the coordinator that serves chain workers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any
from weakref import WeakSet

from stoker.errors import DataError, explain
from stoker.hosts.topology import label
from stoker.messages import BlockReport, Claim, Failure, Origin, Shard, Told
from stoker.serve.attempt import Attempt
from stoker.serve.elastic import Elastic
from stoker.serve.execution import Engine
from stoker.serve.items import ReadyBlock
from stoker.serve.passes import Passes
from stoker.serve.planner import Planner
from stoker.serve.pool import ChainHost, Pool
from stoker.serve.ray_internals import draining_nodes
from stoker.serve.statistics import Operator
from stoker.serve.suspects import Suspects

LOOK_EVERY_S = 1.0
TICKETS_WAIT_S = 1.0
NO_HOST_DEADLINE_S = 180.0
RESCUE_S = 20.0
"""Deadline for copying a block of a host that is being taken away."""


class Production:
    """Head: part of the coordinator; lets the passes of the current attempt be produced.

    Args:
        passes: what to read.
        totals: records of each split; None: unknown.
        hosts: maps train workers by node to the current preprocessing hosts.
    """

    def __init__(
        self, passes: Passes, totals: dict[str, int | None], hosts: Callable[[Counter[str]], list[ChainHost]]
    ) -> None:
        self.passes, self.totals, self.hosts = passes, totals, hosts
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        """The coordinator's lock; those that decide what to produce wait on it."""
        self.ready = threading.Condition(lock)
        """The same lock; ranks wait on it for their rows, and a block that completes a step wakes them."""
        self.attempt: Attempt | None = None
        self.training: dict[int, str] = {}
        """Node of each rank."""
        self.suspects = Suspects()
        self.pool = Pool(groups=tuple(label(group) for group in passes.config.data.preprocess_on))
        self.elastic = Elastic(lambda *_, **__: None)
        """Hosts that come and go."""
        self.engine: Engine | None = None
        self.setups: dict[str, Any] = {}
        """Reference of the Setup of each split."""
        self.blocks: WeakSet[ReadyBlock] = WeakSet()
        """Ready blocks that lie on hosts and are still needed."""
        self.ticket_numbers = count()
        self._started = threading.Lock()

    def start_engine(self, me: Any) -> None:
        """Start the execution that carries the whole run; later attempts restart it only if it has failed.

        Args:
            me: this actor's handle.
        """
        if self._started.acquire(blocking=False):
            threading.Thread(target=self._run_engine, args=(me,), name="engine", daemon=True).start()

    def tickets(self) -> list[int]:
        """Ticket source's call: the tickets to issue now; waits up to one second."""
        deadline = time.monotonic() + TICKETS_WAIT_S
        with self.changed, self._ends_the_attempt():
            while True:
                planner = self._planner()
                issued = planner.issue() if planner else []
                if issued or time.monotonic() > deadline:
                    return issued
                self.changed.wait(0.1)
        return []

    def claim(self, ticket: int, node: str, process: str, ended: int | None = None) -> Claim | None:
        """Chain worker's call: the work behind a ticket; None: there is none left.

        Args:
            ticket: to work on.
            node: where it runs.
            process: id of its actor.
            ended: the ticket before it, if its work is complete: `item_ended` may arrive later.
        """
        with self.changed, self._ends_the_attempt():
            if ended is not None:
                self.item_ended(ended)
            planner = self._planner()
            return planner.claim(ticket, node, process) if planner else None
        return None

    def upcoming(self, ticket: int, process: str) -> Shard | None:
        """Chain worker's call: the shard to prepare while the last one of a ticket is in use."""
        with self.changed:
            planner = self._planner()
            return planner.upcoming(ticket, process) if planner else None

    def setup(self, split: str, loaded: list[str]) -> tuple[list[Any], list[str]]:
        """Chain worker's call: a reference of the Setup of a split, and which loaded splits the worker may
        drop."""
        return [self.setups[split]], []

    def block_made(self, ticket: int, report: BlockReport, origin: Origin, told: Told) -> bool:
        """Chain worker's call: a block will arrive; whether to continue."""
        if not report.rows:  # nothing will arrive
            self._offer(report)
        with self.changed, self._ends_the_attempt():
            planner = self._planner()
            return planner.reported(ticket, report, origin, told) if planner else False
        return False

    def item_ended(self, ticket: int) -> None:
        """Chain worker's call: its work is complete."""
        with self.changed, self._ends_the_attempt():
            if planner := self._planner():
                planner.ended(ticket)

    def item_failed(self, ticket: int, failure: Failure, made: int) -> float:
        """Chain worker's call: its work failed after so many blocks; how long to wait before the same worker
        tries again, 0: it must not."""
        with self.changed, self._ends_the_attempt():
            if planner := self._planner():
                return planner.failed(ticket, failure, made)
        return 0.0

    def _planner(self) -> Planner | None:
        attempt = self.attempt
        return attempt.planner if attempt is not None and not attempt.over else None

    @contextlib.contextmanager
    def _ends_the_attempt(self) -> Iterator[None]:
        """An exception raised inside fails the current attempt."""
        try:
            yield
        except Exception as error:
            if self.attempt is not None:
                self.attempt.fail(explain(error))

    def _run_engine(self, me: Any) -> None:
        """Thread: the Ray Data execution, from the first attempt to the end of the run."""
        import ray

        with self._ends_the_attempt():
            try:
                self.pool.update(self.hosts(Counter()), False, time.monotonic())
                self.setups |= {split: ray.put(self.passes.setup(split)) for split in self.totals}
                head = ray.get_runtime_context().get_node_id()
                shares = self.passes.config.data.share is not None
                self.engine = engine = Engine(me, self.pool, head, shares)
                threading.Thread(target=self._look, args=(engine,), name="look", daemon=True).start()
                engine.run(self._arrived)
            finally:
                # Reset before failing the attempt, so that the next attempt can restart the engine.
                self.engine = None
                self._started.release()

    def _arrived(self, origin: Origin, reference: Any) -> None:
        """Engine's thread: a block has arrived."""
        block = None
        with self.changed, self._ends_the_attempt():
            planner = self._planner()
            block = planner.arrived(origin, reference) if planner else None
            if block is not None and not block.is_small:
                self.blocks.add(block)
        if block is not None:
            self._offer(block.report, reference)

    def _offer(self, report: BlockReport, reference: Any = None) -> None:
        if report.place and self.passes.share is not None:
            self.passes.share.offer(report, reference)

    def holding(self) -> set[str]:
        """Nodes that hold blocks which are still needed."""
        planner = self._planner()
        coming = [block for _, block in planner.coming.values()] if planner else []
        return {block.node for block in (*self.blocks, *coming)}

    def _emptied(self) -> set[str]:
        """Nodes of hosts that are about to leave and hold nothing that is needed."""
        with self.changed:
            closing = self.elastic.closing - self.pool.staffed
            return closing and closing - self.holding()

    def _look(self, engine: Engine) -> None:
        """Thread: handle what changes with time: hosts, pool size, late work."""
        seen, rescue = time.monotonic(), threading.Thread()
        while self.engine is engine:
            with self._ends_the_attempt():
                hosts, draining = self.hosts(Counter(self.training.values())), draining_nodes()
                now = time.monotonic()
                seen = now if any(host.slots for host in hosts) else seen
                self._refuse_no_host(now - seen)
                with self.changed:
                    planner = self._planner()
                    bound = {self.pool.there.get(process, "") for process in self.pool.bound}
                    staying = self.elastic.split(hosts, draining, now, self.attempt, bound)
                    hungry = bool(planner and planner.hungry)
                    self.pool.update(staying, hungry, now, self.elastic.closing)
                    hung = planner.look(now) if planner else []
                    engine.ended = self.is_idle(now)
                if engine.ended:
                    engine.execution.shutdown()
                    return
                if draining and not rescue.is_alive():
                    rescue = threading.Thread(target=self._rescue, args=(draining,), daemon=True)
                    rescue.start()
                self.elastic.send(now)
                engine.look()
                for process in hung:
                    engine.execution.kill(process)
            time.sleep(LOOK_EVERY_S)

    def _rescue(self, draining: set[str]) -> None:
        """Thread: copy the ready blocks of hosts that are being taken away, so that none is made again."""
        import ray

        head = ray.get_runtime_context().get_node_id()
        with self.changed:
            leaving = WeakSet(block for block in self.blocks if block.node in draining - {head})
        for block in leaving:
            # A host that is gone already leaves them to Ray, which has them made again.
            with contextlib.suppress(ray.exceptions.RayError):
                copy = ray.put(ray.get(block.reference, timeout=RESCUE_S))
                with self.changed:
                    block.reference, block.node = copy, head

    def is_idle(self, now: float) -> bool:
        """Whether to end chain workers until a new attempt begins; a run needs them to its end."""
        return False

    def _refuse_no_host(self, seconds: float) -> None:
        # A lost host may come back; hosts of other groups do not take over its group's work.
        data = self.passes.config.data
        deadline = min(NO_HOST_DEADLINE_S, data.stall_timeout_s)
        if seconds > deadline:
            groups = ", ".join(data.preprocess_on)
            which = f"data.preprocess_on allows only {groups}" if groups else "no host offers CPUs to Ray"
            raise DataError(f"no preprocessing host for {deadline:.0f} s: {which}")

    def ray_data_stats(self) -> tuple[str, list[Operator]]:
        """Driver's call: Ray Data's counters and timings, as its own text and by operator."""
        return self.engine.execution.statistics() if self.engine else ("", [])

    def record_begins(self, attempt: int, split: str, task: str, key: str) -> str:
        """Chain worker's call when it reports its records: why one must not be started; empty: it may."""
        with self.changed:
            return self.suspects.begins(task, split, key)

    def task_does(self, attempt: int, split: str, task: str, what: str) -> None:
        """Chain worker's call when it reports its records: activity other than work on one record."""
        with self.changed:
            self.suspects.does(task, what)
