"""Train worker: the state of a run between two steps, saved and restored bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.checkpoints.format import Content
from stoker.serve.accounting import ID_MODULUS
from stoker.train import strategies
from stoker.train.state import Worker


@dataclass
class Progress:
    """Train worker: progress of this rank in an epoch, earlier starts included."""

    epoch: int
    steps: int = 0
    """Optimiser steps of the epoch so far."""
    samples: int = 0
    """Records of the epoch so far, over all ranks."""
    loss_sum: Any = None
    """Sum of the losses of this rank's records: a float64 scalar on the device."""
    loss_rows: int = 0
    """Number of records in `loss_sum`."""
    carried_steps: int = 0
    """Steps and, below, records done before this start."""
    carried_samples: int = 0
    carried_keys: list[str] = field(default_factory=list)
    """Their keys on this rank, with `tracking.record_ids`."""
    feed: Any = None
    """The pass that yields the batches; None between two epochs."""


class Copier:
    """Train worker (rank 0): copies tensors to CPU buffers and reuses these buffers.

    Fresh memory costs page faults. Pinned memory, which a GPU copies into at full speed, costs far more
    to allocate than to fill.
    """

    def __init__(self) -> None:
        self.buffers: list[Any] = []

    def copy(self, tree: Any) -> Any:
        """Return the same nesting of dicts, lists and values with independent CPU tensors.

        The next call overwrites these copies.
        """
        import torch
        from torch.utils._pytree import tree_map

        position = 0
        on_gpu = False

        def one(leaf: Any) -> Any:
            nonlocal position, on_gpu
            if not isinstance(leaf, torch.Tensor):
                return leaf
            on_gpu |= leaf.is_cuda
            buffer = self._buffer(position, leaf)
            position += 1
            return buffer.copy_(leaf.detach(), non_blocking=leaf.is_cuda)

        copied = tree_map(one, tree)
        del self.buffers[position:]
        if on_gpu:
            # The next step changes the weights: finish the copies first.
            torch.cuda.synchronize()
        return copied

    def _buffer(self, position: int, like: Any) -> Any:
        import torch

        if position < len(self.buffers):
            found = self.buffers[position]
            if found.shape == like.shape and found.dtype == like.dtype:
                return found
        made = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        self.buffers[position : position + 1] = [made]
        return made


def rng_state(device: Any) -> dict[str, Any]:
    """Train worker: the state of all random generators of this process, as tensors and plain values."""
    import random

    import numpy as np
    import torch

    version, internal, gauss = random.getstate()
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    keys = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": [keys, int(numpy["state"]["pos"]), int(numpy["has_gauss"]), float(numpy["gauss"])],
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
    }


def set_rng_state(state: dict[str, Any], device: Any) -> None:
    """Train worker: the reverse of `rng_state`."""
    import random

    import numpy as np
    import torch

    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))


