"""Head and CPU hosts: an agent on every other host, which serves blocks and measures CPU utilization."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from stoker.errors import CacheError, where_raised
from stoker.hosts import machine
from stoker.hosts.topology import NODE_LABEL
from stoker.messages import Directory, Server
from stoker.read.host_cache import PREFIX, CacheSpec, open_root
from stoker.serve.blocks.folder import PREFIX as BLOCKS
from stoker.serve.blocks.folder import BlockFolder, here
from stoker.serve.blocks.server import BlockServer
from stoker.storage.checkpoint_store import Cleaner

SAMPLE_EVERY_S = 3.0
AGENT_START_S = 60.0
"""Deadline for an agent to answer; without it, no other host gets its host's blocks."""
ANSWER_S = 5.0
RESTARTS = 3
"""Number of restarts of a host's agent before the run continues without it."""
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
        self._cpu = CpuMeter()

    def where(self) -> tuple[str, int]:
        """Address and port of the block server."""
        return self._address, self._server.port

    def rows(self, block: str, start: int, stop: int) -> tuple[dict[str, Any], int]:
        """Where no socket is to be had: rows of a block, and the block's length.

        Raises:
            FileNotFoundError: it is not here.
        """
        columns = self._folder.columns(block)
        rows = {name: column[start:stop] for name, column in columns.items()}
        return rows, min(map(len, columns.values()), default=0)

    def look(self, unused: list[str]) -> float:
        """Drop blocks; CPU utilization of this host since the last call, in percent."""
        self._folder.remove(unused)
        return self._cpu.sample()


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


class CpuMeter:
    """The share of the CPUs that this process may use that is busy, between two samples."""

    def __init__(self) -> None:
        self._last = machine.cpu_times()

    def sample(self) -> float:
        """Percent of these CPUs since the previous sample."""
        now = machine.cpu_times()
        busy, whole = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        return round(min(100.0, max(0.0, 100 * busy / max(whole, 1e-9))), 1)


class Agents:
    """Runs an agent on every host of the cluster, whenever it joins, and samples their CPUs.

    An agent that dies is restarted with a note. Its host's blocks and cache go with it, and until it answers,
    no other host gets blocks from there.

    Args:
        told: receives {node: percent} every few seconds.
        note: receives one line about an agent that died.
        cache: what hosts cache until the run ends.
        emptied: nodes of hosts that are about to leave and no longer need an agent.
        unused: blocks on a host that nobody needs any more.
        lost: a host's agent died, and with it the blocks there.
    """

    def __init__(
        self,
        told: Callable[[dict[str, float]], None],
        cache: CacheSpec | None = None,
        note: Callable[[str], None] = lambda text: None,
        emptied: Callable[[], set[str]] = set,
        unused: Callable[[str], list[str]] = lambda node: [],
        lost: Callable[[str], None] = lambda node: None,
    ) -> None:
        self._emptied, self._unused, self._lost = emptied, unused, lost
        self.run, self.secret = secrets.token_hex(8), secrets.token_bytes(32)
        self.folder = here(self.run)
        self._told, self._cache, self._note = told, cache, note
        self._deaths: Counter[str] = Counter()
        self._not_before: dict[str, float] = {}
        """When an agent that died may be restarted, by node."""
        self._cleaners = clean_up(self.folder, cache)
        self._lock = threading.Lock()
        self._servers: dict[str, Server] = {}
        threading.Thread(target=self._watch, name="hosts", daemon=True).start()

    def directory(self) -> Directory:
        """Where the run's blocks are served."""
        with self._lock:
            return Directory(self.run, self.secret, dict(self._servers))

    def _watch(self) -> None:
        import ray

        own = ray.get_runtime_context().get_node_id()
        meter = CpuMeter()
        starting: dict[Any, tuple[str, Any, float]] = {}
        agents: dict[str, Any] = {}
        while True:
            alive = {n["NodeID"]: n for n in ray.nodes() if n["Alive"]}
            for node in alive.keys() & self._emptied():
                del alive[node]  # an autoscaler does not remove a host on which an actor runs
                if node in agents:
                    ray.kill(agents[node])
            agents = {node: agent for node, agent in agents.items() if node in alive}
            for node in alive:
                due = self._not_before.get(node, 0.0) <= time.monotonic()
                if node != own and node not in agents and due:
                    agents[node] = self._start(node)
                    starting[agents[node].where.remote()] = (node, agents[node], time.monotonic())
            died = self._take_in(starting)
            started = time.monotonic()
            calls = {node: agents[node].look.remote(self._unused(node)) for node in self._ready(agents)}
            used, gone = self._answers(calls)
            for node, cause in (died | gone).items():
                agents.pop(node, None)
                if node in alive:
                    self._bury(node, alive[node], cause)
            self.folder.remove(self._unused(own))
            self._told({own: meter.sample()} | used)
            time.sleep(max(0.5, SAMPLE_EVERY_S - (time.monotonic() - started)))

    def _start(self, node: str) -> Any:
        import ray

        options = {"num_cpus": 0, "max_concurrency": 8, "label_selector": {NODE_LABEL: node}}
        return ray.remote(HostAgent).options(**options).remote(self.run, self.secret, self._cache)

    def _bury(self, node: str, about: dict[str, Any], cause: str) -> None:
        """An agent died: decide whether and when to restart it, and emit a note."""
        import ray

        if not any(n["NodeID"] == node and n["Alive"] for n in ray.nodes()):
            return  # its host is gone too, which is reported elsewhere
        self._lost(node)
        self._deaths[node] += 1
        with self._lock:
            self._servers.pop(node, None)
        name = about.get("Labels", {}).get("stoker.host") or about.get("NodeManagerHostname", node)
        again = self._deaths[node] <= RESTARTS
        self._not_before[node] = time.monotonic() + RESTART_AFTER_S if again else float("inf")
        then = "restarting it" if again else f"giving up after {self._deaths[node]} deaths"
        self._note(
            f"the agent on host {name} died ({cause}), and its blocks with it, which are made again; {then}"
        )

    def _ready(self, agents: dict[str, Any]) -> list[str]:
        with self._lock:
            self._servers = {node: s for node, s in self._servers.items() if node in agents}
            return list(self._servers)

    def _take_in(self, starting: dict[Any, tuple[str, Any, float]]) -> dict[str, str]:
        """Register agents that have answered as servers; give up on those past their deadline.

        Returns:
            Nodes whose agent died as it started, with the cause.
        """
        import ray

        died: dict[str, str] = {}
        if not starting:
            return died
        done, _ = ray.wait(list(starting), num_returns=len(starting), timeout=0.5)
        for call in list(starting):
            node, agent, since = starting[call]
            if call in done:
                del starting[call]
                try:
                    address, port = ray.get(call)
                except ray.exceptions.RayError as error:
                    died[node] = where_raised(error)[:200]
                    continue
                with self._lock:
                    self._servers[node] = Server(agent, address, port)
            elif time.monotonic() - since > AGENT_START_S:
                del starting[call]
        return died

    def _answers(self, calls: dict[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
        """(answers of the agents, nodes whose agent has died with the cause)."""
        import ray

        found: dict[str, float] = {}
        died: dict[str, str] = {}
        if not calls:
            return found, died
        done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_S)
        for node, call in calls.items():
            if call not in done:
                continue
            try:
                found[node] = float(ray.get(call))
            except ray.exceptions.ActorDiedError:
                died[node] = "its process ended"
            except ray.exceptions.RayError:
                continue  # it may answer next time
        return found, died
