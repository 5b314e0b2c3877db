"""The learning rate follows the share of the whole training that is done, whatever a step holds.

A training is interrupted, saved and gone on from with another number of train workers, through the state
that the loop saves; every step's rate is compared with the curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_step import Linear

from stoker.checkpoints import format as checkpoint
from stoker.config.schema import Config
from stoker.storage.checkpoint_store import open_store
from stoker.train import state as snapshot
from stoker.train import strategies
from stoker.train.build import build, learning_rate
from stoker.train.state import Progress, Worker
from stoker.train.step import Step

pytestmark = pytest.mark.long

RECORDS, BATCH, EPOCHS = 64, 4, 10
LR = 0.1
Point = tuple[float, float]
"""(epochs done, rate of the step that follows)."""


class Training:
    def __init__(self, workers: int, recipe: Any = None, **train: Any) -> None:
        options = {
            "epochs": EPOCHS,
            "batch_size": BATCH,
            "lr": LR,
            "momentum": 0.9,
            "scheduler": "cosine",
        }
        config = Config.model_validate({"train": {**options, **train}})
        self.worker = Worker(config, recipe or Linear(), None, 0, 0, workers, torch.device("cpu"))
        build(self.worker, RECORDS)
        self.points: list[Point] = []

    def run(self, upto: float, first: Progress | None = None) -> Progress:
        """As the loop does it, until so many epochs are done; the last batch of an epoch may be short."""
        worker, progress = self.worker, first or Progress(0)
        batch = {
            "image": torch.zeros(BATCH, 1, 8, 8),
            "label": torch.zeros(BATCH, dtype=torch.long),
        }
        while True:
            step = Step(worker)
            assert worker.schedule is not None
            worker.schedule.begin(progress.epoch, progress.carried_samples, worker.step)
            while RECORDS - progress.samples >= worker.world_size:
                done = progress.epoch + progress.samples / RECORDS
                if done >= upto:
                    return progress
                self.points.append((done, learning_rate(worker.optimizer)))
                for _ in range(worker.config.train.accumulate_steps):
                    left = (RECORDS - progress.samples) // worker.world_size
                    if left:
                        rows = min(BATCH, left)
                        step.accumulate({name: column[:rows] for name, column in batch.items()})
                        progress.samples += rows * worker.world_size
                step.update()
                progress.steps += 1
            progress = Progress(progress.epoch + 1)
            if progress.epoch >= upto:
                return progress

    def save(self, folder: Path, progress: Progress) -> checkpoint.Checkpoint:
        worker = self.worker
        parts = [snapshot.rank_part(worker, progress) for _ in range(worker.world_size)]
        meta = {
            "step": worker.step,
            "next_epoch": progress.epoch,
            "epoch_steps": progress.steps,
            "epoch_samples": progress.samples,
            "global_batch": worker.global_batch,
            "monitored": None,
        }
        live = snapshot.live_state(worker)
        content = snapshot.checkpoint_content(live, parts, meta, strategies.Copier())
        return checkpoint.save(open_store(str(folder)), content)

    def go_on(self, saved: checkpoint.Checkpoint, upto: float = 99) -> None:
        self.worker.world_size, workers = (
            1,
            self.worker.world_size,
        )  # no process group to share it in
        ranks = snapshot.restore_state(self.worker, checkpoint.load_checkpoint(saved))
        self.worker.world_size = workers
        self.worker.step = saved.meta["step"]
        carried = snapshot.carried_progress(self.worker, saved.meta, ranks)
        self.run(
            min(upto, self.worker.config.train.epochs),
            carried or Progress(saved.meta["next_epoch"]),
        )


CURVES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done / EPOCHS)),
    "linear": lambda done: 1 - done / EPOCHS,
    "step": lambda done: 0.1 ** (3 * done // EPOCHS),
    "none": lambda done: 1.0,
}


@pytest.mark.parametrize(
    ("before", "after", "scheduler", "scale", "at"),
    [
        (8, 4, "cosine", "none", 5.0),
        (8, 4, "cosine", "linear", 5.5),
        (4, 8, "cosine", "none", 5.5),
        (4, 8, "cosine", "linear", 5.0),
        (8, 8, "cosine", "linear", 5.5),
        (8, 3, "linear", "sqrt", 5.5),
        (4, 8, "step", "none", 5.5),
        (8, 4, "none", "linear", 5.5),
    ],
)
def test_with_another_number_of_train_workers_the_curve_goes_on(
    tmp_path: Path, before: int, after: int, scheduler: str, scale: str, at: float
) -> None:
    factor = {"none": lambda n: 1.0, "linear": float, "sqrt": math.sqrt}[scale]
    first = Training(before, scheduler=scheduler, scale_lr=scale)
    saved = first.save(tmp_path, first.run(at))
    second = Training(after, scheduler=scheduler, scale_lr=scale)
    second.go_on(saved)
    for workers, points in ((before, first.points), (after, second.points)):
        expected = [LR * factor(workers) * CURVES[scheduler](done) for done, _ in points]
        assert [rate for _, rate in points] == pytest.approx(expected, rel=1e-9)
    assert second.points[0][0] == at
    end = LR * factor(after) * CURVES[scheduler](EPOCHS - 1e-9)
    assert learning_rate(second.worker.optimizer) == pytest.approx(
        end, abs=2e-3 * LR * factor(after)
    )


def test_a_warm_up_goes_on_to_the_rate_of_the_new_size(tmp_path: Path) -> None:
    options = {"scale_lr": "linear", "warmup_epochs": 4}
    first = Training(8, **options)
    saved = first.save(tmp_path, first.run(2.0))
    second = Training(4, **options)
    second.go_on(saved)
    for workers, points in ((8, first.points), (4, second.points)):
        for done, rate in points:
            warm = LR + (LR * workers - LR) * done / 4
            assert rate == pytest.approx(
                warm if done < 4 else LR * workers * CURVES["cosine"](done)
            )


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_max_steps_ends_the_training_and_so_the_curve(
    tmp_path: Path, workers: int, accumulate: int
) -> None:
    training = Training(workers, max_steps=10, accumulate_steps=accumulate)
    rates = []
    for _ in range(10):
        rates.append(learning_rate(training.worker.optimizer))
        step = Step(training.worker)
        step.accumulate(
            {"image": torch.zeros(BATCH, 1, 8, 8), "label": torch.zeros(BATCH, dtype=torch.long)}
        )
        step.update()
    expected = [LR * 0.5 * (1 + math.cos(math.pi * k / 10)) for k in range(10)]
    assert rates == pytest.approx(expected)
    assert learning_rate(training.worker.optimizer) == pytest.approx(0, abs=1e-9)


def test_max_steps_beyond_the_last_epoch_changes_nothing() -> None:
    plain, limited = Training(8), Training(8, max_steps=10_000)
    for training in (plain, limited):
        training.run(EPOCHS)
    assert limited.points == plain.points


def test_with_more_epochs_the_rate_is_that_of_the_longer_training(tmp_path: Path) -> None:
    first = Training(4)
    saved = first.save(tmp_path, first.run(EPOCHS))
    longer = Training(4, epochs=2 * EPOCHS)
    longer.go_on(saved)
    expected = [LR * 0.5 * (1 + math.cos(math.pi * done / 2 / EPOCHS)) for done, _ in longer.points]
    assert [rate for _, rate in longer.points] == pytest.approx(expected)
    assert longer.points[0][1] == pytest.approx(LR / 2), (
        "the last epochs do not train at a rate of 0"
    )


class Own(Linear):
    """Brings an optimiser whose rate it has lowered by itself."""

    def optimizer(self, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.5)


def test_a_recipes_own_optimiser_keeps_its_own_rate(tmp_path: Path) -> None:
    first = Training(8, Own(), scheduler="linear")
    saved = first.save(tmp_path / "a", first.run(2.5))
    second = Training(4, Own(), scheduler="linear")
    second.go_on(saved)
    assert second.points[0] == (2.5, pytest.approx(0.5 * 0.75))
    alone = Training(1, Own(), scheduler="none")
    assert alone.worker.schedule is None
    alone.worker.optimizer.param_groups[0]["lr"] = 0.125
    kept = alone.save(tmp_path / "b", Progress(1))
    other = Training(1, Own(), scheduler="none")
    snapshot.restore_state(other.worker, checkpoint.load_checkpoint(kept))
    assert learning_rate(other.worker.optimizer) == 0.125


@pytest.mark.parametrize("epochs", [1, 2, 5, 7])
def test_a_stepped_rate_drops_after_each_third_of_the_training(epochs: int) -> None:
    train = {"scheduler": "step", "max_steps": 90, "lr": 1.0, "epochs": epochs}
    worker = Worker(
        Config.model_validate({"train": train}), Linear(), None, 0, 0, 1, torch.device("cpu")
    )
    build(worker, None)
    rates = []
    for step in range(1, 91):
        rates.append(round(learning_rate(worker.optimizer), 9))
        worker.schedule.advance(BATCH, step)
    assert rates == [1.0] * 30 + [0.1] * 30 + [0.01] * 30


def test_a_warm_up_never_starts_above_the_rate_of_a_recipes_own_optimiser() -> None:
    class Fine(Linear):
        def optimizer(self, model: Any) -> Any:
            return torch.optim.SGD(model.parameters(), lr=2e-6)

    training = Training(8, Fine(), scheduler="none", warmup_epochs=2)
    training.run(3.0)
    assert {rate for _, rate in training.points} == {2e-6}


@pytest.mark.parametrize("scheduler", ["cosine", "linear"])
def test_a_schedule_that_max_steps_ends_needs_no_number_of_records(scheduler: str) -> None:
    train = {"scheduler": scheduler, "max_steps": 20, "lr": LR, "epochs": EPOCHS}
    worker = Worker(
        Config.model_validate({"train": train}), Linear(), None, 0, 0, 1, torch.device("cpu")
    )
    build(worker, None)
    assert worker.schedule is not None
    rates = []
    for step in range(1, 21):
        rates.append(learning_rate(worker.optimizer))
        worker.schedule.advance(BATCH, step)
    assert rates == pytest.approx(
        [LR * CURVES[scheduler](step / 20 * EPOCHS) for step in range(20)]
    )
