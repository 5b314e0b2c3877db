"""Head: Ray Data's statistics of an execution that lasts as long as the run."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, TypedDict

RECENT_BLOCKS = 2_000
"""Blocks of each operator of which Ray Data's own statistics remain, at least."""
FAR = 10_000
"""How many later tasks may have blocks before one without any counts as having made none."""
CHANGING = threading.Lock()
"""Held while blocks are added up, and while Ray Data reads them."""


class Operator(TypedDict):
    """Head: Ray Data's statistics of one operator; times are summed over its tasks."""

    name: str
    tasks: int
    rows: int
    bytes: int
    cpu_s: float
    wall_s: float


class RecentBlocks(list[Any]):
    """Head: statistics of an operator's recent blocks; those of earlier blocks are only added up.

    Ray Data keeps 1.3 kB about every block until its execution ends. In a run of a week that is gigabytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.tasks = self.rows = self.bytes = 0
        self.cpu_s = self.wall_s = 0.0
        self._below, self._beyond = 0, set[int]()
        """Tasks that are counted: all below a number, and these."""

    def extend(self, blocks: Iterable[Any]) -> None:
        """Executor's thread: take the statistics of new blocks."""
        with CHANGING:
            for block in blocks:
                self.append(block)
                if block.exec_stats:
                    self._count(block.exec_stats.task_idx)
            if len(self) >= 2 * RECENT_BLOCKS:
                self._add_up(self[:-RECENT_BLOCKS])
                del self[:-RECENT_BLOCKS]

    def _add_up(self, earlier: list[Any]) -> None:
        made = [block.exec_stats for block in earlier if block.exec_stats]
        self.blocks += len(earlier)
        self.rows += sum(block.num_rows or 0 for block in earlier)
        self.bytes += sum(block.size_bytes or 0 for block in earlier)
        self.cpu_s += sum(one.cpu_time_s or 0 for one in made)
        self.wall_s += sum(one.wall_time_s or 0 for one in made)

    def _count(self, task: int) -> None:
        """Count a task once, however late its other blocks come."""
        if task < self._below or task in self._beyond:
            return
        self.tasks += 1
        self._beyond.add(task)
        if len(self._beyond) > FAR:
            self._below = min(self._beyond)
        while self._below in self._beyond:
            self._beyond.remove(self._below)
            self._below += 1


def operators(summary: Any, earlier: dict[str, dict[str, Any]]) -> tuple[str, list[Operator]]:
    """Head: Ray Data's summary as its own text and by operator.

    Args:
        summary: what Ray Data says about the recent blocks.
        earlier: by operator, the attributes of its `RecentBlocks`.
    """
    text, found = str(summary.to_string()), []
    for stats in (stats for stage in [*summary.parents, summary] for stats in stage.operators_stats):
        name = str(stats.operator_name)
        before = earlier.get(name) or vars(RecentBlocks())
        found.append(
            Operator(
                name=name,
                tasks=before["tasks"] or int(getattr(stats.task_rows, "count", 0) or 0),
                rows=before["rows"] + int(getattr(stats.output_num_rows, "sum", 0) or 0),
                bytes=before["bytes"] + int(getattr(stats.output_size_bytes, "sum", 0) or 0),
                cpu_s=round(before["cpu_s"] + float(getattr(stats.cpu_time, "sum", 0) or 0), 3),
                wall_s=round(before["wall_s"] + float(getattr(stats.wall_time, "sum", 0) or 0), 3),
            )
        )
        if before["blocks"]:
            text += f"\n{name}: all figures above leave out its first {before['blocks']:,} blocks\n"
    return text, found
