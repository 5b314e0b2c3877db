"""Head: the work of a run's train workers and the actor that serves them; for a recipe, its data."""

from __future__ import annotations

import time
from typing import Any, Protocol

from stoker.config.schema import Config
from stoker.events.sinks import Tracking
from stoker.figures import count_of
from stoker.place import Place
from stoker.serve.opening import Data, cache_note, exact_note, start_coordinator
from stoker.sizing.scaler import Scaler
from stoker.train import resume as resuming
from stoker.train.shared_storage import refuse_unshared
from stoker.train.training_checks import blocks_note, plan_workers, refuse_single_records, steps_per_epoch


class Work(Protocol):
    """Head: the differences between runs of a recipe and of a script."""

    config: Config
    workers: int
    use_gpu: bool
    where: str
    """Folder or URI of the run's checkpoints."""
    synced: bool
    """Whether SageMaker syncs that folder to S3."""
    steps_per_epoch: int | None
    loop: str
    """`module:function` that every train worker runs."""
    torch_config: str
    """`module:class` with which Ray Train sets up the group of train workers."""

    def start_coordinator(self) -> Any:
        """Start the actor that train workers talk to."""
        ...

    def opening_line(self) -> str:
        """A line shown during start-up."""
        ...

    def notes(self) -> list[str]:
        """Remarks to log before training."""
        ...

    def settings(self) -> dict[str, Any]:
        """Settings for the loop, in addition to the configuration and the coordinator."""
        ...

    def leaves_model(self) -> bool:
        """Whether a successful run leaves a model in its model folder."""
        ...


class RecipeWork:
    """Head: train a recipe on its opened data.

    Raises:
        UsageError: too many workers, too large batches, or no checkpoint to resume from.
    """

    loop = "stoker.train.loop:train_worker"
    torch_config = "stoker.train.rendezvous:RecipeConfig"

    def __init__(self, config: Config, data: Data, place: Place, tracking: Tracking) -> None:
        self.config, self.data, self.place = config, data, place
        self.workers, self.use_gpu = plan_workers(config, data)
        refuse_single_records(config, data, self.workers)
        self.steps_per_epoch = steps_per_epoch(config, data.totals["train"], self.workers)
        self.start = resuming.prepare(config, place, data, self.workers, tracking.summary, tracking.note)
        self.summary = tracking.summary
        self.where, self.synced = self.start.where, self.start.synced
        refuse_unshared(config, self.where, place.train_group, self.use_gpu)

    def start_coordinator(self) -> Any:
        start, scaling = self.start, self.config.cluster.cpu_hosts
        scaler = Scaler(scaling) if scaling.max else None
        return start_coordinator(
            self.config, self.data, self.workers, start.first_epoch, start.position, scaler
        )

    def opening_line(self) -> str:
        counts = [f"{'unknown' if n is None else f'{n:,}'} {split}" for split, n in self.data.totals.items()]
        kind = "GPU" if self.use_gpu else "CPU"
        workers = count_of(self.workers, f"{kind} train worker")
        return f"{' + '.join(counts)} records; starting {workers} …"

    def notes(self) -> list[str]:
        config, data = self.config, self.data
        found = blocks_note(config, data, self.workers), cache_note(config), exact_note(config, data)
        return [*filter(None, found), *data.notes()]

    def settings(self) -> dict[str, Any]:
        return {
            "checkpoints": (self.where, self.synced),
            "resume": self.start.chosen,
            "model_dir": str(self.place.model_dir),
            "mounted": self.place.lasting is not None,
            "records": self.data.totals["train"],
            "has_val": "val" in self.data.totals,
            "sample": self.data.samples.get("val"),
            "clock": (self.summary.started, time.time() - self.summary.earlier_s),
            "classes": self.data.sources["train"].classes(),
        }

    def leaves_model(self) -> bool:
        return True
