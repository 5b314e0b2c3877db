"""Which hosts preprocess, with how many chain workers each, and what each caches.

Hosts that only preprocess come first. While too little data is ready, training hosts help with the CPUs that
their train workers leave free.

An autoscaler removes a host only when nothing runs on it and nothing is stored there. So a host that is no
longer needed gets no work, its chain workers end, its blocks are used up, and then its agent ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from stoker.config.schema import Config
from stoker.figures import count_of, size
from stoker.hosts.topology import GROUP_LABEL, host_name, label
from stoker.protocol import Shard, Work

GROW_AFTER_S, SHRINK_AFTER_S = 2.0, 20.0
"""How long too little, or enough, must be ready before chain workers start, or end, on training hosts:
starting a process takes seconds."""
MOVE_EVERY_S = 60.0
"""Minimum interval between moves: a worker without room where it belongs starts elsewhere again."""


@dataclass(frozen=True)
class ChainHost:
    node: str
    slots: int
    trains: bool = False
    name: str = ""
    scaled: bool = False
    """Whether the cluster's autoscaler adds and removes such hosts."""


@dataclass
class Pool:
    """One per run. The service updates it; the planner reads it."""

    hosts: dict[str, ChainHost] = field(default_factory=dict)
    avoided: set[str] = field(default_factory=set)
    """Nodes that missed a deadline; they get work only if there is no other."""
    helping: bool = False
    """Whether training hosts run chain workers in addition to preprocessing-only hosts."""
    hungry: bool = False
    """Whether chain workers on training hosts get work now."""
    wanted: dict[str, int] = field(default_factory=dict)
    slots: int = 0
    leaving: list[str] = field(default_factory=list)
    """Surplus chain workers of their hosts; they get no more work."""
    staffed: set[str] = field(default_factory=set)
    closing: frozenset[str] = frozenset()
    bound: set[str] = field(default_factory=set)
    """Chain workers with a state that no other has; they stay while their host does."""
    there: dict[str, str] = field(default_factory=dict)
    """Running chain workers: id → node."""
    gone: set[str] = field(default_factory=set)
    _first: set[str] = field(default_factory=set)
    """Hosts that always preprocess: the preprocessing-only hosts, or all if there are none."""
    _since: float | None = None
    _moved: float = -MOVE_EVERY_S

    def update(
        self,
        hosts: Iterable[ChainHost],
        hungry: bool,
        now: float,
        closing: Collection[str] = (),
        idle: bool = False,
    ) -> None:
        """Update the live hosts; chain workers of those that are closing end at once, and all if `idle`."""
        self.closing = frozenset(closing)
        self.hosts = {host.node: host for host in hosts if host.slots > 0}
        if hungry != self.hungry or self._since is None:
            self.hungry, self._since = hungry, now
        if now - self._since >= (GROW_AFTER_S if hungry else SHRINK_AFTER_S):
            self.helping = hungry
        self._first = {n for n, host in self.hosts.items() if not host.trains} or set(self.hosts)
        working = [host for n, host in self.hosts.items() if self.helping or n in self._first]
        self.wanted = {} if idle else {host.node: host.slots for host in working}
        self.slots = sum(self.wanted.values())

    def workers_are(self, there: Mapping[str, str], now: float) -> None:
        """Update the running chain workers: Ray restarts those of a lost host wherever there is room."""
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
        """Whether a host gets work; one where it was tried, only if there is no other."""
        working = set(self.wanted) if self.hungry else self._first
        return node in others(working, set(working) - self.staffed, self.avoided, set(tried))

    def leaves_at_once(self, node: str) -> bool:
        no_help = not self.helping and node not in self._first
        return node in self.closing or not self.wanted or no_help

    def missing(self, starting: Mapping[str, int]) -> list[str]:
        """The node of each chain worker that is wanted and neither runs nor starts."""
        there = Counter(starting)
        there.update(node for worker, node in self.there.items() if worker not in self.leaving)
        return [node for node, slots in self.wanted.items() for _ in range(slots - there[node])]

    def is_gone(self, node: str) -> bool:
        return node not in self.hosts and node not in self.closing

    def is_lost(self, process: str) -> bool:
        """Whether a chain worker has ended, or its host is lost or about to leave."""
        node = self.there.get(process)
        return process in self.gone or (node is not None and node not in self.hosts)

    def name(self, node: str) -> str:
        host = self.hosts.get(node)
        return host.name if host and host.name else node[:8]


def others(nodes: Collection[str], *not_these: Collection[str]) -> set[str]:
    """The hosts not in any of the given sets, or all hosts if none is left."""
    left = set(nodes)
    for some in not_these:
        left = left - set(some) or left
    return left


