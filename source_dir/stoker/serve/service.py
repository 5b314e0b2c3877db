"""The data service: the actor on the head between chain workers and those that consume their blocks.

Here is what it does for chain workers, and what changes with time: hosts, leases, agents, late work. What it
does for consumers stands beside their kind of attempt: `actor.py` for recipes, `loader/loader_service.py` for
loaders.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any
from weakref import WeakSet

from stoker.config.schema import Config
from stoker.errors import DataError, Failure
from stoker.events.kinds import Event, Note
from stoker.hosts.topology import NODE_LABEL
from stoker.protocol import BlockSlice, Directory, Made, Process, Reply, Shard, SplitSetup
from stoker.ray_compat import draining_nodes
from stoker.read.host_cache import CacheSpec
from stoker.serve.accounting import ChainCosts
from stoker.serve.blocks.agents import Agents, rows_of
from stoker.serve.blocks.client import Transport
from stoker.serve.chain_worker import LastBlock, Leases
from stoker.serve.items import ReadyBlock
from stoker.serve.live_hosts import Hosts
from stoker.serve.passes import ServiceState
from stoker.serve.planner import PlannedAttempt, Planner
from stoker.serve.pool import CacheAffinity
from stoker.serve.scaling import Elastic
from stoker.serve.shards import Setup

LOOK_EVERY_S = 1.0
CLAIM_WAIT_S, WORK_WAIT_S = 5.0, 1.0
"""How long a chain worker waits for work in one call, and between looks."""
LATER_S = 0.5
"""When a chain worker asks again for which there is no room to wait."""
PAUSE_S = 5.0
"""Looks that are further apart tell that this machine stood still."""
MOVED_S = 5.0
LEASES_END_S = 3.0
NO_HOST_DEADLINE_S = 180.0
BUFFER_SHARE = 0.25
"""Budget for preprocessed data beyond the next two steps, as a share of the cluster's object stores."""
LEAST_BUFFER_BYTES = 64 * 2**20
UNUSED_ROWS_S = 120.0
"""Deadline for fetching a block here; it may have to be made again."""


