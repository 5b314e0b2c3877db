"""Head: lists the shards of upcoming passes in a thread, because there may be many or listing is slow."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from stoker.errors import explain
from stoker.serve.items import Line
from stoker.serve.pool import Pool

if TYPE_CHECKING:
    from stoker.serve.attempt import Attempt

BLOCKS_AHEAD_PER_SLOT = 2
"""Blocks of a recipe's dataset that may wait for preprocessing, per slot."""


class Lister:
    """Head: part of the planner.

    Args:
        attempt: whose passes are listed.
        pool: the hosts.
    """

    def __init__(self, attempt: Attempt, pool: Pool) -> None:
        self.attempt, self.pool, self.passes = attempt, pool, attempt.passes
        self._begun: set[tuple[str, int]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shards")

    def close(self) -> None:
        """Stop: the attempt is over."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def open(self, lines: list[Line]) -> None:
        """Add a line for each producible pass that has none."""
        for stream in self.attempt.open_streams():
            key = (stream.account.split, stream.account.epoch)
            if key in self._begun:
                continue
            self._begun.add(key)
            start = stream.trail.start if stream.trail else None
            plan = self.passes.plan(*key, start)
            known = self.passes.has_shards(plan.split)
            coming = self._thread.submit(self.passes.shards, plan, start) if known else None
            if coming is not None:
                coming.add_done_callback(lambda _: self._tell())
            line = Line(stream, plan, coming, self.passes.config.data.order == "exact")
            lines.append(line)
            if not known:
                self._thread.submit(self._execute, line)

    def _tell(self) -> None:
        with self.attempt.changed:
            self.attempt.has_work.notify_all()

    def _execute(self, line: Line) -> None:
        """Thread: turn the blocks of a recipe's dataset into shards, a few ahead of the chain."""
        changed = self.attempt.changed
        try:
            for shard in self.passes.blocks(line.plan):
                with changed:
                    line.add(shard)
                    self.attempt.has_work.notify()
                    while len(line.work) > BLOCKS_AHEAD_PER_SLOT * max(self.pool.slots, 1):
                        if self.attempt.over:
                            break
                        changed.wait(1.0)
                    if self.attempt.over:
                        return
        except Exception as error:
            self.attempt.fail(explain(error))
        with changed:
            line.listing = False
            self.attempt.has_work.notify_all()