def chain_hosts(
    config: Config, own_node: str, nodes: list[dict[str, Any]], training: Counter[str]
) -> list[ChainHost]:
    """Which of Ray's nodes preprocess, with how many slots; `training`: train workers by node.

    Hosts of a cluster that Stoker formed already declare only the cores left after those of train workers
    (one per GPU). On any other cluster, those cores are subtracted here.
    """
    alive = [n for n in nodes if n["Alive"]]
    scaling = config.cluster.cpu_hosts
    groups = [label(group) for group in config.data.preprocess_on]
    own_group = next((n["Labels"].get(GROUP_LABEL) for n in nodes if n["NodeID"] == own_node), None)
    several = len({n.get("Labels", {}).get(GROUP_LABEL) for n in alive}) > 1
    found = []
    for node in alive:
        labels, resources = node.get("Labels", {}), node["Resources"]
        group = labels.get(GROUP_LABEL)
        if groups and group not in groups:
            continue
        gpus = resources.get("GPU", 0)
        trains = bool(gpus or training[node["NodeID"]] or (several and group == own_group))
        reserve = 0 if group is not None else min(int(gpus), training[node["NodeID"]] or int(gpus))
        slots = max(int(resources.get("CPU", 0)) - reserve, min(1, int(resources.get("CPU", 0))))
        scaled = bool(scaling.max and resources.get(scaling.resource))
        found.append(ChainHost(node["NodeID"], slots, trains, host_name(node), scaled))
    return found


LOOK_AHEAD = 256
"""Number of shards to search for one that the host caches."""
ALL_FIT = 0.999


class CacheAffinity:
    """One per run; the planner queries it, the service updates it with its lock held."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.holders: dict[tuple[str, str], str] = {}
        """Node that caches the records of (split, home)."""
        self.usage: dict[str, tuple[int, int]] = {}
        """Bytes used and allowed, by node."""
        self.told = False

    def holder(self, split: str, shard: Shard) -> str:
        return self.holders.get((split, shard.home), "") if shard.home else ""

    def take_work(
        self, split: str, work: deque[Work], node: str, most: int, look: int = LOOK_AHEAD
    ) -> list[Work]:
        """Take up to `most` shards: first those its host caches, then unassigned ones, then another host's.

        Each tells whether the host stores it in its cache (not if another host does).
        """
        taken: list[Work] = []
        while work and len(taken) < most:
            at, foreign = self._best(split, work, node, look)
            if foreign and taken:
                break
            home = work[at].shard.home
            store = not home or self.holders.setdefault((split, home), node) == node
            taken.append(work[at]._replace(store=store))
            del work[at]
        return taken

    def _best(self, split: str, work: deque[Work], node: str, look: int) -> tuple[int, bool]:
        """Index of the next shard for a host, and whether another host caches it."""
        unheld = -1
        for position, each in enumerate(islice(work, look)):
            holder = self.holder(split, each.shard)
            if holder == node:
                return position, False
            if not holder and unheld < 0:
                unheld = position
        return max(unheld, 0), unheld < 0

    def hosts_are(self, nodes: Collection[str]) -> None:
        self.holders = {home: node for home, node in self.holders.items() if node in nodes}
        self.usage = {node: usage for node, usage in self.usage.items() if node in nodes}

    def used(self, node: str, usage: tuple[int, int] | None) -> None:
        if usage is not None:
            self.usage[node] = usage

    def figures(
        self, split: str, epoch: int, by_node: Mapping[str, Counter[str]]
    ) -> dict[str, Any]:
        whole = sum(by_node.values(), Counter[str]())
        hosts = {
            node: {
                "records": by_node.get(node, Counter())["records"],
                "found": by_node.get(node, Counter())["found"],
                "bytes": used,
                "limit_bytes": allowed,
            }
            for node, (used, allowed) in self.usage.items()
        }
        figures = {name: whole[name] for name in ("records", "found", "kept", "kept_bytes")}
        return {"kind": self.kind, "split": split, "epoch": epoch, **figures, "hosts": hosts}

    def lacking(self, figures: dict[str, Any], chosen: float) -> str:
        """One line, emitted once, if the records of the first training pass did not all fit."""
        there = figures["found"] + figures["kept"]
        if figures["split"] != "train" or self.told or not figures["records"]:
            return ""
        self.told = True
        share = there / figures["records"]
        if share >= ALL_FIT:
            return ""
        held, need = sum(used for used, _ in self.usage.values()), ""
        if figures["kept"]:
            whole = figures["kept_bytes"] / figures["kept"] * figures["records"]
            need = f", all would take about {size(whole)}"
        others = "are preprocessed in every epoch as without a cache"
        if chosen >= 1:
            others = (
                "take longer than without a cache, for how many fit was not known at the start; set"
                f" data.cache_share to {max(share, 0.01):.2f} in the next run"
            )
        return (
            f"data.cache: {100 * share:.0f} % of the training records fit, {size(held)} on"
            f" {count_of(len(self.usage), 'host')}{need}; the others {others}. To fit more: raise data.cache_gb,"
            " add hosts, use data.cache: disk or shrink images before the first random transform"
        )
