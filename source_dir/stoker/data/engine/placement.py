"""Head: on which host the next chain task runs; pure.

Hosts that only preprocess come first. Hosts that train help out with the CPUs that their train workers
leave free, while the others are full and too little data is ready.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from stoker.data.engine.deadlines import others

QUEUED_SHARE = 0.25
"""Tasks sent to a host beyond its slots, as a share of these: the next one is there when one ends."""


@dataclass(frozen=True)
class ChainHost:
    """Head: a host as chain tasks see it."""

    node: str
    slots: int
    """Chain tasks that run on it at once."""
    trains: bool = False
    name: str = ""
    """What people call it."""

    @property
    def room(self) -> int:
        """Tasks that it is sent at most, running and queued."""
        return self.slots + max(1, round(QUEUED_SHARE * self.slots))


@dataclass
class Placement:
    """Head: hosts and the tasks that were sent to them."""

    hosts: dict[str, ChainHost] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    """Tasks that have not ended, by node."""
    avoided: set[str] = field(default_factory=set)
    """Nodes that did not answer in time; they get tasks only where there is no other."""

    def update(self, hosts: Iterable[ChainHost]) -> None:
        """The hosts there are now: some came late, some were lost."""
        self.hosts = {host.node: host for host in hosts if host.slots > 0}

    @property
    def slots(self) -> int:
        """Chain tasks that run at once on all hosts."""
        return sum(host.slots for host in self.hosts.values())

    def has_room(self, node: str) -> bool:
        """Whether a host can be sent a task."""
        host = self.hosts.get(node)
        return host is not None and self.sent[node] < host.room

    def choose(self, hungry: bool, prefer: str = "", tried: Collection[str] = ()) -> str:
        """Where the next task goes; empty while there is no room for it.

        Args:
            hungry: so little data is ready that the hosts that train shall help.
            prefer: a host that has something of the task's already; it is taken while it has room, unless
                it trains and enough is ready.
            tried: nodes where the task went wrong; it goes to another one if there is any.
        """
        allowed = others(self.hosts, self.avoided, tried)
        helpers = any(not host.trains for host in self.hosts.values())
        fits = prefer in allowed and self.has_room(prefer)
        if fits and (hungry or not (self.hosts[prefer].trains and helpers)):
            return prefer
        open_to = [host for node, host in self.hosts.items() if node in allowed]
        first = [h for h in open_to if not (h.trains and helpers)]
        spare = [h for h in open_to if h.trains and helpers] if hungry else []
        for hosts in (first, spare):
            idle = [h for h in hosts if self.sent[h.node] < h.slots]
            if idle:
                return min(idle, key=self._load).node
        waiting = [h for h in first + spare if self.sent[h.node] < h.room]
        return min(waiting, key=self._load).node if waiting else ""

    def _load(self, host: ChainHost) -> tuple[float, str]:
        return self.sent[host.node] / host.slots, host.node

    def name(self, node: str) -> str:
        """What people call a host."""
        host = self.hosts.get(node)
        return host.name if host and host.name else node[:8]

    def send(self, node: str) -> None:
        """A task was sent."""
        self.sent[node] += 1

    def end(self, node: str) -> None:
        """A task that was sent there has ended, wherever it ran in the end."""
        self.sent[node] -= 1


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
