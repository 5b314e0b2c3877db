"""Every host of a cluster: its blocks are served and its CPU utilization is measured.

By an agent, on the head by the data service itself.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker.errors import CacheError, where_raised
from stoker.events.kinds import HostCpu
from stoker.hosts import machine
from stoker.hosts.topology import NODE_LABEL, host_name
from stoker.protocol import Directory, Server
from stoker.read.host_cache import PREFIX, CacheSpec, open_root
from stoker.serve.blocks.folder import PREFIX as BLOCKS
from stoker.serve.blocks.folder import BlockFolder, BlockServer, here
from stoker.storage.checkpoint_store import Cleaner

SAMPLE_EVERY_S = 3.0
AGENT_START_S = 120.0
"""Deadline for an agent's first answer; without one, it counts as dead."""
ANSWER_S, STARTING_S = 5.0, 0.5
"""How long to wait for answers in a round; while an agent starts, shorter rounds find it sooner."""
RESTARTS, FORGIVEN_S = 3, 3600.0
"""Number of restarts of a host's agent in this time before the run continues without its host."""
SILENT_S = 45.0
"""After this long without an answer, a host that takes no connections is lost. Ray mostly notices sooner."""
PROBE_S = 2.0
RESTART_AFTER_S = 6.0
"""By then the cleanup shell has removed the cache of the dead agent's host."""


class HostAgent:
    """One per host and run, zero CPUs, an actor that lives as long as the service."""

    def __init__(self, run: str, secret: bytes, cache: CacheSpec | None = None) -> None:
        import ray

        self._folder = here(run)
        self._cleaners = clean_up(self._folder, cache)
        self._address = ray.util.get_node_ip_address()
        self._server = BlockServer(self._address, secret, self._folder)
        self._meter = Meter()

    def where(self) -> tuple[str, int]:
        return self._address, self._server.port

    def rows(self, *request: Any) -> tuple[dict[str, Any], int]:
        return rows_of(self._folder, *request)

    def look(self, unused: list[str]) -> tuple[float, list[float]]:
        """Drop blocks; utilization in percent of this host's CPUs since the last call, and of each GPU."""
        self._folder.remove(unused)
        return self._meter.sample()


def rows_of(
    folder: BlockFolder, block: str, start: int, stop: int, done: list[str]
) -> tuple[dict[str, Any], int]:
    """Where no socket is to be had: drop blocks; rows of another, and its length."""
    folder.remove(done)
    columns = folder.columns(block)
    rows = {name: column[start:stop] for name, column in columns.items()}
    return rows, min(map(len, columns.values()), default=0)


def clean_up(folder: BlockFolder, cache: CacheSpec | None) -> list[Cleaner]:
    """Remove the run's files on this host when this process ends."""
    cleaners = []
    for root in folder.roots:
        root.mkdir(mode=0o700, exist_ok=True)
        cleaners.append(Cleaner(root, BLOCKS))
    if cache is not None:
        with contextlib.suppress(CacheError):  # the host's chain workers report it, if it has any
            open_root(root := cache.root())
            cleaners.append(Cleaner(root, PREFIX))
    return cleaners


class Meter:
    """The share of the CPUs that this process may use that is busy between two samples, and GPUs' use now."""

    def __init__(self) -> None:
        self._last = machine.cpu_times()
        self._has_gpus = shutil.which("nvidia-smi") is not None

    def sample(self) -> tuple[float, list[float]]:
        now = machine.cpu_times()
        busy, whole = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        used = round(min(100.0, max(0.0, 100 * busy / max(whole, 1e-9))), 1)
        return used, machine.gpu_use() if self._has_gpus else []


@dataclass
class _Agent:
    """An agent as the head knows it; it has at most one call to answer."""

    actor: Any
    call: Any
    since: float
    """When it was started, later when it last answered."""
    server: Server | None = None

    def is_lost(self) -> bool:
        """Whether its host answers nothing, not even its kernel, though Ray counts it as alive.

        Ray's check of hosts stands still for as long as the head's date went back.
        """
        if self.server is None or time.monotonic() - self.since < SILENT_S:
            return False
        with contextlib.suppress(OSError):
            socket.create_connection((self.server.address, self.server.port), PROBE_S).close()
            return False
        return True