def gather(worker: Worker, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Train worker: gather every rank's part on rank 0, in rank order; empty elsewhere. Collective."""
    import torch.distributed as dist

    if worker.world_size == 1:
        return [mine]
    parts: list[Any] | None = [None] * worker.world_size if worker.rank == 0 else None
    dist.gather_object(mine, parts, dst=0)
    return parts or []


def rank_part(worker: Worker, progress: Progress) -> dict[str, Any]:
    """Train worker: state of this rank alone: random states, sums and ids of the epoch so far."""
    feed = progress.feed
    return {
        "rng": rng_state(worker.device),
        "loss_sum": float(progress.loss_sum) if progress.loss_sum is not None else 0.0,
        "loss_rows": progress.loss_rows,
        "id_sum": feed.id_sum if feed is not None else 0,
        "keys": list(feed.keys) if feed is not None else [],
    }


def id_sum_of(parts: list[dict[str, Any]]) -> int:
    """Train worker (rank 0): the id sum over all ranks, as in the coordinator's books."""
    return sum(int(part["id_sum"]) for part in parts) % ID_MODULUS


def from_rank_0(worker: Worker, value: Any) -> Any:
    """Train worker: broadcast rank 0's value. Collective."""
    return from_rank(worker, value, 0)


def from_rank(worker: Worker, value: Any, rank: int) -> Any:
    """Train worker: broadcast a rank's value. Collective."""
    import torch.distributed as dist

    box = [value]
    if worker.world_size > 1:
        dist.broadcast_object_list(box, src=rank)
    return box[0]


def live_state(worker: Worker) -> dict[str, Any]:
    """Train worker: live weights, optimiser, scaler and EMA; complete on rank 0 only. Collective."""
    weights, optimizer = strategies.full_state(worker.model, worker.optimizer, copy=False)
    averaged = None
    if worker.ema is not None:
        averaged = strategies.full_state(worker.ema.module, None, copy=False)[0]
    return {
        "weights": weights,
        "optimizer": optimizer,
        "scaler": worker.scaler.state_dict() if worker.scaler is not None else None,
        "ema": averaged,
    }


def content_of(
    worker: Worker, live: dict[str, Any], parts: list[dict[str, Any]], meta: dict[str, Any], copier: Copier
) -> Content:
    """Train worker (rank 0): a checkpoint's content, independent of further steps.

    Args:
        worker: provides the state of the loop.
        live: from `live_state`.
        parts: of all ranks, from `gather`.
        meta: description of the checkpoint.
        copier: its copies are overwritten by the next call.
    """
    copies = copier.copy(live)
    state = {
        "optimizer": copies["optimizer"],
        "scaler": copies["scaler"],
        "ranks": parts,
    }
    return Content(copies["weights"], state, meta, copies["ema"])


def put_back(worker: Worker, content: Content | None) -> list[dict[str, Any]]:
    """Train worker: load a checkpoint into model, optimiser and the rest. Collective.

    Args:
        worker: the worker to restore.
        content: on rank 0; None elsewhere.

    Returns:
        The parts saved by each rank.
    """
    weights: dict[str, Any] = {}
    optimizer, averaged, small = None, None, None
    if content is not None:
        weights, optimizer, averaged = content.weights, content.state["optimizer"], content.ema
        small = {k: v for k, v in content.state.items() if k != "optimizer"}
    strategies.load_full_state(worker.model, worker.optimizer, weights, optimizer)
    if worker.ema is not None:
        # A checkpoint without averaged weights: averaging starts from its weights.
        strategies.load_full_state(worker.ema.module, None, averaged or weights, None)
    small = from_rank_0(worker, small)
    if worker.scaler is not None and small["scaler"]:
        worker.scaler.load_state_dict(small["scaler"])
    ranks: list[dict[str, Any]] = small["ranks"]
    return ranks


def carried_progress(worker: Worker, meta: dict[str, Any], ranks: list[dict[str, Any]]) -> Progress | None:
    """Train worker: this rank's progress in the epoch that the checkpoint interrupted, if any.

    With the same number of ranks, every rank continues with its own sums; otherwise the mean over records
    is kept. Steps are counted in global batches of the present size.
    """
    import torch

    steps, before = int(meta["epoch_steps"]), len(ranks)
    if not steps:
        return None
    samples = int(meta["epoch_samples"])
    if before == worker.world_size and all("loss_rows" in part for part in ranks):
        own = ranks[worker.rank]
        loss_sum, rows, keys = own["loss_sum"], own["loss_rows"], list(own["keys"])
    else:
        # Older checkpoints hold a sum over steps and no number of records.
        counted = sum(part.get("loss_rows", steps) for part in ranks)
        mean = sum(part["loss_sum"] for part in ranks) / max(counted, 1)
        rows = max(1, samples // worker.world_size)
        loss_sum, keys = mean * rows, []
    if meta["global_batch"] != worker.global_batch:
        steps = max(1, round(steps * meta["global_batch"] / worker.global_batch))
    return Progress(
        epoch=int(meta["next_epoch"]),
        steps=steps,
        samples=samples,
        loss_sum=torch.tensor(loss_sum, dtype=torch.float64, device=worker.device),
        loss_rows=rows,
        carried_steps=steps,
        carried_samples=samples,
        carried_keys=keys,
    )
