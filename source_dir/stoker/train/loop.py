"""Train worker: the training loop; one step is written out in `train_epoch`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stoker.config.schema import Config
from stoker.errors import Failure
from stoker.events import kinds
from stoker.events.summary import number
from stoker.hosts import machine
from stoker.recipe import SOURCE_FOLDER, class_names_of, load_recipe
from stoker.serve.blocks.client import open_transport
from stoker.serve.blocks.collator import Collator
from stoker.storage.checkpoint_store import open_store, refuse_unwritable
from stoker.train.build import build, learning_rate
from stoker.train.evaluation import Evaluation, sample_of, tell_once, try_validation
from stoker.train.export import export_model, keep_example
from stoker.train.feed import Feed
from stoker.train.manager import CheckpointManager, begin, check_scale, nothing_left
from stoker.train.state import (
    Progress,
    Tee,
    Worker,
    check_finite,
    mean_over_ranks,
    reached,
    reconcile,
)
from stoker.train.step import Step, windows
from stoker.train.stop_gate import StopGate

LEFT_OUT = (
    "the last batch of an epoch would have one record per train worker, and is left out;"
    " data.remainder=1 trains it, data.remainder=pad repeats records"
)


def train_worker(settings: dict[str, Any]) -> None:
    try:
        train(settings)
    except Exception as error:
        raise Failure.of(error).error() from error


def train(settings: dict[str, Any]) -> None:
    """Run all epochs, from the initial weights to the saved model; settings: see `RecipeWork`."""
    import ray
    import ray.train.torch

    context = ray.train.get_context()
    config: Config = settings["config"]
    worker = Worker(
        config=config,
        recipe=load_recipe(config.recipe, config.params, SOURCE_FOLDER),
        coordinator=settings["coordinator"],
        attempt=0,
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        device=ray.train.torch.get_device(),
        clock=settings["clock"],
    )
    worker.classes = class_names_of(worker.recipe, settings["classes"])
    if worker.rank == 0:
        sys.stdout = Tee(sys.stdout, worker)
    threads = config.train.threads or max(1, machine.cores() // context.get_local_world_size())
    torch.set_num_threads(threads)
    node = ray.get_runtime_context().get_node_id()
    worker.log(kinds.TrainWorkerStarted(rank=worker.rank, node=node), every_rank=True)
    worker.log(kinds.PhaseDone(phase="train workers started"))
    keeper = CheckpointManager(
        worker, open_store(*settings["checkpoints"]), settings["service_job"]
    )
    try:
        if worker.rank == 0:  # which may be on another host than the head
            refuse_unwritable(keeper.store.where, "checkpoint.dir")
            refuse_unwritable(settings["model_dir"], "model")
        resumed = begin(worker, keeper, settings["resume"])
        worker.gate = StopGate(worker.coordinator, worker.attempt, worker.rank)
        build(worker, settings["records"], resumed)
        worker.log(kinds.PhaseDone(phase="model built"))
        if resumed is None and settings["sample"]:
            _, notes = try_validation(worker, sample_of(config, worker.recipe, *settings["sample"]))
            tell_once(worker, notes)
        carried = keeper.restore(resumed) if resumed else None
        first = resumed.meta["next_epoch"] if resumed else 0
        asked = run_epochs(worker, keeper, first, carried, settings["has_val"])
        if worker.rank == 0:
            keeper.write_model(Path(settings["model_dir"]))
            # Skip the export after an early stop: the instance may be reclaimed.
            if not asked:
                export_model(worker, Path(settings["model_dir"]))
                # A stop that arrives later has nothing left to interrupt.
                worker.log(kinds.Completed())
    finally:
        if worker.gate is not None:
            worker.gate.close()
        keeper.close()
        worker.flush()


def run_epochs(
    worker: Worker, keeper: CheckpointManager, first: int, carried: Progress | None, has_val: bool
) -> bool:
    """Run the epochs from `first` on, each with its validation; returns whether the run was asked to stop."""
    import ray.train

    asked, stop = False, ""
    if keeper.pending is not None:
        stop, asked = close_epoch(worker, keeper, keeper.pending, carried, has_val)
    stop = stop or nothing_left(worker, keeper, first)
    for epoch in range(first, worker.config.train.epochs):
        if stop:
            break
        progress = carried if carried and carried.epoch == epoch else Progress(epoch)
        metrics, stop, books = train_epoch(worker, keeper, progress)
        # A stop requested with the very last step changes nothing.
        asked = bool(progress.feed.stop) and not reached(worker)
        if asked:
            if progress.steps > progress.carried_steps:  # else the last checkpoint is of this step
                keeper.take(progress, {})
            break
        trained = {"epoch": epoch, "metrics": metrics, "books": books, "whole": books[0]["whole"]}
        if has_val:
            keeper.take(Progress(epoch + 1) if trained["whole"] else progress, {}, pending=trained)
        later, asked = close_epoch(worker, keeper, trained, progress, has_val)
        stop = later or stop
        ray.train.report(metrics)
    if stop:
        worker.log(kinds.Stopped(reason=stop))
    return asked


def close_epoch(
    worker: Worker,
    keeper: CheckpointManager,
    trained: dict[str, Any],
    progress: Progress | None,
    has_val: bool,
) -> tuple[str, bool]:
    """Finish an epoch: validate, and add the metrics to the checkpoint.

    Returns:
        (why training should stop or "", whether a stop was requested, so that validation is still pending).
    """
    epoch, metrics, books = trained["epoch"], trained["metrics"], trained["books"]
    if has_val:
        more, counts, stop = validate(worker, epoch)
        if stop:
            return stop, True
        metrics, books = metrics | more, [*books, counts]
    shown = {name: number(value) for name, value in metrics.items()}  # JSON has no NaN
    event = kinds.EpochEnded(epoch=epoch, step=worker.step, metrics=shown, whole=trained["whole"])
    worker.log(event)
    return keeper.after_epoch(epoch, metrics, books, None if trained["whole"] else progress), False


def train_epoch(
    worker: Worker, keeper: CheckpointManager, progress: Progress
) -> tuple[dict[str, float], str, list[dict[str, Any]]]:
    """(metrics by conventional name, why the run should stop within the epoch or "", the epoch's books)."""
    worker.model.train()
    epoch = progress.epoch
    feed = progress.feed = progress.feed or open_pass(worker, "train", epoch)
    feed.keys += progress.carried_keys
    log_every = worker.config.tracking.log_every_steps
    if progress.loss_sum is None:
        # Summed on the device: reading it in every step would stall the GPU.
        progress.loss_sum = torch.zeros((), dtype=torch.float64, device=worker.device)
    step, worker.feed_step = Step(worker), 0
    if worker.schedule is not None:
        worker.schedule.begin(epoch, progress.carried_samples, worker.step)
    started = time.perf_counter()
    for window in windows(feed, worker.config.train.accumulate_steps):
        for batch in window:
            keep_example(worker, "train", batch)
            step.accumulate(batch)
        step.update()

        progress.loss_sum += step.loss * step.rows
        progress.loss_rows += step.rows
        progress.steps += 1
        progress.samples = progress.carried_samples + (feed.rows - feed.padded) * worker.world_size
        if worker.step == 1 or progress.steps % log_every == 0:
            check_finite(float(progress.loss_sum), worker, epoch)
            check_scale(worker, epoch)
            rate = learning_rate(worker.optimizer)
            # Not finite if fp16 overflowed in this step.
            norm = None if step.grad_norm is None else number(float(step.grad_norm))
            log_step(
                worker, progress, feed, started, loss=float(step.loss), lr=rate, grad_norm=norm
            )
        if reached(worker):
            break
        keeper.after_step(progress)
    elapsed = time.perf_counter() - started
    samples = progress.samples - progress.carried_samples
    stop = f"train.max_steps reached at step {worker.step}" if reached(worker) else feed.stop
    books = []
    if reached(worker) or not stop:
        books = [reconcile(worker, feed)]
        worker.samples += books[0]["trained"] if books[0]["whole"] else 0
        dropped = worker.config.data.remainder == "drop" and books[0]["whole"]
        if dropped and books[0]["remainder"] >= worker.world_size:
            tell_once(worker, [LEFT_OUT])
    wait_s = log_pass(worker, feed, samples, elapsed, progress.steps - progress.carried_steps)
    mean_loss = mean_over_ranks(worker, progress.loss_sum / max(progress.loss_rows, 1))
    check_finite(mean_loss, worker, epoch)
    metrics = {
        "train/loss": mean_loss,
        "lr": learning_rate(worker.optimizer),
        "perf/samples_per_s": samples / elapsed,
        "perf/input_wait_pct": 100 * wait_s / elapsed,
    }
    return metrics, stop, books


def validate(worker: Worker, epoch: int) -> tuple[dict[str, float], dict[str, Any], str]:
    """(metrics over all ranks, books, ""); or empty dicts, and why the run should stop now."""
    feed = open_pass(worker, "val", epoch)
    started = time.perf_counter()
    evaluation = Evaluation(worker, epoch)
    with evaluation.quietly():
        for batch in feed:
            keep_example(worker, "val", batch)
            evaluation.take(batch)
    if feed.stop:
        return {}, {}, feed.stop
    books = reconcile(worker, feed)
    log_pass(worker, feed, feed.rows * worker.world_size, time.perf_counter() - started, 0)
    values = evaluation.result()
    evaluation.tell()
    return values, books, ""


def open_pass(worker: Worker, split: str, epoch: int) -> Feed:
    data = worker.config.data
    worker.transport = worker.transport or open_transport(worker.coordinator, data, worker.device)
    collator = None
    if worker.recipe.collates:
        job = worker.config, split, epoch, worker.world_size
        collator = Collator(*job, worker.transport, worker.coordinator)
    return Feed(
        coordinator=worker.coordinator,
        attempt=worker.attempt,
        split=split,
        epoch=epoch,
        rank=worker.rank,
        before=worker.step,
        device=worker.device,
        transport=worker.transport,
        data=data,
        gate=worker.gate,
        accumulate=worker.config.train.accumulate_steps if split == "train" else 1,
        keep_keys=worker.config.tracking.record_ids,
        collator=collator,
    )


def log_step(worker: Worker, progress: Progress, feed: Feed, started: float, **values: Any) -> None:
    worker.log(
        kinds.StepLogged(
            epoch=progress.epoch,
            step=worker.step,
            epoch_samples=progress.samples - progress.carried_samples,
            elapsed_s=time.perf_counter() - started,
            **feed.times.waits(),
            batches=worker.feed_step,
            terms_ms=feed.times.since_told(),
            **values,
        )
    )


def log_pass(worker: Worker, feed: Feed, samples: int, elapsed_s: float, steps: int) -> float:
    """Returns how long the train worker waited that waited longest. Collective.

    The others wait for it when gradients are averaged, which each counts as its own computing.
    """
    ranks = [feed.times.figures()] * worker.world_size
    if worker.world_size > 1:
        dist.all_gather_object(ranks, ranks[0])
    times = max(ranks, key=lambda of: of["wait_s"])
    worker.log(
        kinds.PassEnded(
            split=feed.split,
            epoch=feed.epoch,
            samples=samples,
            elapsed_s=elapsed_s,
            steps=steps,
            step_ms=list(feed.times.step_ms) if steps else [],
            times=times,
        )
    )
    return float(times["wait_s"])
