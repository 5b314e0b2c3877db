"""Train worker: its state, and small helpers of the loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stoker.config.schema import Config
from stoker.errors import DataError
from stoker.recipe import Batch, Recipe
from stoker.train.device import on_tensors
from stoker.train.feed import Feed

FLUSH_S = 60.0


@dataclass
class Worker:
    """Train worker: the state shared by the functions of the loop."""

    config: Config
    recipe: Recipe
    coordinator: Any
    attempt: int
    rank: int
    world_size: int
    device: Any
    model: Any = None
    optimizer: Any = None
    schedule: Any = None
    """The learning rate schedule (`stoker.train.optimizers.Schedule`); None if the recipe's own optimiser
    keeps its rate, and in loops other than Stoker's."""
    ema: Any = None
    """The averaged model (timm's ModelEmaV3); None without `train.ema_decay`."""
    scaler: Any = None
    """The gradient scaler; None unless `train.precision` is fp16."""
    modules: dict[str, Any] = field(default_factory=dict)
    """The recipe's on_device modules by split."""
    transport: Any = None
    """Fetches blocks; opened with the first pass."""
    example: Any = None
    """Rank 0: a few records from the feed, for checking exports; `stoker.train.export.Example`."""
    step: int = 0
    """Optimiser steps since training began; the unit of metrics, max_steps and the schedule."""
    feed_step: int = 0
    """Batches that each rank has taken from this attempt's pass over the present epoch; the unit of the data
    position. With train.accumulate_steps several make a step."""
    samples: int = 0
    """Records trained in epochs before the present one, over all ranks."""
    classes: list[str] = field(default_factory=list)
    """Names of the classes, as far as recipe or data give them."""
    clock: tuple[str, float] | None = None
    """When the run's first start began; and the time since which all starts would have taken as long as they
    did, in seconds since 1970."""
    kept: str = ""
    """The last checkpoint taken or resumed from."""
    pictured: set[str] = field(default_factory=set)
    """Splits whose images the report has."""
    noted: set[str] = field(default_factory=set)
    """Notes on validation that were logged."""
    logged: Any = None
    """The last call of `log`."""

    @property
    def global_batch(self) -> int:
        """Records per optimiser step, over all ranks."""
        return self.config.train.batch_size * self.config.train.accumulate_steps * self.world_size

    def log(self, event: str, *, every_rank: bool = False, **values: Any) -> None:
        """Log an event; only on rank 0 unless `every_rank`.

        Ray runs the calls of an actor with threads in any order; here each depends on the previous one.
        """
        if every_rank or self.rank == 0:
            self.logged = self.coordinator.log.remote(event, values, self.logged)

    def flush(self) -> None:
        """Wait until the coordinator has all logged events, so that none is missing from the summary.

        Raises:
            RayError: it does not take them.
        """
        import ray

        if self.logged is not None:
            ray.get(self.logged, timeout=FLUSH_S)


def reconcile(worker: Worker, feed: Feed) -> dict[str, Any]:
    """Train worker: report this rank's count and ids, get the books; raises if records were lost.

    `whole` in the books of training is whether `train.max_steps` leaves nothing of the pass.
    """
    import ray

    if worker.config.tracking.record_ids:
        ids = {"split": feed.split, "epoch": feed.epoch, "rank": feed.rank, "keys": feed.keys}
        worker.log("record_ids", every_rank=True, **ids)
    used = (feed.rows, feed.id_sum, feed.padded)
    steps = worker.feed_step if feed.split == "train" and reached(worker) else None
    call = worker.coordinator.epoch_done.remote(
        worker.attempt, feed.split, feed.epoch, worker.rank, used, steps
    )
    answer = ray.get(call, timeout=worker.config.data.stall_timeout_s)
    if isinstance(answer, str):
        raise DataError(answer)
    return {"split": feed.split, **answer}


def loss_of(result: Any) -> Any:
    """Train worker: the loss in the result of training_step.

    Raises:
        TypeError: there is none.
    """
    import torch

    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        raise TypeError(f"training_step must return one number as a tensor, not {type(loss).__name__}")
    return loss


def mean_over_ranks(worker: Worker, value: Any) -> float:
    """Train worker: the mean of a number over all ranks."""
    import torch.distributed as dist

    if worker.world_size > 1:
        dist.all_reduce(value)
        value = value / worker.world_size
    return float(value)


def check_finite(value: float, worker: Worker, epoch: int) -> None:
    """Train worker: stop before a broken model overwrites a good checkpoint.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    import math

    if not math.isfinite(value):
        raise not_finite(f"the loss is {value}", worker, epoch)


def not_finite(what: str, worker: Worker, epoch: int, remedy: str = "") -> FloatingPointError:
    """Train worker: the error that ends a run with non-finite values.

    Args:
        what: the problem, such as `the loss is nan`.
        worker: has the step and the last checkpoint.
        epoch: the present one.
        remedy: what to do; empty: the default advice.
    """
    kept = f"the checkpoint {worker.kept} is kept" if worker.kept else "no checkpoint was taken before"
    remedy = remedy or "lower train.lr or look at the records of the steps before"
    return FloatingPointError(f"{what} by step {worker.step} (epoch {epoch + 1}); {remedy}; {kept}")


def reached(worker: Worker) -> bool:
    """Train worker: whether `train.max_steps` is reached."""
    limit = worker.config.train.max_steps
    return limit is not None and worker.step >= limit


def count_records(batch: Batch) -> int:
    """Train worker: the number of records in a batch."""
    return len(next(iter(batch.values()))) if batch else 0


def to_device(batch: Batch, device: Any) -> Batch:
    """Train worker: the batch with its tensors on the device."""
    moved: Batch = on_tensors(batch, lambda value: value.to(device))
    return moved


def at_least_float32(values: Any) -> Any:
    """Train worker: predictions for metrics, with 16-bit floats converted to float32."""
    import torch

    low = torch.is_tensor(values) and values.dtype in (torch.bfloat16, torch.float16)
    return values.float() if low else values


def finite(value: Any) -> float | None:
    """Train worker: a number for the log; None without one, or if fp16 overflowed in this step."""
    import math

    number = None if value is None else float(value)
    return number if number is not None and math.isfinite(number) else None


def tee_prints(worker: Worker) -> None:
    """Train worker: also show on the head's screen what the user's code prints on rank 0."""
    write: Callable[[str], int] = sys.stdout.write
    pending: list[str] = []

    def tee(text: str) -> int:
        pending.append(text)
        if "\n" in text:
            for line in "".join(pending).splitlines():
                if line.strip():
                    worker.log("print", text=line)
            pending.clear()
        return write(text)

    sys.stdout.write = tee  # type: ignore[method-assign]
