"""Head: the work of a run's train workers and the actor that serves them; for a recipe, its data."""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping
from typing import Any

from stoker.config.schema import Config, TrainConfig
from stoker.errors import Problems, UsageError
from stoker.events.sinks import Tracking
from stoker.figures import count_of
from stoker.place import RunPlace
from stoker.recipe import Recipe, several_labels
from stoker.serve.opening import Data, cache_note, start_coordinator
from stoker.train.resume import find_start
from stoker.train.stopping import check_monitors, modes, with_modes


class RecipeWork:
    loop = "stoker.train.loop:train_worker"
    torch_config = "stoker.train.trainer:RecipeConfig"

    def __init__(self, config: Config, data: Data, place: RunPlace, tracking: Tracking) -> None:
        config = with_modes(config, data.recipe)
        tracking.summary.metrics.modes = modes(config, data.recipe)
        self.config, self.data, self.place = config, data, place
        import ray

        self.workers, self.use_gpu = count_workers(config, ray.cluster_resources())
        refuse_large_batches(config.train, data.totals["train"], self.workers)
        refuse_unknown_length(config.train, data.totals["train"])
        store, self.start = find_start(
            config, place, data, self.workers, tracking.summary, tracking.note
        )
        self.summary = tracking.summary
        self.where, self.synced = store.where, store.synced

    def start_coordinator(self) -> Any:
        start = self.start
        first, position = (start.meta["next_epoch"], start.position) if start else (0, None)
        return start_coordinator(self.config, self.data, self.workers, first, position)

    def opening_line(self) -> str:
        counts = [
            f"{'unknown' if n is None else f'{n:,}'} {split}"
            for split, n in self.data.totals.items()
        ]
        kind = "GPU" if self.use_gpu else "CPU"
        workers = count_of(self.workers, f"{kind} train worker")
        return f"{' + '.join(counts)} records; starting {workers} …"

    def notes(self) -> list[str]:
        return [*filter(None, [cache_note(self.config)]), *self.data.notes()]

    def settings(self) -> dict[str, Any]:
        """What `loop.train` takes besides the configuration and the coordinator."""
        start = self.start
        return {
            "checkpoints": (self.where, self.synced),
            "resume": start and (start.store.where, start.store.synced, start.name),
            "service_job": self.place.job,
            "model_dir": str(self.place.model_dir),
            "records": self.data.totals["train"],
            "has_val": "val" in self.data.totals,
            "sample": self.data.samples.get("val"),
            "clock": (self.summary.started, time.time() - self.summary.earlier_s),
            "classes": self.data.sources["train"].classes(),
        }

    def leaves_model(self) -> bool:
        return True


def check_optimizer(name: str) -> None:
    from timm.optim import list_optimizers  # takes seconds

    known = sorted(list_optimizers())
    if name.lower() not in known:
        close = difflib.get_close_matches(name.lower(), known, n=3)
        hint = (
            f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(known[:12])}, …"
        )
        raise UsageError(f"train.optimizer: timm has no optimiser {name!r}; {hint}")


def refuse_impossible(recipe: Recipe, train: TrainConfig) -> None:
    name, problems = type(recipe).__name__, []
    if type(recipe).training_step is not Recipe.training_step:
        for key in ("label_smoothing", "mixup", "cutmix"):
            if getattr(train, key):
                problems.append(
                    f"train.{key}: {name} defines training_step, which computes the loss and targets; apply"
                    " it there, or leave training_step out"
                )
    if type(recipe).optimizer is not Recipe.optimizer:
        own = {"layer_decay": train.layer_decay, "scale_lr": train.scale_lr != "none"}
        for key, value in own.items():
            if value:
                problems.append(
                    f"train.{key}: {name} creates its own optimiser; set it there, or leave optimizer() out"
                )
    if problems:
        raise UsageError(*problems)


def count_workers(config: Config, resources: Mapping[str, float]) -> tuple[int, bool]:
    """(train workers, whether they use GPUs): one per GPU, or `train.workers` without GPUs."""
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    wanted = config.train.workers or 0
    if gpus and wanted > gpus:
        raise UsageError(f"train.workers: {wanted} workers need as many GPUs; found {gpus}")
    if not gpus and wanted > max(cpus, 2):
        raise UsageError(f"train.workers: {wanted} workers need as many CPUs; found {cpus}")
    return wanted or gpus or 1, gpus > 0


def refuse_unfit(config: Config, recipe: Recipe, totals: dict[str, int | None]) -> None:
    """Refuse settings that do not fit the data, for the fewest train workers that the run may have."""
    problems, workers = Problems(), config.train.workers or 1
    with problems:
        refuse_large_batches(config.train, totals["train"], workers)
    with problems:
        refuse_unknown_length(config.train, totals["train"])
    with problems:
        check_monitors(config, recipe, "val" in totals)
    with problems:
        refuse_mixing(config.train, recipe)
    problems.refuse()


def refuse_mixing(train: TrainConfig, recipe: Recipe) -> None:
    given = [
        f"train.{key}" for key in ("label_smoothing", "mixup", "cutmix") if getattr(train, key)
    ]
    if given and several_labels(recipe):
        raise UsageError(f"{', '.join(given)}: the images may have several labels; leave it out")


def refuse_large_batches(train: TrainConfig, total: int | None, workers: int) -> None:
    if total is not None and train.batch_size * workers * train.accumulate_steps > total:
        batches = (
            f" × {train.accumulate_steps} accumulate_steps" if train.accumulate_steps > 1 else ""
        )
        raise UsageError(
            f"train.batch_size: {train.batch_size} records × {count_of(workers, 'train worker')}{batches}"
            f" exceed the {total} training records; lower it"
        )


def refuse_unknown_length(train: TrainConfig, total: int | None) -> None:
    if total is not None:
        return
    if train.scheduler != "none" and train.max_steps is None:
        key, remedy = f"train.scheduler: {train.scheduler}", "set train.max_steps, or use none"
    elif train.warmup_epochs:
        key, remedy = "train.warmup_epochs:", "use 0"
    else:
        return
    raise UsageError(
        f"{key} needs the number of records, which this source does not know before reading them; {remedy}"
    )