class Agents:
    """Runs an agent on every other host of a cluster, whenever it joins, and samples their CPUs.

    An agent that dies is restarted with a note. Its host's blocks and cache go with it, and until it answers,
    no other host gets blocks from there. If it dies too often, its host is lost until that is an hour ago.
    `emptied` has the nodes that no longer need an agent, and `noticing` is entered for each round of looks: an
    error in one must not end them unseen.
    """

    def __init__(
        self,
        told: Callable[[HostCpu], None],
        cache: CacheSpec | None = None,
        note: Callable[[str], None] = lambda text: None,
        emptied: Callable[[], set[str]] = set,
        unused: Callable[[str], list[str]] = lambda node: [],
        died: Callable[[str], None] = lambda node: None,
        noticing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._emptied, self._unused, self._died = emptied, unused, died
        self._noticing = noticing
        self.run, self.secret = secrets.token_hex(8), secrets.token_bytes(32)
        self.folder = here(self.run)
        self._told, self._cache, self._note = told, cache, note
        self._deaths: dict[str, list[float]] = {}
        """When its agents died in the last hour, by node."""
        self._not_before: dict[str, float] = {}
        """When an agent that died may be restarted, by node."""
        self._cleaners = clean_up(self.folder, cache)
        self._own: Any = None
        self._server: dict[str, Server] = {}
        """The head's, once there is another host: whoever runs there maps the blocks that are there."""
        self._agents: dict[str, _Agent] = {}
        """By node. The thread `hosts` puts another in its place, and changes none."""
        self.lost: frozenset[str] = frozenset()
        """Nodes that are lost, but alive by Ray: they answer nothing, or their agents died too often."""
        self._thread = threading.Thread(target=self._watch, name="hosts", daemon=True)

    def start(self, own: Any = None) -> None:
        """Begin to watch; `own` is the actor in which this runs, if it has blocks."""
        self._own = own
        self._thread.start()

    def directory(self) -> Directory:
        servers = {node: agent.server for node, agent in self._agents.items() if agent.server}
        return Directory(self.run, self.secret, self._server | servers)

    @property
    def nodes(self) -> set[str]:
        return set(self._agents)

    def _watch(self) -> None:
        meter = Meter()
        while True:
            started = time.monotonic()
            with self._noticing():
                self._look(meter)
            time.sleep(max(0.5, SAMPLE_EVERY_S - (time.monotonic() - started)))

    def _look(self, meter: Meter) -> None:
        import ray

        own = ray.get_runtime_context().get_node_id()
        alive = {n["NodeID"]: n for n in ray.nodes() if n["Alive"]}
        for node in alive.keys() & self._emptied():
            del alive[node]  # an autoscaler does not remove a host on which an actor runs
            if node in self._agents:
                ray.kill(self._agents[node].actor)
        agents = {node: agent for node, agent in self._agents.items() if node in alive}
        if len(alive) > 1 and self._own is not None and not self._server:
            self._server = {own: Server(self._own, *self._serve(ray.util.get_node_ip_address()))}
        for node in alive.keys() - agents.keys() - {own}:
            if self._not_before.get(node, 0.0) <= time.monotonic():
                agents[node] = self._start(node)
        used, died = self._answers(agents)
        self._agents = {node: agent for node, agent in agents.items() if node not in died}
        for node, cause in died.items():
            self._bury(node, alive[node], cause)
        silent = {node for node, agent in self._agents.items() if agent.is_lost()}
        for node in silent - self.lost:
            self._note(f"host {host_name(alive[node])} no longer answers: others do its work")
        dying = {n for n in alive if len(self._deaths.get(n, [])) > RESTARTS}
        self.lost = frozenset(silent | (dying - self._agents.keys()) - {own})
        self.folder.remove(self._unused(own))
        used[own] = meter.sample()
        gpus = {node: use for node, (_, use) in used.items() if use}
        self._told(HostCpu(hosts={node: cpu for node, (cpu, _) in used.items()}, gpus=gpus))

    def _serve(self, address: str) -> tuple[str, int]:
        try:
            return address, BlockServer(address, self.secret, self.folder).port
        except OSError as error:
            self._note(
                f"no socket for the blocks of this host ({error}): other hosts get them through Ray"
            )
            return address, 0

    def _start(self, node: str) -> _Agent:
        import ray

        options = {"num_cpus": 0, "max_concurrency": 8, "label_selector": {NODE_LABEL: node}}
        actor = ray.remote(HostAgent).options(**options).remote(self.run, self.secret, self._cache)
        return _Agent(actor, actor.where.remote(), time.monotonic())

    def _answers(
        self, agents: dict[str, _Agent]
    ) -> tuple[dict[str, tuple[float, list[float]]], dict[str, str]]:
        """Use of CPUs and GPUs by node; nodes whose agent has died, or does not start, with the cause."""
        import ray

        used: dict[str, tuple[float, list[float]]] = {}
        died: dict[str, str] = {}
        starting = False
        for node, agent in agents.items():
            if agent.server is not None and agent.call is None:
                agent.call = agent.actor.look.remote(self._unused(node))
            # A host may have to install the job's packages first: the second agent gets twice the time.
            limit_s = AGENT_START_S * 2.0 ** len(self._deaths.get(node, []))
            if agent.server is None and time.monotonic() - agent.since > limit_s:
                ray.kill(agent.actor)
                agent.call, died[node] = None, f"no answer within {limit_s:.0f} s"
            starting |= agent.server is None and agent.call is not None
        calls = {agent.call: node for node, agent in agents.items() if agent.call is not None}
        timeout_s = STARTING_S if starting else ANSWER_S
        done = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)[0] if calls else []
        for call in done:
            node, agent = calls[call], agents[calls[call]]
            agent.call = None
            try:
                if agent.server is None:
                    agent.server = Server(agent.actor, *ray.get(call))
                else:
                    used[node] = ray.get(call)
                agent.since = time.monotonic()
            except ray.exceptions.RayError as error:
                if agent.server is None:
                    died[node] = where_raised(error)[:200]
                elif isinstance(error, ray.exceptions.ActorDiedError):
                    died[node] = "its process ended"  # otherwise it may answer next time
        return used, died

    def _bury(self, node: str, about: dict[str, Any], cause: str) -> None:
        import ray

        if not any(n["NodeID"] == node and n["Alive"] for n in ray.nodes()):
            return  # its host is gone too, which is reported elsewhere
        self._died(node)
        now = time.monotonic()
        lately = [at for at in self._deaths.get(node, []) if now - at < FORGIVEN_S]
        self._deaths[node] = deaths = [*lately, now]
        again = len(deaths) <= RESTARTS
        wait_s = RESTART_AFTER_S if again else deaths[0] + FORGIVEN_S - now
        self._not_before[node] = now + wait_s
        given_up = (
            f"after {len(deaths)} deaths in an hour, others do its work for {wait_s / 60:.0f} min"
        )
        then = "restarting it" if again else given_up
        self._note(
            f"the agent on host {host_name(about)} died ({cause}), and its blocks with it, which are made"
            f" again; {then}"
        )
