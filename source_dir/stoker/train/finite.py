"""Train worker and head: refuse to publish, or resume from, a checkpoint with NaN or infinity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from stoker.checkpoints.tensors import Named, flat, floats, is_broken_buffer, is_finite
from stoker.train import strategies
from stoker.train.state import Worker, not_finite
from stoker.train.train_state import Progress

SMALLEST_SCALE = 2.0**-20
"""Of the fp16 gradient scaler, which starts at 2**16 and halves with every overflow. Below this the last
steps were all skipped, and all further ones will be."""


def check_state(worker: Worker, progress: Progress) -> None:
    """Train worker: raise on all ranks if the state of any rank is not finite. Collective.

    Checks the losses since the epoch began and the present weights, averaged weights and optimiser state,
    with one reduction on the device and one number read from it.

    Raises:
        FloatingPointError: names what is not finite.
    """
    import torch
    import torch.distributed as dist

    several = worker.world_size > 1
    whole = torch.stack([_all_finite(worker, progress).float().to(worker.device)])
    if several:
        dist.all_reduce(whole, op=dist.ReduceOp.MIN)
    if float(whole):
        return
    found: list[str] = [""] * worker.world_size
    own = _first_problem(worker, progress)
    if several:
        dist.all_gather_object(found, own)
    else:
        found = [own]
    raise not_finite(next(filter(None, found), "the state of a train worker"), worker, progress.epoch)


def check_scale(worker: Worker, epoch: int) -> None:
    """Train worker: raise if fp16 skips every step, so nothing is learned; single skips are normal.

    Raises:
        FloatingPointError: the gradient scale is too small.
    """
    if worker.scaler is not None and worker.scaler.get_scale() < SMALLEST_SCALE:
        raise not_finite("fp16: the gradient of every step", worker, epoch, "use train.precision=bf16")


def _all_finite(worker: Worker, progress: Progress) -> Any:
    """A boolean scalar tensor; reads nothing from the device."""
    import torch

    verdicts = []
    by_device: dict[Any, list[Any]] = {}
    for _, tensor in _strict(worker):
        by_device.setdefault(tensor.device, []).append(tensor)
    for tensors in by_device.values():
        largest = torch._foreach_norm(tensors, float("inf"))
        verdicts.append(torch.stack([value.double() for value in largest]).isfinite().all())
    # Attention masks are buffers of -inf.
    verdicts += [tensor.max() < math.inf for _, tensor in _buffers(worker)]
    if progress.loss_sum is not None:
        verdicts.append(progress.loss_sum.isfinite())
    if not verdicts:
        return torch.ones((), dtype=torch.bool)
    return torch.stack([verdict.to(worker.device) for verdict in verdicts]).all()


def _first_problem(worker: Worker, progress: Progress) -> str:
    if progress.loss_sum is not None and not math.isfinite(float(progress.loss_sum)):
        return f"the sum of the epoch's losses is {float(progress.loss_sum)}"
    named = [name for name, tensor in _strict(worker) if not is_finite(tensor)]
    named += [name for name, tensor in _buffers(worker) if is_broken_buffer(tensor)]
    return f"{named[0]} holds NaN or infinity" if named else ""


def _strict(worker: Worker) -> Iterator[Named]:
    """The tensors on this rank that must be finite throughout."""
    models = [("weight", worker.model), ("averaged weight", worker.ema and worker.ema.module)]
    for kind, model in models:
        if model is not None:
            named = strategies.plain(model).named_parameters()
            yield from floats((f"{kind} {name}", p) for name, p in named)
    if worker.optimizer is not None:
        yield from floats(flat("optimiser state", list(worker.optimizer.state.values())))


def _buffers(worker: Worker) -> Iterator[Named]:
    for model in (worker.model, worker.ema and worker.ema.module):
        if model is not None:
            named = strategies.plain(model).named_buffers()
            yield from floats((f"buffer {name}", b) for name, b in named)
