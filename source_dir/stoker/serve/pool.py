"""Head: which hosts preprocess, with how many chain workers each; pure.

Hosts that only preprocess come first. While too little data is ready, training hosts help with the CPUs that
their train workers leave free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stoker.serve.deadlines import others

if TYPE_CHECKING:
    from stoker.serve.passes import Pass

GROW_AFTER_S, SHRINK_AFTER_S = 2.0, 20.0
"""How long too little, or enough, must be ready before chain workers start, or end, on training hosts:
starting a process takes seconds."""
HUNGRY_STEPS, STARVED_STEPS = 8, 2
"""With fewer ready steps than this, training hosts help to preprocess: the first if there is room for more
blocks, the second in any case."""
MOVE_EVERY_S = 60.0
"""Minimum interval between moves: a worker without room where it belongs starts elsewhere again."""


@dataclass(frozen=True)
class ChainHost:
    """Head: a host that may preprocess."""

    node: str
    slots: int
    """Chain workers that run on it concurrently."""
    trains: bool = False
    name: str = ""
    """Name for messages."""
    scaled: bool = False
    """Whether the cluster's autoscaler adds and removes such hosts."""


@dataclass
class Pool:
    """Head: one per run. The planner reads it; Ray Data's thread calls `place`."""

    hosts: dict[str, ChainHost] = field(default_factory=dict)
    avoided: set[str] = field(default_factory=set)
    """Nodes that missed a deadline; they get work only if there is no other."""
    groups: tuple[str, ...] = ()
    """Groups that may preprocess; empty: all."""
    helping: bool = False
    """Whether training hosts run chain workers in addition to preprocessing-only hosts."""
    hungry: bool = False
    """Whether chain workers on training hosts get work now."""
    wanted: dict[str, int] = field(default_factory=dict)
    """Wanted chain workers by node."""
    slots: int = 0
    """Chain workers that run concurrently on all hosts."""
    leaving: list[str] = field(default_factory=list)
    """Surplus chain workers of their hosts; they get no more work."""
    staffed: set[str] = field(default_factory=set)
    """Nodes with running chain workers."""
    closing: frozenset[str] = frozenset()
    """Nodes of hosts that are about to leave."""
    bound: set[str] = field(default_factory=set)
    """Chain workers with a state that no other has; they stay while their host does."""
    there: dict[str, str] = field(default_factory=dict)
    """Running chain workers: id → node."""
    gone: set[str] = field(default_factory=set)
    """Chain workers that have ended."""
    _first: set[str] = field(default_factory=set)
    """Hosts that always preprocess: the preprocessing-only hosts, or all if there are none."""
    _since: float | None = None
    """When `hungry` last changed."""
    _moved: float = -MOVE_EVERY_S
    """When chain workers were last found in the wrong place."""

    def update(
        self,
        hosts: Iterable[ChainHost],
        hungry: bool,
        now: float,
        closing: Collection[str] = (),
        idle: bool = False,
    ) -> None:
        """Update the live hosts: some join late, some are lost.

        Args:
            hosts: of the cluster, without those that are closing.
            hungry: whether too little data is ready.
            now: `time.monotonic()`.
            closing: nodes of hosts that are about to leave; their chain workers end at once.
            idle: whether no chain worker is wanted.
        """
        self.closing = frozenset(closing)
        self.hosts = {host.node: host for host in hosts if host.slots > 0}
        if hungry != self.hungry or self._since is None:
            self.hungry, self._since = hungry, now
        if now - self._since >= (GROW_AFTER_S if hungry else SHRINK_AFTER_S):
            self.helping = hungry
        self._first = {n for n, host in self.hosts.items() if not host.trains} or set(self.hosts)
        known = self.hosts.items()
        wanted = {} if idle else {n: s.slots for n, s in known if self.helping or n in self._first}
        self.wanted = wanted
        self.slots = sum(self.wanted.values())

    def workers_are(self, there: Mapping[str, str], now: float) -> None:
        """Update the running chain workers: Ray restarts those of a lost host wherever there is room.

        Args:
            there: id → node.
            now: `time.monotonic()`.
        """
        self.gone = (self.gone | self.there.keys()) - there.keys()
        self.there, self.staffed = dict(there), set(there.values())
        left = Counter(self.wanted)
        beyond = []
        for process, node in there.items():
            left[node] -= 1
            if left[node] < 0 and (process not in self.bound or node in self.closing):
                beyond.append(process)
        self.leaving = [p for p in beyond if p in self.leaving or self.leaves_at_once(there[p])]
        if beyond and not self.leaving and now - self._moved >= MOVE_EVERY_S:
            self.leaving, self._moved = beyond, now

    def may_work(self, node: str, tried: Iterable[str] = ()) -> bool:
        """Whether a host gets work.

        Args:
            node: the host.
            tried: nodes where the work failed; it goes to another one if there is any.
        """
        working = set(self.wanted) if self.hungry else self._first
        return node in others(working, set(working) - self.staffed, self.avoided, set(tried))

    def leaves_at_once(self, node: str) -> bool:
        """Whether all chain workers of a host end now."""
        return node in self.closing or not self.wanted or (not self.helping and node not in self._first)

    def missing(self, starting: Mapping[str, int]) -> list[str]:
        """The node of each chain worker that is wanted and neither runs nor starts.

        Args:
            starting: number of those that start, by node.
        """
        there = Counter(starting)
        there.update(node for worker, node in self.there.items() if worker not in self.leaving)
        return [node for node, slots in self.wanted.items() for _ in range(slots - there[node])]

    def is_gone(self, node: str) -> bool:
        """Whether a host was lost, or may not preprocess any more."""
        return node not in self.hosts and node not in self.closing

    def is_lost(self, process: str) -> bool:
        """Whether a chain worker has ended, or its host is lost or about to leave."""
        return process in self.gone or self.there.get(process, process) not in {process, *self.hosts}

    def name(self, node: str) -> str:
        """Name of a host for messages."""
        host = self.hosts.get(node)
        return host.name if host and host.name else node[:8]


def is_hungry(passes: Iterable[Pass], room: bool) -> bool:
    """Head: whether so little is ready that training hosts must help.

    Args:
        passes: not yet consumed, in order.
        room: whether more blocks fit.
    """
    ready = 0.0
    for each in passes:
        ready += each.rows_ahead / each.step_rows
        if not each.ended:
            break  # ready data of later passes does not help while this one is short
    return ready < STARVED_STEPS or (ready < HUNGRY_STEPS and room)


def chain_hosts(
    nodes: Iterable[dict[str, Any]],
    *,
    groups: Iterable[str],
    group_label: str,
    own_group: str | None,
    training: Counter[str],
    resource: str = "",
) -> list[ChainHost]:
    """Head: which hosts preprocess, and with how many slots.

    Hosts of a cluster that Stoker formed already declare only the cores left after those of train workers
    (one per GPU). On any other cluster, those cores are subtracted here.

    Args:
        nodes: from `ray.nodes()`.
        groups: labels of the groups that may preprocess; empty: all.
        group_label: the Ray label that names a host's group.
        own_group: the group of this host, which trains.
        training: train workers by node, as far as they have started.
        resource: custom resource of the hosts that the cluster's autoscaler adds and removes.
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
        found.append(ChainHost(node["NodeID"], slots, trains, name, bool(resources.get(resource, 0))))
    return found