class DataService(ABC):
    """See the module. Runs on `node`, with zero CPUs, and is called from many threads.

    At most `most_waiting` chain workers wait here for work at once, as each takes a thread.
    """

    attempt: PlannedAttempt | None
    executes_datasets = False
    """Whether recipes' own datasets are executed in this process."""

    def __init__(
        self,
        config: Config,
        node: str,
        budget_bytes: int,
        most_waiting: int,
        chain: dict[str, ChainCosts],
        cache: CacheSpec | None = None,
    ) -> None:
        self.config, self.node, self.chain, self.most_waiting = config, node, chain, most_waiting
        affinity = CacheAffinity(cache.kind) if cache else None
        self.shared = ServiceState(self.event, budget_bytes, chain, affinity)
        self.attempt = None
        self.setups: dict[str, Any] = {}
        self.over = False
        """Whether all leases end."""
        agents = Agents(
            self.log,
            cache=cache,
            note=lambda text: self.log(Note(text=text)),
            emptied=self.emptied,
            unused=self.shared.holdings.unused,
            died=self.agent_died,
            noticing=self._ends_the_attempt,
        )
        elastic = Elastic(self.event, chain, config.cluster.cpu_hosts)
        self.hosts = Hosts(self.shared.pool, elastic, agents)
        self._waiting = 0
        self._started = threading.Lock()
        self._look_now, self._looked = threading.Event(), math.inf

    @abstractmethod
    def event(self, event: Event) -> None:
        """Pass on an event of the run; called with the lock held."""

    def log(self, event: Event) -> None:
        """Consumer's call, also of threads here: an event of the run."""
        with self.shared.changed:
            self.event(event.received())

    def start_engine(self, me: Any) -> None:
        if not self.shared.pool.slots:  # chain workers are to start, now
            self._look_now.set()
        if self._started.acquire(blocking=False):
            self.hosts.agents.start(me)
            threading.Thread(target=self._look, args=(me,), name="look", daemon=True).start()

    @cached_property
    def transport(self) -> Transport:
        return Transport(self.servers, self.moved, self.node, pinned=False, timeout_s=UNUSED_ROWS_S)

    def servers(self) -> Directory:
        return self.hosts.agents.directory()

    def rows(self, *request: Any) -> tuple[dict[str, Any], int]:
        """Consumer's call, as of an agent."""
        return rows_of(self.hosts.agents.folder, *request)

    def moved(self, part: BlockSlice, missing: bool) -> BlockSlice:
        """Consumer's call about rows that it could not fetch: where they are now; DataError if they are lost.

        Waits a moment for a lost block. `missing`: its host answers, but does not have it.
        """
        deadline = time.monotonic() + MOVED_S
        with self.shared.changed, self._ends_the_attempt():
            while (block := self.shared.holdings.find(part.block)) is not None:
                planner = self._planner()
                if planner is None:
                    break
                if missing and block.file == part.block and not block.lost:
                    planner.lose([block])
                    self.shared.changed.notify_all()
                if not block.lost or time.monotonic() > deadline:
                    return block.part(part.start, part.stop)
                self.shared.changed.wait(0.5)
                del block  # what nobody else needs must not stay because of this call
        failure = self.attempt.failure if self.attempt is not None else None
        raise (failure or Failure("Over", text="the work that a block belongs to is over")).error()

    def begin_lease(self, by: Process, handle: Any) -> None:
        """Chain worker's call: from now on, its process is this one."""
        with self.shared.changed, self._ends_the_attempt():
            self.hosts.entered(by, handle)
            if (planner := self._planner()) is not None:
                planner.begins(by)

    def claim(self, by: Process, loaded: list[str], last: LastBlock) -> Reply:
        """Chain worker's call: what to make, given the splits that it has open and the last block it made."""
        deadline = time.monotonic() + CLAIM_WAIT_S
        with self.shared.changed, self._ends_the_attempt():
            self.hosts.seen(by)
            if last is not None:
                self._made(by, *last)
            while self.hosts.knows(by) and not (self.over or by.worker in self.shared.pool.leaving):
                planner = self._planner()
                claim = planner.claim(by) if planner else None
                many = self._waiting >= self.most_waiting
                if claim is not None or many or time.monotonic() >= deadline:
                    wait_s = LATER_S if many and claim is None else 0.0
                    setup = self._setup(claim.plan.split, loaded) if claim is not None else None
                    return Reply(
                        claim, setup, unused=self.shared.holdings.unused(by.node), wait_s=wait_s
                    )
                self._wait_for_work()
            if (planner := self._planner()) is not None:
                planner.ended(by)
            self.hosts.left(by)
            return Reply(go_on=False)
        return Reply(wait_s=LATER_S)

    def _wait_for_work(self) -> None:
        self._waiting += 1
        try:
            self.shared.has_work.wait(WORK_WAIT_S)
        finally:
            self._waiting -= 1

    def upcoming(self, by: Process) -> Shard | None:
        """Chain worker's call: the shard to prepare while its last one is in use."""
        with self.shared.changed:
            planner = self._planner()
            return planner.upcoming(by) if planner else None

    def _setup(self, split: str, loaded: list[str]) -> SplitSetup | None:
        if split in loaded:
            return None
        return SplitSetup(
            self.setups[split.partition("/")[0]], frozenset(self.setups) | self.copies()
        )

    def copies(self) -> set[str]:
        """Splits that share the Setup of the name before their slash, but are opened anew."""
        return set()

    def block_made(self, by: Process, number: int, made: Made) -> Reply:
        """Chain worker's call: a block that others follow."""
        with self.shared.changed:
            self.hosts.seen(by)
            go_on = False
            with self._ends_the_attempt():
                go_on = self._made(by, number, made)
            return Reply(go_on=go_on, unused=self.shared.holdings.unused(by.node))

    def _made(self, by: Process, number: int, made: Made) -> bool:
        if (planner := self._planner()) is not None:
            return planner.reported(by, number, made)
        self.shared.holdings.discard(by.node, made.file)
        return False

    def item_failed(self, by: Process, number: int, failure: Failure, retries: int) -> None:
        with self.shared.changed, self._ends_the_attempt():
            if planner := self._planner():
                planner.failed(by, number, failure, retries)

    def _planner(self) -> Planner | None:
        attempt = self.attempt
        return attempt.planner if attempt is not None and not attempt.over else None

    @contextlib.contextmanager
    def _ends_the_attempt(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.attempt is not None:
                self.attempt.fail(Failure.of(error))

    def emptied(self) -> set[str]:
        """As `Hosts.emptied`."""
        with self.shared.changed:
            return self.hosts.emptied(
                lambda: {block.node for block in self.shared.holdings.all() if not block.lost}
            )

    def agent_died(self, node: str) -> None:
        with self.shared.changed, self._ends_the_attempt():
            self._lose(lambda block: block.node == node)

    def _lose(self, gone: Callable[[ReadyBlock], bool]) -> None:
        if (planner := self._planner()) is not None:
            planner.lose([block for block in self.shared.holdings.all() if gone(block)])
            self.shared.has_work.notify_all()

    def first_setups(self) -> dict[str, Setup]:
        return {}

    def _look(self, me: Any) -> None:
        """Thread: handle what changes with time: hosts, chain workers, late work."""
        import ray

        with self._ends_the_attempt():
            self.setups |= {split: ray.put(setup) for split, setup in self.first_setups().items()}
        hosts, self._rescuer = self.hosts, threading.Thread()
        hosts.leases = leases = Leases(me, hosts.agents.run, hosts.pool, self._lease_failed)
        hosts.last_one = time.monotonic()
        while True:
            self._look_now.clear()
            with self._ends_the_attempt():
                lost = hosts.agents.lost
                nodes = [n | {"Alive": n["Alive"] and n["NodeID"] not in lost} for n in ray.nodes()]
                hung = self._look_once(nodes, time.monotonic())
                hosts.elastic.send(time.monotonic())
                if not self.over:
                    with self.shared.changed:
                        silent = hosts.some_are_silent()
                    leases.look(not self.executes_datasets, silent)
                for handle in hung:
                    ray.kill(handle, no_restart=False)  # Ray starts another process, which goes on
            self._look_now.wait(LOOK_EVERY_S)

    def _look_once(self, nodes: list[dict[str, Any]], now: float) -> list[Any]:
        """The handles of chain workers that hang."""
        alive, draining = {n["NodeID"] for n in nodes if n["Alive"]}, draining_nodes()
        hosts = self.hosts
        with self.shared.changed:
            planner = self._planner()
            self._paused(max(now - self._looked - PAUSE_S, 0.0), planner)
            self._looked = now
            ended = self.attempt is not None and self.attempt.all_produced
            hungry = bool(planner and planner.hungry)
            hosts.split(self.config, self.node, nodes, draining, now, ended, hungry, self.is_idle)
            self._refuse_no_host(now - hosts.last_one)
            active = self.attempt.planner.active if self.attempt and self.attempt.planner else {}
            hosts.forget_lost(alive, active, now)
            self._lose(lambda block: block.node not in alive)
            hung = planner.look(now) if planner else []
            self.shared.has_work.notify_all()
            handles = [hosts.workers[worker].handle for worker in hung if worker in hosts.workers]
        if draining and not self._rescuer.is_alive():
            self._rescuer = threading.Thread(target=self._rescue, args=(draining,), daemon=True)
            self._rescuer.start()
        return handles

    def _paused(self, seconds: float, planner: Planner | None) -> None:
        """This machine stood still, and perhaps others with it: nobody is late by what nobody could do."""
        if not seconds:
            return
        self.hosts.extend(seconds)
        for item in (*planner.active.values(), *planner.again) if planner else ():
            item.quiet_since += seconds
            item.stuck_since += seconds

    def _lease_failed(self, error: BaseException) -> None:
        if not self.over and self.attempt is not None:
            self.attempt.fail(Failure.of(error))

    def _rescue(self, draining: set[str]) -> None:
        """Thread: copy the ready blocks of hosts that are being taken away, so that none is made again."""
        head = self.node
        with self.shared.changed:
            leaving = WeakSet(
                block for block in self.shared.holdings.all() if block.node in draining - {head}
            )
        for block in leaving:
            # A host that is gone already has lost them, and they are made again.
            with contextlib.suppress(DataError, OSError):
                rows, _, _, _ = self.transport.rows(block.part(0, block.report.rows))
                file = self.hosts.agents.folder.write(rows)
                with self.shared.changed:
                    if block.lost or block.node == head:
                        self.shared.holdings.discard(head, file)
                    else:
                        self.shared.holdings.move(block, head, file)

    def is_idle(self, now: float) -> bool:
        """Whether to end chain workers until a new attempt begins; a run needs them to its end."""
        return False

    def _refuse_no_host(self, seconds: float) -> None:
        # A lost host may come back; hosts of other groups do not take over its group's work.
        groups = ", ".join(self.config.data.preprocess_on)
        which = (
            f"data.preprocess_on allows only {groups}" if groups else "no host offers CPUs to Ray"
        )
        if (attempt := self.attempt) is None:
            return
        for pass_ in attempt.open_passes():
            deadline = min(NO_HOST_DEADLINE_S, pass_.stall_s)
            if seconds > deadline:
                attempt.stalled(pass_, f"no preprocessing host for {deadline:.0f} s: {which}")

    def ray_data_stats(self) -> tuple[str, list[dict[str, Any]]]:
        """Driver's call at the end: Ray Data's statistics, as text and by operator. Ends all leases."""
        with self.shared.changed:
            self.over = True
            self.shared.has_work.notify_all()
        if (leases := self.hosts.leases) is None:
            return "", []
        leases.join(LEASES_END_S)
        return leases.statistics()

    def record_begins(self, split: str, task: str, key: str) -> str:
        """Chain worker's call when it reports its records: why one must not be started; empty: it may."""
        with self.shared.changed:
            # A script's attempt has suspects of its own: each starts anew.
            return (self.attempt or self.shared).suspects.begins(task, split, key)

    def task_does(self, split: str, task: str, what: str) -> None:
        with self.shared.changed:
            (self.attempt or self.shared).suspects.does(task, what)


def start_service(
    kind: type[DataService],
    config: Config,
    callers: int,
    options: dict[str, Any],
    **arguments: Any,
) -> Any:
    """Start the service as an actor on this host; `callers` consumers may call at once."""
    import ray

    node, resources = ray.get_runtime_context().get_node_id(), ray.cluster_resources()
    cpus = int(resources.get("CPU", 1))
    actor = ray.remote(kind).options(
        num_cpus=0, max_concurrency=callers + 2 * cpus, label_selector={NODE_LABEL: node}, **options
    )
    budget = max(LEAST_BUFFER_BYTES, int(BUFFER_SHARE * resources.get("object_store_memory", 0)))
    common = {"config": config, "node": node, "budget_bytes": budget}
    return actor.remote(most_waiting=cpus, **common, **arguments)
