"""Train worker: its state, and small helpers of the loop."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist

from stoker.checkpoints.format import Content
from stoker.config.schema import Config
from stoker.errors import DataError, NotFiniteError
from stoker.events.kinds import Event, Printed, RecordIds
from stoker.recipe import Batch, Recipe
from stoker.train import strategies
from stoker.train.feed import Feed
from stoker.train.stop_gate import StopGate

FLUSH_S = 60.0
RANKS_S = 1800.0
"""How long a rank waits for others at the end of a pass: as long as PyTorch does in a collective by default."""


@dataclass
class Worker:
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
    """`stoker.train.build.Schedule`; None if the recipe's own optimiser keeps its rate."""
    ema: Any = None
    scaler: Any = None
    modules: dict[str, Any] = field(default_factory=dict)
    transport: Any = None
    gate: StopGate | None = None
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
    clock: tuple[str, float] | None = None
    """When the run's first start began; and the time since which all starts would have taken as long as they
    did, in seconds since 1970."""
    kept: str = ""
    """The last checkpoint taken or resumed from."""
    noted: set[str] = field(default_factory=set)
    logged: Any = None

    @property
    def global_batch(self) -> int:
        return self.config.train.batch_size * self.config.train.accumulate_steps * self.world_size

    def log(self, event: Event, *, every_rank: bool = False) -> None:
        """Log an event; only on rank 0 unless `every_rank`.

        Ray runs the calls of an actor with threads in any order; here each depends on the previous one.
        """
        if every_rank or self.rank == 0:
            self.logged = self.coordinator.log.remote(event, self.logged)

    def flush(self) -> None:
        """Wait until the coordinator has all logged events, so that none is missing from the summary."""
        import ray

        if self.logged is not None:
            ray.get(self.logged, timeout=FLUSH_S)


def reconcile(worker: Worker, feed: Feed) -> dict[str, Any]:
    """Report this rank's count and ids, get the books; raises if records were lost.

    `whole` in the books of training is whether `train.max_steps` leaves nothing of the pass.
    """
    import ray

    if worker.config.tracking.record_ids:
        ids = {"split": feed.split, "epoch": feed.epoch, "rank": feed.rank, "keys": feed.keys}
        worker.log(RecordIds(**ids), every_rank=True)
    used = (feed.rows, feed.id_sum, feed.padded)
    steps = worker.feed_step if feed.split == "train" and reached(worker) else None
    call = worker.coordinator.epoch_done.remote(
        worker.attempt, feed.split, feed.epoch, worker.rank, used, steps
    )
    # So long may one of them wait for rows.
    longest_s = max(RANKS_S, worker.config.data.stall_timeout_s)
    try:
        return {"split": feed.split, **ray.get(call, timeout=longest_s)}
    except ray.exceptions.GetTimeoutError:
        raise DataError(
            f"{feed.split} epoch {feed.epoch + 1}: other train workers have not ended it {longest_s:.0f} s"
            " after this one; if they are that much slower, raise data.stall_timeout_s"
        ) from None


def loss_value(result: Any) -> Any:
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        raise TypeError(
            f"training_step must return one number as a tensor, not {type(loss).__name__}"
        )
    return loss


def mean_over_ranks(worker: Worker, value: Any) -> float:
    if worker.world_size > 1:
        dist.all_reduce(value)
        value = value / worker.world_size
    return float(value)


def check_finite(value: float, worker: Worker, epoch: int) -> None:
    if not math.isfinite(value):
        raise not_finite(f"the loss is {value}", worker, epoch)


def not_finite(what: str, worker: Worker, epoch: int, remedy: str = "") -> NotFiniteError:
    kept = (
        f"the checkpoint {worker.kept} is kept" if worker.kept else "no checkpoint was taken before"
    )
    remedy = remedy or "lower train.lr or look at the records of the steps before"
    return NotFiniteError(f"{what} by step {worker.step} (epoch {epoch + 1}); {remedy}; {kept}")


def reached(worker: Worker) -> bool:
    limit = worker.config.train.max_steps
    return limit is not None and worker.step >= limit


def count_records(batch: Batch) -> int:
    return len(next(iter(batch.values()))) if batch else 0


