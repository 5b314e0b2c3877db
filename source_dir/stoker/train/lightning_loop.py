"""Train worker: runs lightning.Trainer as the loop, with Stoker's batches, checkpoints and events."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import ray.train
import torch
from ray.train.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)

from stoker.train.export import keep_example
from stoker.train.feed import EpochFeed
from stoker.train.loop import log_pass, log_step, open_pass
from stoker.train.manager import CheckpointManager
from stoker.train.state import Worker, check_finite, count_records, mean_over_ranks, reconcile
from stoker.train.train_state import Progress


def build(worker: Worker) -> None:
    """Train worker: set up the unwrapped module; the trainer wraps it in DDP."""
    worker.model = worker.recipe.model().to(worker.device)


def run_epochs(
    worker: Worker, keeper: CheckpointManager, first: int, carried: Progress | None, has_val: bool
) -> bool:
    """Train worker: run all epochs with Lightning.

    Args:
        worker: its model is the LightningModule.
        keeper: the run's checkpoints.
        first, carried: unused; a resumed run is refused before it starts.
        has_val: whether there is a validation split.

    Returns:
        Whether a stop was requested.
    """
    config, module = worker.config, worker.model
    reports = Reports(worker, keeper)
    recipe: Any = worker.recipe
    trainer = pl.Trainer(
        max_epochs=config.train.epochs,
        max_steps=config.train.max_steps or -1,
        accelerator="gpu" if worker.device.type == "cuda" else "cpu",
        devices="auto" if worker.device.type == "cuda" else 1,
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[reports],
        logger=recipe.loggers() if worker.rank == 0 else [],
        log_every_n_steps=config.tracking.log_every_steps,
        num_sanity_val_steps=0,
        limit_val_batches=None if has_val else 0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        **{"enable_progress_bar": False, "enable_model_summary": False} | recipe.trainer,
    )
    reports.trainer = trainer = prepare_trainer(trainer)
    trainer.fit(module, TrainBatches(reports), [ValBatches(reports)] if has_val else None)
    if reports.stop:
        worker.log("stopped", reason=reports.stop)
    elif trainer.current_epoch < config.train.epochs:
        worker.log("stopped", reason="requested by the module's callbacks")
    return reports.asked


class Given(NamedTuple):
    """Train worker: position of the feed at a batch; Lightning fetches one batch ahead."""

    rows: int
    padded: int
    id_sum: int
    keys: list[str]
    stop: str
    checkpoint: bool


class TrainBatches:
    """Train worker: the training batches of each epoch, as Lightning's dataloader."""

    def __init__(self, reports: Reports) -> None:
        self.reports = reports

    def __iter__(self) -> Iterator[Any]:
        reports = self.reports
        feed = reports.open_epoch()
        for columns in feed:
            keep_example(reports.worker, "train", columns)
            keys = list(feed.keys) if feed.keep_keys else []
            seen = Given(feed.rows, feed.padded, feed.id_sum, keys, feed.stop, feed.checkpoint)
            reports.given.append(seen)
            yield reports.batch_of("train", columns)
        reports.exhausted = not feed.stop


class ValBatches:
    """Train worker: this rank's share of the validation records."""

    def __init__(self, reports: Reports) -> None:
        self.reports = reports

    def __iter__(self) -> Iterator[Any]:
        reports = self.reports
        if reports.stop:
            return  # Lightning validates once more when it stops within an epoch
        reports.val = feed = open_pass(reports.worker, "val", reports.progress.epoch)
        for columns in feed:
            if count_records(columns):
                yield reports.batch_of("val", columns)
        # Stop here and not after the previous batch, so that all ranks end at the same batch.
        reports.cut = reports.stop = feed.stop


