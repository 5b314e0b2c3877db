"""Head: what becomes of tasks that fail or do not answer in time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stoker.data.coordinator.accounting import STATED, DataError, root_cause
from stoker.data.engine.deadlines import Patience, others, reread_wait_s
from stoker.data.engine.placement import Placement
from stoker.data.engine.running import Numbered, Running
from stoker.recipe import where_raised

if TYPE_CHECKING:
    from stoker.data.coordinator.attempt import Attempt


class Recovery:
    """Head: part of the dispatcher; it decides, the dispatcher sends again.

    Args:
        attempt: whose tasks these are.
        placement: the hosts.
    """

    def __init__(self, attempt: Attempt, placement: Placement) -> None:
        self.attempt, self.placement = attempt, placement
        self.stall_s = attempt.passes.config.data.stall_timeout_s
        self.patience = Patience(self.stall_s)

    def what(self, split: str, pieces: list[Numbered]) -> str:
        """What people call the pieces of a task."""
        if not pieces:
            return split
        names = []
        for number, piece, _ in (pieces[0], pieces[-1]):
            name = self.attempt.passes.sources[split].name_of(piece)
            names.append(name or f"number {number}")
        return f"{split} shard {names[0]}" if len(pieces) == 1 else f"{split} shards {names[0]} … {names[1]}"

    def failed(self, task: Running, error: Exception) -> float:
        """A task has raised, or Ray has lost it: how long to wait before it is sent again.

        Raises:
            Exception: it failed for good.
        """
        import ray

        cause = root_cause(error)
        may_pass = isinstance(cause, OSError) and not isinstance(cause, STATED)
        if isinstance(error, ray.exceptions.RayTaskError) and not may_pass:
            raise error
        wait_s = reread_wait_s(cause, task.failures)
        task.failures += 1
        what = self.what(task.line.plan.split, task.pieces)
        if wait_s is None:
            hosts = ", ".join(sorted({self.placement.name(node) for node in {*task.tried, task.node}}))
            raise DataError(
                f"{what}: failed {task.failures} times, on {hosts}: {where_raised(cause)}"
            ) from None
        host = self.placement.name(task.node)
        self.attempt.note(
            f"host {host}: {what}: {where_raised(cause)}; {self._elsewhere(task)} in {wait_s:.0f} s"
        )
        return wait_s

    def is_late(self, task: Running, now: float) -> bool:
        """Whether a task that is waited for has been silent for too long.

        Raises:
            DataError: wherever it was tried, and train workers have nothing left.
        """
        stream = task.line.stream
        starving = stream.rows_ahead < stream.splitter.step_rows and self.attempt.open_streams()[0] is stream
        if starving and now - task.stuck_since > self.patience.give_up_s:
            waited = (
                f"no result for {now - task.stuck_since:.0f} s (data.stall_timeout_s: {self.stall_s:.0f})"
            )
            raise DataError(f"{self._who(task)}: {waited}, tried {task.late + 1} times")
        if task.generator is None:
            return False
        limit = self.patience.deadline_s(task.line.plan.split, task.node, task.late)
        return now - task.quiet_since > limit

    def is_last(self, task: Running, node: str) -> bool:
        """Whether late work that is sent to a host now has no time left to be late there: then it names its
        records, which takes longer."""
        limit = self.patience.deadline_s(task.line.plan.split, node, task.late)
        return task.late > 0 and time.monotonic() - task.stuck_since + limit > self.patience.give_up_s

    def late(self, task: Running) -> None:
        """A task was silent for too long: avoid its host, and say so."""
        now = time.monotonic()
        text = f"{self._who(task)}: no result for {now - task.quiet_since:.0f} s; {self._elsewhere(task)}"
        if others(self.placement.hosts, {task.node}) != {task.node}:
            seconds = self.patience.avoid(task.node, now)
            self.placement.avoided = self.patience.avoided(now)
            text += f", and this host gets no work for {seconds:.0f} s"
        task.late += 1
        self.attempt.note(text)

    def _who(self, task: Running) -> str:
        """Host, pieces, and the record if it is known."""
        doing = self.attempt.suspects.doing(task.name)
        where = f"host {self.placement.name(task.node)}: {self.what(task.line.plan.split, task.pieces)}"
        return f"{where}, {doing}" if doing else where

    def _elsewhere(self, task: Running) -> str:
        if others(self.placement.hosts, {task.node}) == {task.node}:
            return "there is no other host, so it is tried there again"
        return "it is tried on another host"
