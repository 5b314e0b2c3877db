"""Head: which host caches which part of the data across epochs, and what that saves; pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

from stoker.figures import count_of, size
from stoker.protocol import Shard
from stoker.serve.items import Numbered

LOOK_AHEAD = 256
"""Number of shards to search for one that the host caches."""
ALL_FIT = 0.999


class CacheAffinity:
    """One per run; the planner queries it, the service updates it with its lock held.

    Args:
        kind: `data.cache`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.holders: dict[tuple[str, str], str] = {}
        """Node that caches the records of (split, home)."""
        self.usage: dict[str, tuple[int, int]] = {}
        """Bytes used and allowed, by node."""
        self.told = False

    def holder(self, split: str, shard: Shard) -> str:
        """The node that caches the records of a shard; empty: none, or any."""
        return self.holders.get((split, shard.home), "") if shard.home else ""

    def take_work(
        self, split: str, work: deque[Numbered], node: str, most: int, look: int = LOOK_AHEAD
    ) -> tuple[list[Numbered], list[bool]]:
        """Take shards for a task: first those its host caches, then unassigned ones, then another host's.

        Args:
            split: train or val.
            work: rest of the pass; at least one shard.
            node: the host.
            most: maximum number of shards in the task.
            look: number of upcoming shards to choose from.

        Returns:
            The shards and, for each, whether the host stores it in its cache (not if another host does).
        """
        taken: list[Numbered] = []
        store: list[bool] = []
        while work and len(taken) < most:
            at, foreign = self._best(split, work, node, look)
            if foreign and taken:
                break
            shard = work[at]
            del work[at]
            home = shard[1].home
            taken.append(shard)
            store.append(not home or self.holders.setdefault((split, home), node) == node)
        return taken, store

    def _best(self, split: str, work: deque[Numbered], node: str, look: int) -> tuple[int, bool]:
        """Index of the next shard for a host, and whether another host caches it."""
        unheld = -1
        for position, (_, shard, _) in enumerate(islice(work, look)):
            holder = self.holder(split, shard)
            if holder == node:
                return position, False
            if not holder and unheld < 0:
                unheld = position
        return max(unheld, 0), unheld < 0

    def hosts_are(self, nodes: Collection[str]) -> None:
        """Update the live hosts; shards of lost hosts become unassigned."""
        self.holders = {home: node for home, node in self.holders.items() if node in nodes}
        self.usage = {node: usage for node, usage in self.usage.items() if node in nodes}

    def used(self, node: str, usage: tuple[int, int] | None) -> None:
        """Update the size and limit of a host's cache."""
        if usage is not None:
            self.usage[node] = usage

    def figures(self, split: str, epoch: int, by_node: Mapping[str, Counter[str]]) -> dict[str, Any]:
        """The figures of a finished pass, for an event."""
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

    def lacking(self, figures: dict[str, Any]) -> str:
        """One line, emitted once, if the training records did not all fit.

        Args:
            figures: of the first training pass, from `figures`.
        """
        there = figures["found"] + figures["kept"]
        if figures["split"] != "train" or self.told or not figures["records"]:
            return ""
        self.told = True
        share = there / figures["records"]
        if share >= ALL_FIT:
            return ""
        held = sum(used for used, _ in self.usage.values())
        limits = sorted({allowed for _, allowed in self.usage.values()})
        each = size(limits[0]) if limits else "0 GB"
        if len(limits) > 1:
            each = f"{each} to {size(limits[-1])}"
        need = ""
        if figures["kept"]:
            whole = figures["kept_bytes"] / figures["kept"] * figures["records"]
            need = f", all would take about {size(whole)}"
        return (
            f"data.cache: {100 * share:.0f} % of the training records fit, {size(held)} on"
            f" {count_of(len(self.usage), 'host')} of at most {each} each{need}; the others are preprocessed"
            " in every epoch. To fit more: raise data.cache_gb, add hosts, use data.cache: disk or shrink"
            " images before the first random transform"
        )
