"""Head: which hosts preprocess, with how many chain workers each; pure.

Hosts that only preprocess come first. Hosts that train help out with the CPUs that their train workers leave
free, while too little data is ready.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.data.engine.deadlines import others

GROW_AFTER_S, SHRINK_AFTER_S = 2.0, 20.0
"""So long too little, or enough, has to be ready before chain workers are started on hosts that train, or
ended there: a process takes seconds to start."""
MOVE_EVERY_S = 60.0
"""Chain workers are moved no more often: one that finds no room where it belongs starts elsewhere again."""


@dataclass(frozen=True)
class ChainHost:
    """Head: a host that may preprocess."""

    node: str
    slots: int
    """Chain workers that run on it at once."""
    trains: bool = False
    name: str = ""
    """What people call it."""


@dataclass
class Pool:
    """Head: one per run. The planner reads it; Ray Data's thread asks `place`."""

    hosts: dict[str, ChainHost] = field(default_factory=dict)
    avoided: set[str] = field(default_factory=set)
    """Nodes that did not answer in time; they get work only where there is no other."""
    groups: tuple[str, ...] = ()
    """The only groups that may preprocess; none: all may."""
    helping: bool = False
    """Whether there are chain workers on hosts that train, too, although other hosts do nothing else."""
    hungry: bool = False
    """Whether these have work now."""
    wanted: dict[str, int] = field(default_factory=dict)
    """Chain workers by node."""
    slots: int = 0
    """Chain workers that run at once on all hosts."""
    leaving: list[str] = field(default_factory=list)
    """Chain workers that are beyond what their hosts are to have: they get no more work."""
    staffed: set[str] = field(default_factory=set)
    """Nodes where chain workers run."""
    _first: set[str] = field(default_factory=set)
    """Hosts that preprocess at any time: those that do nothing else, or all where there are none."""
    _since: float | None = None
    """When `hungry` last changed."""
    _moved: float = -MOVE_EVERY_S
    """When chain workers were last found to be elsewhere than wanted."""

    def update(self, hosts: Iterable[ChainHost], hungry: bool, now: float) -> None:
        """The hosts there are now: some came late, some were lost.

        Args:
            hosts: of the cluster.
            hungry: whether too little data is ready.
            now: `time.monotonic()`.
        """
        self.hosts = {host.node: host for host in hosts if host.slots > 0}
        if hungry != self.hungry or self._since is None:
            self.hungry, self._since = hungry, now
        if now - self._since >= (GROW_AFTER_S if hungry else SHRINK_AFTER_S):
            self.helping = hungry
        self._first = {n for n, host in self.hosts.items() if not host.trains} or set(self.hosts)
        known = self.hosts.items()
        self.wanted = {n: host.slots for n, host in known if self.helping or n in self._first}
        self.slots = sum(self.wanted.values())

    def workers_are(self, there: Mapping[str, str], now: float) -> None:
        """The chain workers there are now: Ray starts those of a lost host again wherever there is room.

        Args:
            there: id → node.
            now: `time.monotonic()`.
        """
        self.staffed = set(there.values())
        left = Counter(self.wanted)
        beyond = []
        for process, node in there.items():
            left[node] -= 1
            if left[node] < 0:
                beyond.append(process)
        self.leaving = [process for process in self.leaving if process in beyond]
        if beyond and left and not self.leaving and now - self._moved >= MOVE_EVERY_S:
            self.leaving, self._moved = beyond, now

    def may_work(self, node: str, tried: Iterable[str] = ()) -> bool:
        """Whether a host is given work.

        Args:
            node: the host.
            tried: nodes where the work went wrong; it goes to another one if there is any.
        """
        working = set(self.wanted) if self.hungry else self._first
        return node in others(working, set(working) - self.staffed, self.avoided, set(tried))

    def place(self, there: Counter[str]) -> str:
        """The node of the next chain worker; empty: anywhere.

        Args:
            there: chain workers by node, those that are starting included.
        """
        wanted = self.wanted
        free = {node: there[node] / slots for node, slots in wanted.items() if there[node] < slots}
        first = {node: load for node, load in free.items() if node in self._first} or free
        return min(first, key=lambda node: (first[node], node)) if first else ""

    def name(self, node: str) -> str:
        """What people call a host."""
        host = self.hosts.get(node)
        return host.name if host and host.name else node[:8]


def chain_hosts(
    nodes: Iterable[dict[str, Any]],
    *,
    groups: Iterable[str],
    group_label: str,
    own_group: str | None,
    training: Counter[str],
) -> list[ChainHost]:
    """Head: which hosts preprocess, and with how many slots.

    A host of a cluster that Stoker formed declares the cores that are left beside its train workers'
    (one per GPU). On any other cluster they are taken off here.

    Args:
        nodes: as `ray.nodes()` gives them.
        groups: labels of the groups that may preprocess; none: all.
        group_label: the Ray label that names a host's group.
        own_group: the group of this host, which trains.
        training: train workers by node, as far as they have started.
    """
    alive = [n for n in nodes if n["Alive"]]
    wanted = set(groups)
    several = len({n.get("Labels", {}).get(group_label) for n in alive}) > 1
    found = []
    for node in alive:
        labels, resources = node.get("Labels", {}), node["Resources"]
        group = labels.get(group_label)
        if wanted and group not in wanted:
            continue
        gpus = resources.get("GPU", 0)
        trains = bool(gpus or training[node["NodeID"]] or (several and group == own_group))
        reserve = 0 if group is not None else min(int(gpus), training[node["NodeID"]] or int(gpus))
        slots = max(int(resources.get("CPU", 0)) - reserve, min(1, int(resources.get("CPU", 0))))
        name = labels.get("stoker.host") or node.get("NodeManagerHostname", "")
        found.append(ChainHost(node["NodeID"], slots, trains, name))
    return found
