"""Train worker: where an attempt starts, and whether anything is left to train."""

from __future__ import annotations

import platform

from stoker.checkpoints.format import Checkpoint, awaiting, describe
from stoker.storage.checkpoint_store import open_store, step_of
from stoker.train.manager import CheckpointManager
from stoker.train.state import Worker, reached
from stoker.train.train_state import from_rank_0


def begin(
    worker: Worker, keeper: CheckpointManager, chosen: tuple[str, bool, str] | None
) -> Checkpoint | None:
    """Train worker: agree on the attempt and its start, then start the data. Collective.

    Args:
        worker: receives its attempt.
        keeper: the checkpoints of this run.
        chosen: the checkpoint chosen by the head, which has started the data of the first attempt.

    Returns:
        The checkpoint to resume from; None for a start from scratch.
    """
    import ray

    found: Checkpoint | None = None
    if worker.rank == 0:
        worker.attempt = ray.get(worker.coordinator.new_attempt.remote())
        if worker.attempt:
            found = keeper.newest()
            own = chosen is not None and chosen[0] == keeper.store.where
            start = f"{chosen[0].rstrip('/')}/{chosen[2]}" if chosen is not None and own else ""
            refuse_earlier(ray.get(worker.coordinator.published.remote()) or start, found)
        if found is None and chosen is not None:
            found = describe(open_store(*chosen[:2]), chosen[2])
        if found is not None:
            found = awaiting(found, worker.config.train.max_steps)
        first, position = (found.meta["next_epoch"], found.position) if found else (0, None)
        call = worker.coordinator.begin.remote(
            worker.coordinator, worker.attempt, worker.world_size, first, position
        )
        ray.get(call)
    # The other ranks wait for this; by then the data has started.
    agreed = (worker.attempt, found and found.name, found and found.meta)
    worker.attempt, name, meta = from_rank_0(worker, agreed)
    return Checkpoint(keeper.store, name, meta) if worker.rank and name else found


def refuse_earlier(published: str, found: Checkpoint | None) -> None:
    """Train worker (rank 0): fail unless a restart continues from the run's last checkpoint.

    Args:
        published: the last checkpoint of this run, written or resumed from; "" without one.
        found: the newest valid one visible on this host.

    Raises:
        OSError: the last checkpoint is not visible or damaged on this host.
    """
    last = published.rpartition("/")[2]
    if not last or (found is not None and step_of(found.name) >= step_of(last)):
        return
    instead = f"it has only {found.name}" if found else "it has no checkpoint"
    raise OSError(
        f"{published}, the last checkpoint of this run, is absent or damaged on {platform.node()}, where"
        f" training restarts ({instead}); an earlier one would silently lose training. With several hosts"
        " that train, checkpoint.dir must be s3:// or a folder that they share"
    )


def nothing_left(worker: Worker, keeper: CheckpointManager, first_epoch: int) -> str:
    """Train worker: why a resumed run has nothing left to train, or ""."""
    config = worker.config.train
    if keeper.early_stopping and keeper.early_stopping.reason:
        return keeper.early_stopping.reason
    if keeper.resumed and reached(worker):
        return f"train.max_steps ({config.max_steps}) was reached before"
    if keeper.resumed and first_epoch >= config.epochs:
        return f"all {config.epochs} epochs (train.epochs) were trained before"
    return ""
