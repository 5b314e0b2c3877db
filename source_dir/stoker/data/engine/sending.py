"""Head: a chain task's way to Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.data.engine.passes import pack_work
from stoker.data.engine.running import Running
from stoker.data.engine.tasks import run_pieces
from stoker.data.engine.witness import Care

if TYPE_CHECKING:
    from stoker.data.coordinator.attempt import Attempt

BLOCKS_AHEAD = 4
"""Blocks that a task may have ready without being asked for them; then it waits."""


class Sender:
    """Head: part of the dispatcher.

    Args:
        attempt: whose tasks these are.
        me: handle of the coordinator, for tasks that have something to say.
    """

    def __init__(self, attempt: Attempt, me: Any) -> None:
        self.attempt, self.me = attempt, me
        self._setups: dict[str, list[Any]] = {}
        self._tasks: dict[tuple[str, str], Any] = {}

    def send(self, task: Running, node: str, names: bool, last_try: bool) -> Any:
        """Send what a task has not given yet to a host; the generator of its blocks and reports."""
        plan = task.line.plan
        setup = self._setup(plan.split)
        known = dict(self.attempt.suspects.of(plan.split))
        care = Care(task.name, self.attempt.number, known, names, last_try)
        work = pack_work(task.pieces, task.store)
        return self._remote(node, plan.split).remote(setup[0].hex(), setup, plan, work, task.per_report, care)

    def _setup(self, split: str) -> list[Any]:
        import ray

        if split not in self._setups:
            self._setups[split] = [ray.put(self.attempt.passes.setup(split)), ray.put(self.me)]
        return self._setups[split]

    def _remote(self, node: str, split: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if (node, split) not in self._tasks:
            # Soft: where its host is lost, a task, or one that makes lost blocks again, runs elsewhere.
            affinity = NodeAffinitySchedulingStrategy(node, soft=True)
            self._tasks[node, split] = ray.remote(run_pieces).options(
                name=f"chain-{split}",
                num_cpus=1,
                num_returns="streaming",
                # Without end, so that lost hosts cost no run; `Suspects` bounds what kills its process.
                max_retries=-1,
                scheduling_strategy=affinity,
                _generator_backpressure_num_objects=2 * BLOCKS_AHEAD,
            )
        return self._tasks[node, split]


def let_go(generator: Any, gave: bool) -> None:
    """Head: read no more of a task's blocks.

    Args:
        generator: of its blocks.
        gave: it has given some, which Ray can make again only if the task is not cancelled.
    """
    import ray

    if not gave:
        # With its process, which may hang for ever.
        ray.cancel(generator, force=True)
