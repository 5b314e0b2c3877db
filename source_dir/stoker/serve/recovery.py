"""Head: handles work that fails or misses its deadline."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stoker.errors import STATED, DataError, root_cause, where_raised
from stoker.messages import BlockReport, Failure
from stoker.read.sources import reread_wait_s
from stoker.serve.deadlines import Patience, others
from stoker.serve.items import Item, Numbered
from stoker.serve.pool import Pool

if TYPE_CHECKING:
    from stoker.serve.attempt import Attempt


def failure_of(error: BaseException) -> Failure:
    """Chain worker: convert an error into a Failure for the head."""
    cause = root_cause(error)
    if isinstance(cause, STATED):
        return Failure(str(cause).splitlines()[0])
    may_pass = isinstance(cause, OSError)
    tries = next(n for n in range(100) if reread_wait_s(cause, n) is None) if may_pass else 0
    return Failure(where_raised(cause), may_pass, tries)


class Recovery:
    """Head: part of the planner. It decides; the planner reassigns the work.

    Args:
        attempt: whose work this is.
        pool: the hosts.
    """

    def __init__(self, attempt: Attempt, pool: Pool) -> None:
        self.attempt, self.pool = attempt, pool
        self.stall_s = attempt.stall_s
        self.patience = Patience(self.stall_s)

    def what(self, split: str, shards: list[Numbered]) -> str:
        """Name of an item's shards for messages."""
        if not shards:
            return split
        names = []
        for number, shard, _ in (shards[0], shards[-1]):
            name = shard.called
            names.append(name or f"number {number}")
        return f"{split} shard {names[0]}" if len(shards) == 1 else f"{split} shards {names[0]} … {names[1]}"

    def failed(self, item: Item, failure: Failure) -> float:
        """A chain worker has failed: how long to wait before a retry.

        Raises:
            DataError: it has failed for good.
        """
        item.failures += 1
        what = self.what(item.pass_.plan.split, item.shards)
        hosts = {*item.tried, item.node}
        return self._retry(what, item.node, hosts, item.failures, failure, self._elsewhere(item))

    def took(self, split: str, node: str, report: BlockReport) -> None:
        """Learn how long a block takes to make."""
        self.patience.took(split, node, report.seconds)

    def _retry(
        self, what: str, node: str, hosts: set[str], failures: int, failure: Failure, how: str
    ) -> float:
        if not failure.may_pass:
            raise DataError(failure.text)
        if failures > failure.tries:
            names = ", ".join(sorted(map(self.pool.name, hosts)))
            raise DataError(f"{what}: failed {failures} times, on {names}: {failure.text}")
        wait_s = reread_wait_s(OSError(), failures - 1) or 0.0
        self.attempt.note(f"host {self.pool.name(node)}: {what}: {failure.text}; {how} in {wait_s:.0f} s")
        return wait_s

    def overdue(
        self, active: Mapping[str, Item], waiting: list[Item], now: float
    ) -> tuple[list[str], list[str]]:
        """Work that must be done again elsewhere.

        Args:
            active: work in progress, by chain worker.
            waiting: work that waits for a retry.
            now: `time.monotonic()`.

        Returns:
            Chain workers whose host was lost or that are late, and the late ones.

        Raises:
            DataError: late work has failed on every host.
        """
        workers, hung = [], []
        for worker, item in active.items():
            if not self.pool.is_gone(item.node):
                if not self.is_late(item, now, in_work=True):
                    continue
                self.late(item)
                hung.append(worker)
            self.attempt.repeats(item.pass_.plan.split, item.name)
            workers.append(worker)
        for item in waiting:
            self.is_late(item, now, in_work=False)
        return workers, hung

    def is_late(self, item: Item, now: float, in_work: bool) -> bool:
        """Whether work has been silent for too long.

        Raises:
            DataError: it was late on every host, and train workers have nothing left.
        """
        pass_ = item.pass_
        starving = pass_.rows_ahead < pass_.step_rows and self.attempt.open_passes()[0] is pass_
        if starving and now - item.stuck_since > self.patience.give_up_s:
            waited = (
                f"no result for {now - item.stuck_since:.0f} s (data.stall_timeout_s: {self.stall_s:.0f})"
            )
            raise DataError(f"{self._who(item)}: {waited}, tried {item.late + 1} times")
        return in_work and now - item.quiet_since > self._limit_s(item, item.node)

    def names_records(self, item: Item, node: str) -> bool:
        """Whether late work that starts on a host now could not be late once more before the run gives up;
        then it reports each record, which takes longer."""
        left_s = self.patience.give_up_s - (time.monotonic() - item.stuck_since)
        return item.late > 0 and self._limit_s(item, node) > left_s

    def _limit_s(self, item: Item, node: str) -> float:
        return self.patience.deadline_s(item.pass_.plan.split, node, item.late)

    def late(self, item: Item) -> None:
        """Work missed its deadline: avoid its host and report it."""
        now = time.monotonic()
        text = f"{self._who(item)}: no result for {now - item.quiet_since:.0f} s; {self._elsewhere(item)}"
        if others(self.pool.hosts, {item.node}) != {item.node}:
            seconds = self.patience.avoid(item.node, now)
            self.pool.avoided = self.patience.avoided(now)
            text += f"; this host gets no work for {seconds:.0f} s"
        item.late += 1
        self.attempt.note(text)

    def _who(self, item: Item) -> str:
        """Host, shards and, if known, the record."""
        doing = self.attempt.suspects.doing(item.name)
        where = f"host {self.pool.name(item.node)}: {self.what(item.pass_.plan.split, item.shards)}"
        return f"{where}, {doing}" if doing else where

    def _elsewhere(self, item: Item) -> str:
        if others(self.pool.hosts, {item.node}) == {item.node}:
            return "retrying on this host (no other available)"
        return "retrying on another host"
