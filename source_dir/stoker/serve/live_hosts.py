"""Part of the service: the cluster's hosts, their agents, and the chain workers on them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from stoker.config.schema import Config
from stoker.protocol import Process
from stoker.serve.blocks.agents import Agents
from stoker.serve.chain_worker import Leases
from stoker.serve.pool import Pool, chain_hosts
from stoker.serve.scaling import Elastic

SILENT_S = 60.0
"""A chain worker without work that has not called for so long is gone."""


class ChainProcess(NamedTuple):
    by: Process
    handle: Any
    seen: float


class Hosts:
    """See the module; guarded by the service's lock."""

    def __init__(self, pool: Pool, elastic: Elastic, agents: Agents) -> None:
        self.pool, self.elastic, self.agents = pool, elastic, agents
        self.training: dict[int | str, str] = {}
        """Node of each rank, or of each job of a script."""
        self.leases: Leases | None = None
        self.workers: dict[str, ChainProcess] = {}
        """Chain workers that hold a lease, by id."""
        self.last_one = time.monotonic()
        """When a host last offered CPUs."""

    def entered(self, by: Process, handle: Any) -> None:
        new = by.worker not in self.workers
        self.workers[by.worker] = ChainProcess(by, handle, time.monotonic())
        if new and self.leases is not None:
            self.leases.entered(by.node)

    def left(self, by: Process) -> None:
        if self.knows(by):
            del self.workers[by.worker]
        if self.leases is not None:
            self.leases.watch()

    def seen(self, by: Process) -> None:
        if self.knows(by):
            self.workers[by.worker] = self.workers[by.worker]._replace(seen=time.monotonic())

    def knows(self, by: Process) -> bool:
        """Whether a chain worker's process is its present one: calls of one that has died arrive late."""
        known = self.workers.get(by.worker)
        return known is not None and known.by.token == by.token

    def some_are_silent(self) -> bool:
        now = time.monotonic()
        return any(now - each.seen > SILENT_S / 2 for each in self.workers.values())

    def extend(self, seconds: float) -> None:
        """After this machine stood still, perhaps with others: nobody is late by that."""
        workers = self.workers.items()
        self.workers = {k: each._replace(seen=each.seen + seconds) for k, each in workers}

    def emptied(self, needed: Callable[[], set[str]]) -> set[str]:
        """Nodes of hosts that are about to leave and hold nothing that is `needed`."""
        closing = self.elastic.closing - self.pool.staffed
        return closing and closing - needed()

    def split(
        self,
        config: Config,
        own: str,
        nodes: list[dict[str, Any]],
        draining: set[str],
        now: float,
        ended: bool,
        hungry: bool,
        idle: Callable[[float], bool],
    ) -> None:
        """Update which hosts preprocess; `own`: the head's node."""
        hosts = chain_hosts(config, own, nodes, Counter(self.training.values()))
        self.last_one = now if any(host.slots for host in hosts) else self.last_one
        bound = {self.pool.there.get(process, "") for process in self.pool.bound}
        staying = self.elastic.split(hosts, draining, now, ended, bound)
        self.pool.update(staying, hungry, now, self.elastic.closing, idle(now))

    def forget_lost(self, alive: Collection[str], at_work: Collection[str], now: float) -> None:
        """Ray restarts chain workers of a lost host elsewhere; they enter again there."""
        for worker, each in list(self.workers.items()):
            busy = worker in at_work or worker in self.pool.bound
            if each.by.node not in alive or (not busy and now - each.seen > SILENT_S):
                del self.workers[worker]
        self.pool.workers_are({worker: each.by.node for worker, each in self.workers.items()}, now)