class Tee:
    """Train worker of rank 0, in place of `sys.stdout`: also shows on the head's screen what is printed."""

    def __init__(self, stream: TextIO, worker: Worker) -> None:
        self._stream, self._worker = stream, worker
        self._pending = ""

    def write(self, text: str) -> int:
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            if line.strip():
                self._worker.log(Printed(text=line))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass
class Progress:
    epoch: int
    steps: int = 0
    samples: int = 0
    loss_sum: Any = None
    """Sum of the losses of this rank's records: a float64 scalar on the device."""
    loss_rows: int = 0
    carried_steps: int = 0
    carried_samples: int = 0
    carried_keys: list[str] = field(default_factory=list)
    feed: Any = None
    """The pass that yields the batches; None between two epochs."""


def rng_state(device: Any) -> dict[str, Any]:
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
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))


@contextlib.contextmanager
def same_draws(device: Any) -> Iterator[None]:
    draws = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(draws, device)


def gather(worker: Worker, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather every rank's part on rank 0, in rank order; empty elsewhere. Collective."""
    if worker.world_size == 1:
        return [mine]
    parts: list[Any] | None = [None] * worker.world_size if worker.rank == 0 else None
    dist.gather_object(mine, parts, dst=0)
    return parts or []


def rank_part(worker: Worker, progress: Progress) -> dict[str, Any]:
    feed = progress.feed
    return {
        "rng": rng_state(worker.device),
        "loss_sum": float(progress.loss_sum) if progress.loss_sum is not None else 0.0,
        "loss_rows": progress.loss_rows,
        "id_sum": feed.id_sum if feed is not None else 0,
        "keys": list(feed.keys) if feed is not None else [],
    }


def live_state(worker: Worker) -> dict[str, Any]:
    """Live weights, optimiser, scaler and EMA; complete on rank 0 only. Collective."""
    weights, optimizer = strategies.full_state(worker.model, worker.optimizer)
    ema, scaler = worker.ema, worker.scaler
    averaged = None if ema is None else strategies.full_state(ema.module, None)[0]
    scale = None if scaler is None else scaler.state_dict()
    return {"weights": weights, "optimizer": optimizer, "scaler": scale, "ema": averaged}


def checkpoint_content(
    live: dict[str, Any],
    parts: list[dict[str, Any]],
    meta: dict[str, Any],
    copier: strategies.Copier,
) -> Content:
    copies = copier.copy(live)
    weights, averaged = copies.pop("weights"), copies.pop("ema")
    return Content(weights, copies | {"ranks": parts}, meta, averaged)


def restore_state(worker: Worker, content: Content | None) -> list[dict[str, Any]]:
    """Load a checkpoint into model, optimiser and the rest; returns each rank's part. Collective."""
    weights, state = (content.weights, content.state) if content else ({}, {"optimizer": None})
    strategies.load_full_state(worker.model, worker.optimizer, weights, state["optimizer"])
    if worker.ema is not None:
        # A checkpoint without averaged weights: averaging starts from its weights.
        averaged = content.ema if content else None
        strategies.load_full_state(worker.ema.module, None, averaged or weights, None)
    small = strategies.from_rank({k: v for k, v in state.items() if k != "optimizer"})
    if worker.scaler is not None and small["scaler"]:
        worker.scaler.load_state_dict(small["scaler"])
    ranks: list[dict[str, Any]] = small["ranks"]
    return ranks


def carried_progress(
    worker: Worker, meta: dict[str, Any], ranks: list[dict[str, Any]]
) -> Progress | None:
    """This rank's progress in the epoch that the checkpoint interrupted, if any.

    With the same number of ranks, every rank continues with its own sums; otherwise the mean over records
    is kept, and rank 0 has the keys of all. Steps are counted in global batches of the present size.
    """
    steps, before = int(meta["epoch_steps"]), len(ranks)
    if not steps:
        return None
    samples = int(meta["epoch_samples"])
    if before == worker.world_size:
        own = ranks[worker.rank]
        loss_sum, rows, keys = own["loss_sum"], own["loss_rows"], list(own["keys"])
    else:
        counted = sum(part["loss_rows"] for part in ranks)
        mean = sum(part["loss_sum"] for part in ranks) / max(counted, 1)
        rows = max(1, samples // worker.world_size)
        loss_sum = mean * rows
        keys = [key for part in ranks for key in part["keys"]] if worker.rank == 0 else []
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