class Reports(RayTrainReportCallback):  # type: ignore[misc]
    """Train worker: maps Lightning's hooks to the run's events, checkpoints and accounting.

    Like Ray's callback, it reports every epoch to Ray Train; checkpoints go to the job's checkpoint folder.
    """

    def __init__(self, worker: Worker, keeper: CheckpointManager) -> None:
        super().__init__()
        self.worker, self.keeper = worker, keeper
        self.trainer: pl.Trainer | None = None
        self.progress = Progress(0)
        self.train: EpochFeed | None = None
        self.val: EpochFeed | None = None
        self.given: deque[Given] = deque()
        self.rows = 0
        """Rows that this rank has trained in this pass."""
        self.exhausted = False
        self.books: list[dict[str, Any]] = []
        self.stop = ""
        self.cut = ""
        """Why validation was interrupted."""
        self.asked = False
        self.started = self.elapsed = 0.0

    def batch_of(self, split: str, columns: dict[str, Any]) -> Any:
        """Convert columns on the device to the batch of the module's steps."""
        recipe: Any = self.worker.recipe
        return recipe.batch_of(self.worker.modules[split](columns))

    def open_epoch(self) -> EpochFeed:
        """Open the feed of the next epoch."""
        assert self.trainer is not None  # noqa: S101 - set before fit
        epoch = self.trainer.current_epoch
        self.progress = Progress(epoch)
        self.progress.loss_sum = torch.zeros((), dtype=torch.float64, device=self.worker.device)
        self.train, self.val = open_pass(self.worker, "train", epoch), None
        self.given.clear()
        self.worker.feed_step = self.rows = 0
        self.exhausted, self.books = False, []
        self.started = time.perf_counter()
        return self.train

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        worker, progress, given = self.worker, self.progress, self.given.popleft()
        worker.step = trainer.global_step
        progress.feed = given
        progress.steps += 1
        worker.feed_step += 1
        progress.samples = (given.rows - given.padded) * worker.world_size
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        rows, self.rows = given.rows - self.rows, given.rows
        if loss is not None:  # None with manual optimisation
            if module.automatic_optimization:
                loss = loss.detach() * trainer.accumulate_grad_batches  # undo Lightning's division
            progress.loss_sum += loss.detach() * rows
            progress.loss_rows += rows
        if progress.steps == 1 or progress.steps % worker.config.tracking.log_every_steps == 0:
            assert self.train is not None  # noqa: S101 - set before fit
            mean = float(progress.loss_sum) / max(progress.loss_rows, 1)
            check_finite(mean, worker, progress.epoch)
            shown = mean if loss is None else float(loss.detach())
            log_step(worker, progress, self.train, self.started, loss=shown, lr=learning_rate(trainer))
        limit = worker.config.train.max_steps
        if given.stop or (worker.step == limit and not self.exhausted):
            # Stop here: at the end of the epoch, Lightning would count it as done.
            self.asked = worker.step != limit
            self.stop = given.stop if self.asked else f"train.max_steps reached at step {worker.step}"
            trainer.should_stop = True
            self.keeper.take(progress, {})

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._reconcile_train()
        _sync_buffers(trainer, False)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        _sync_buffers(trainer, True)
        if self.cut:
            self.asked = trainer.should_stop = True
        elif self.val is not None:
            self.books.append(reconcile(self.worker, self.val))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        worker, progress = self.worker, self.progress
        if self.stop and not self.cut:
            return
        self._reconcile_train()
        # Discard the results of an interrupted validation.
        logged = {} if self.cut else trainer.callback_metrics
        metrics = {conventional(name): float(value) for name, value in logged.items()}
        loss = mean_over_ranks(worker, progress.loss_sum / max(progress.loss_rows, 1))
        check_finite(loss, worker, progress.epoch)
        assert self.train is not None  # noqa: S101 - set before fit
        metrics = {"train/loss": loss, "lr": learning_rate(trainer)} | metrics
        metrics["perf/samples_per_s"] = progress.samples / self.elapsed
        metrics["perf/input_wait_pct"] = 100 * self.train.times.wait_s / self.elapsed
        worker.log("epoch", epoch=progress.epoch, step=worker.step, metrics=metrics)
        worker.samples += progress.samples
        reason = ""
        if self.cut:
            worker.log("note", text=f"epoch {progress.epoch + 1} was not validated: {self.cut}")
            self.keeper.add_epoch(progress.epoch, metrics, self.books)
            self.keeper.take(Progress(progress.epoch + 1), {})
        else:
            reason = self.keeper.after_epoch(progress.epoch, metrics, self.books)
        if reason:
            self.stop, trainer.should_stop = reason, True
        ray.train.report(metrics)

    def _reconcile_train(self) -> None:
        """After the last batch of an epoch: close the accounting and report the figures of the pass."""
        if self.train is None or not self.exhausted or self.books:
            return
        self.elapsed = time.perf_counter() - self.started
        self.keeper.before_settling()
        self.books.append(reconcile(self.worker, self.train))
        progress = self.progress
        log_pass(self.worker, self.train, progress.samples, self.elapsed, progress.steps)


def conventional(name: str) -> str:
    """Train worker: rename Lightning-style `val_loss` to `val/loss`, the name that runs are compared by."""
    return re.sub(r"^(?:(train)|val|valid|validation)[_/]", lambda m: f"{m[1] or 'val'}/", name)


def learning_rate(trainer: pl.Trainer) -> float:
    """Train worker: learning rate of the first parameter group of the first optimiser."""
    return float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else 0.0


def _sync_buffers(trainer: pl.Trainer, on: bool) -> None:
    """Toggle DDP's buffer broadcast, which deadlocks ranks that validate different numbers of batches."""
    model = trainer.strategy.model
    if hasattr(model, "require_forward_param_sync"):
        model.require_forward_param_sync = on
