"""Train worker: where an attempt starts, and whether anything is left to train from there."""

from __future__ import annotations

from stoker.training.checkpoint import Checkpoint, awaiting, describe
from stoker.training.keeping import Keeper
from stoker.training.snapshot import from_rank_0
from stoker.training.store import open_store
from stoker.training.worker import Worker, reached


def begin(worker: Worker, keeper: Keeper, chosen: tuple[str, bool, str] | None) -> Checkpoint | None:
    """Train worker: agree on the attempt and on where it starts, then let the data flow. Collective.

    Args:
        worker: gets its attempt.
        keeper: knows the checkpoints of this run.
        chosen: where the head found the one to continue from; it has begun the data of the first attempt.

    Returns:
        The checkpoint to continue from; None for a start from nothing.
    """
    import ray

    found: Checkpoint | None = None
    if worker.rank == 0:
        worker.attempt = ray.get(worker.coordinator.new_attempt.remote())
        found = keeper.newest() if worker.attempt else None
        if found is None and chosen is not None:
            found = describe(open_store(*chosen[:2]), chosen[2])
        if found is not None:
            found = awaiting(found, worker.config.train.max_steps)
        first, position = (found.meta["next_epoch"], found.position) if found else (0, None)
        call = worker.coordinator.begin.remote(
            worker.coordinator, worker.attempt, worker.world_size, first, position
        )
        ray.get(call)
    # Where the others wait for it, the data has begun.
    agreed = (worker.attempt, found and found.name, found and found.meta)
    worker.attempt, name, meta = from_rank_0(worker, agreed)
    return Checkpoint(keeper.store, name, meta) if worker.rank and name else found


def nothing_left(worker: Worker, keeper: Keeper, first_epoch: int) -> str:
    """Train worker: why a run that goes on has nothing more to train, or ""."""
    config = worker.config.train
    if keeper.early_stopping and keeper.early_stopping.reason:
        return keeper.early_stopping.reason
    if keeper.resumed and reached(worker):
        return f"train.max_steps ({config.max_steps}) was reached before"
    if keeper.resumed and first_epoch >= config.epochs:
        return f"all {config.epochs} epochs (train.epochs) were trained before"
    return ""
