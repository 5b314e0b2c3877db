"""Head: lists the shards of upcoming passes in a thread, because there may be many or listing is slow."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from stoker.errors import explain
from stoker.messages import DataCursor
from stoker.serve.passes import Pass, Passes
from stoker.serve.pool import Pool

if TYPE_CHECKING:
    from stoker.serve.attempt import Attempt

BLOCKS_AHEAD_PER_SLOT = 2
"""Blocks of a recipe's dataset that may wait for preprocessing, per slot."""


class Lister:
    """Part of the planner.

    Args:
        attempt: whose passes are listed.
        passes: what they read.
        start: where training starts.
        pool: the hosts.
    """

    def __init__(self, attempt: Attempt, passes: Passes, start: DataCursor, pool: Pool) -> None:
        self.attempt, self.passes, self.start, self.pool = attempt, passes, start, pool
        self._begun: set[tuple[str, int]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shards")

    def end(self) -> None:
        """The attempt is over."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def begin(self, passes: Iterable[Pass]) -> list[Pass]:
        """Begin to list those that have not begun; returns them."""
        new = [each for each in passes if each.key not in self._begun]
        for pass_ in new:
            self._begun.add(pass_.key)
            if not pass_.has_shards:
                self._thread.submit(self._execute, pass_)
                continue
            start = self.start if pass_.key == ("train", self.start.epoch) else None
            pass_.coming = self._thread.submit(self.passes.shards, pass_.plan, start)
            pass_.coming.add_done_callback(lambda _: self._tell())
        return new

    def _tell(self) -> None:
        with self.attempt.changed:
            self.attempt.has_work.notify_all()

    def _execute(self, pass_: Pass) -> None:
        """Thread: turn the blocks of a recipe's dataset into shards, a few ahead of the chain."""
        changed = self.attempt.changed
        try:
            for shard in self.passes.blocks(pass_.plan):
                with changed:
                    pass_.add(shard)
                    self.attempt.has_work.notify()
                    while len(pass_.work) > BLOCKS_AHEAD_PER_SLOT * max(self.pool.slots, 1):
                        if self.attempt.over:
                            break
                        changed.wait(1.0)
                    if self.attempt.over:
                        return
        except Exception as error:
            self.attempt.fail(explain(error))
        with changed:
            pass_.listing = False
            self.attempt.has_work.notify_all()
