"""Train worker: which checkpoints are kept, continued from, and made into the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from stoker.config import UsageError
from stoker.schema import Config
from stoker.tracking.summary import less_is_better
from stoker.training import checkpoint, strategies
from stoker.training.worker import Worker


def keep_checkpoint(worker: Worker, folder: Path, epoch: int, metrics: dict[str, float]) -> None:
    """Train worker: rank 0 writes the checkpoint of an epoch and marks the best one."""
    weights, optimizer = strategies.full_state(worker.model, worker.optimizer)
    if worker.rank:
        return
    name, sign = monitored(worker.config, metrics)
    meta = {"epoch": epoch, "step": worker.step, "samples": worker.samples, "metrics": metrics}
    state = {
        "optimizer": optimizer,
        "scheduler": worker.scheduler.state_dict() if worker.scheduler else None,
    }
    saved = checkpoint.save(folder, worker.step, weights, state, meta)
    note = checkpoint.best(folder)
    if name in metrics and (note is None or sign * metrics[name] > sign * note["value"]):
        checkpoint.mark_best(folder, saved, name, metrics[name])
    checkpoint.prune(folder, worker.config.checkpoint.keep)
    worker.log("checkpoint", epoch=epoch, step=worker.step, path=str(saved.path))


def restore(worker: Worker, saved: checkpoint.Checkpoint) -> None:
    """Train worker: continue from a checkpoint, which rank 0 reads for all: only its host may have it."""
    import torch.distributed as dist

    weights, state = checkpoint.load(saved) if worker.rank == 0 else ({}, {})
    strategies.load_full_state(worker.model, worker.optimizer, weights, state.pop("optimizer", None))
    rest: list[Any] = [state]
    if worker.world_size > 1:
        dist.broadcast_object_list(rest, src=0)
    if worker.scheduler and rest[0]["scheduler"]:
        worker.scheduler.load_state_dict(rest[0]["scheduler"])
    worker.step, worker.samples = saved.meta["step"], saved.meta["samples"]
    worker.log("resumed", epoch=saved.meta["epoch"] + 1, step=worker.step, path=str(saved.path))


def write_model(worker: Worker, folder: Path, target: Path) -> None:
    """Train worker: the best checkpoint's weights become the run's model."""
    note = checkpoint.best(folder)
    path = folder / note["checkpoint"] if note else None
    if path is None or checkpoint.verify(path):
        newest = checkpoint.newest_valid(folder)
        if newest is None:
            raise OSError(f"{folder}: holds no whole checkpoint to make the model from")
        path = newest.path
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path / "model.safetensors", target / "model.safetensors")
    meta = json.loads((path / "meta.json").read_text())
    about = {"recipe": worker.config.recipe, "params": worker.config.params, "checkpoint": path.name, **meta}
    (target / "model.json").write_text(json.dumps(about, indent=1, default=str))
    worker.log("model", path=str(target), checkpoint=path.name)


def monitored(config: Config, metrics: dict[str, float]) -> tuple[str, int]:
    """Train worker: (name of the metric that chooses the best, +1 where more is better).

    Raises:
        UsageError: `checkpoint.monitor` names no metric of this run.
    """
    name = config.checkpoint.monitor
    if name == "auto":
        name = next((n for n in ("val/acc1", "val/loss") if n in metrics), "train/loss")
    elif name not in metrics and any(key.startswith("val/") for key in metrics):
        raise UsageError(f"checkpoint.monitor: no metric {name!r}; there are: {', '.join(metrics)}")
    mode = config.checkpoint.mode
    if mode == "auto":
        mode = "min" if less_is_better(name) else "max"
    return name, 1 if mode == "max" else -1
