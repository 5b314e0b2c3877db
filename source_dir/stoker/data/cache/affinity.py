"""Head: which host keeps which part of the data across epochs, and what that saves; pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from itertools import islice
from typing import Any

from stoker.data.messages import BlockReport, Piece

LOOK_AHEAD = 256
"""Shards from which a host is given one of its own."""
ALL_FIT = 0.999

Numbered = tuple[int, Piece, int]
"""As `Passes.pieces` gives them."""


class CacheAffinity:
    """Head: one per run; the dispatcher asks it, the coordinator tells it, and holds its lock for that.

    Args:
        kind: `data.cache`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.holders: dict[tuple[str, str], str] = {}
        """Node that keeps the records of (split, home)."""
        self.usage: dict[str, tuple[int, int]] = {}
        """Bytes kept and allowed, by node."""
        self.books: dict[tuple[str, int], dict[str, Counter[str]]] = {}
        """Records, found, kept and kept_bytes of (split, epoch), by node."""
        self.told = False

    def holder(self, split: str, piece: Piece) -> str:
        """The node that keeps the records of a piece; empty: none, or any."""
        return self.holders.get((split, piece.home), "") if piece.home else ""

    def take_work(
        self, split: str, work: deque[Numbered], node: str, most: int, look: int = LOOK_AHEAD
    ) -> tuple[list[Numbered], list[bool]]:
        """Take pieces for a task: those that its host keeps, else what nobody does, else one of another's.

        Args:
            split: train or val.
            work: what is left of the pass; at least one piece.
            node: the host.
            most: pieces of the task.
            look: choose among so many of the next ones.

        Returns:
            The pieces, and for each whether the host shall keep it: not what another one keeps.
        """
        taken: list[Numbered] = []
        store: list[bool] = []
        while work and len(taken) < most:
            at, foreign = self._best(split, work, node, look)
            if foreign and taken:
                break
            piece = work[at]
            del work[at]
            home = piece[1].home
            taken.append(piece)
            store.append(not home or self.holders.setdefault((split, home), node) == node)
        return taken, store

    def _best(self, split: str, work: deque[Numbered], node: str, look: int) -> tuple[int, bool]:
        """Which piece a host is given next, and whether another host keeps it."""
        unheld = -1
        for position, (_, piece, _) in enumerate(islice(work, look)):
            holder = self.holder(split, piece)
            if holder == node:
                return position, False
            if not holder and unheld < 0:
                unheld = position
        return max(unheld, 0), unheld < 0

    def hosts_are(self, nodes: Collection[str]) -> None:
        """The hosts there are now: what a lost one kept, others shall keep."""
        self.holders = {home: node for home, node in self.holders.items() if node in nodes}
        self.usage = {node: usage for node, usage in self.usage.items() if node in nodes}

    def take(self, split: str, epoch: int, report: BlockReport, node: str) -> None:
        """Take in the report of a block."""
        books = self.books.setdefault((split, epoch), {}).setdefault(node, Counter())
        books["records"] += report.records - len(report.bad)
        books["found"] += report.found
        books["kept"] += report.kept
        books["kept_bytes"] += report.kept_bytes

    def used(self, node: str, usage: tuple[int, int] | None) -> None:
        """What a host's cache holds now."""
        if usage is not None:
            self.usage[node] = usage

    def settle(self, split: str, epoch: int) -> dict[str, Any]:
        """The figures of a pass that is over, as an event holds them."""
        by_node = self.books.pop((split, epoch), {})
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
        """One line, once, where the training records did not all fit.

        Args:
            figures: of the first training pass, as `settle` gives them.
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
        each = gigabytes(limits[0]) if limits else "0 GB"
        if len(limits) > 1:
            each = f"{each} to {gigabytes(limits[-1])}"
        need = ""
        if figures["kept"]:
            whole = figures["kept_bytes"] / figures["kept"] * figures["records"]
            need = f", all would take about {gigabytes(whole)}"
        return (
            f"data.cache: {100 * share:.0f} % of the training records fit, {gigabytes(held)} on"
            f" {len(self.usage)} host(s) of at most {each} each{need}; the others are preprocessed in every"
            " epoch (data.cache_gb, more hosts, data.cache: disk, or a smaller image before the first random"
            " transform)"
        )


def gigabytes(size: float) -> str:
    """Head: bytes for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
