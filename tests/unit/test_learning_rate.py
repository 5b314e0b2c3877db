"""The learning rate follows the share of the whole training that is done, whatever a step holds.

A training is the schedule's view of one: how many records each step takes. Going on from a checkpoint is a new
schedule that begins at the same place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stoker.config.schema import TrainConfig
from stoker.train.build import Schedule, learning_rate, scaled_lr

RECORDS, BATCH, EPOCHS = 64, 4, 10
LR = 0.1
CURVES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done / EPOCHS)),
    "linear": lambda done: 1 - done / EPOCHS,
    "step": lambda done: 0.1 ** (3 * done // EPOCHS),
    "none": lambda done: 1.0,
}


class Training:
    def __init__(self, workers: int, records: int | None = RECORDS, **train: Any) -> None:
        own = train.pop("own", None)
        options = {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "scheduler": "cosine"}
        config = TrainConfig.model_validate({**options, **train})
        self.workers, self.size = workers, workers * BATCH * config.accumulate_steps
        rate = own or scaled_lr(config, workers)
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
        self.schedule, self.at = Schedule(self.optimizer, config, records), (0, 0, 0)
        self.points: list[tuple[float, float]] = []
        """(epochs done, rate of the step that follows)."""

    def run(self, upto: float, at: tuple[int, int, int] = (0, 0, 0)) -> Training:
        """From epoch, records of it and step; the last step of an epoch may be short."""
        epoch, samples, step = at
        while epoch < upto:
            self.schedule.begin(epoch, samples, step)
            while samples + self.workers <= RECORDS and (done := epoch + samples / RECORDS) < upto:
                self.points.append((done, learning_rate(self.optimizer)))
                rows = min(self.size, (RECORDS - samples) // self.workers * self.workers)
                samples, step = samples + rows, step + 1
                self.schedule.advance(rows, step)
            self.at = epoch, samples, step
            epoch, samples = epoch + 1, 0
        return self

    def steps(self, count: int) -> list[float]:
        rates = []
        for step in range(1, count + 1):
            rates.append(learning_rate(self.optimizer))
            self.schedule.advance(self.size, step)
        return rates


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
    before: int, after: int, scheduler: str, scale: str, at: float
) -> None:
    factor = {"none": lambda n: 1.0, "linear": float, "sqrt": math.sqrt}[scale]
    first = Training(before, scheduler=scheduler, scale_lr=scale).run(at)
    second = Training(after, scheduler=scheduler, scale_lr=scale).run(EPOCHS, first.at)
    for workers, points in ((before, first.points), (after, second.points)):
        expected = [LR * factor(workers) * CURVES[scheduler](done) for done, _ in points]
        assert [rate for _, rate in points] == pytest.approx(expected, rel=1e-9)
    assert max(done for done, _ in first.points) < at == min(done for done, _ in second.points)
    end = LR * factor(after) * CURVES[scheduler](EPOCHS - 1e-9)
    assert learning_rate(second.optimizer) == pytest.approx(end, abs=2e-3 * LR * factor(after))


def test_a_warm_up_goes_on_to_the_rate_of_the_new_size() -> None:
    options = {"scale_lr": "linear", "warmup_epochs": 4}
    first = Training(8, **options).run(2.0)
    second = Training(4, **options).run(EPOCHS, first.at)
    for workers, points in ((8, first.points), (4, second.points)):
        for done, rate in points:
            warm = LR + (LR * workers - LR) * done / 4
            whole = LR * workers * CURVES["cosine"](done)
            assert rate == pytest.approx(warm if done < 4 else whole)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("records", [RECORDS, None])
@pytest.mark.parametrize("scheduler", ["cosine", "linear"])
def test_max_steps_ends_the_training_and_so_the_curve(
    workers: int, accumulate: int, records: int | None, scheduler: str
) -> None:
    train = {"max_steps": 10, "accumulate_steps": accumulate, "scheduler": scheduler}
    training = Training(workers, records, **train)
    expected = [LR * CURVES[scheduler](step) for step in range(10)]
    assert training.steps(10) == pytest.approx(expected)
    assert learning_rate(training.optimizer) == pytest.approx(0, abs=1e-9)


def test_max_steps_beyond_the_last_epoch_changes_nothing() -> None:
    plain, limited = (Training(8, **more).run(EPOCHS) for more in ({}, {"max_steps": 10_000}))
    assert limited.points == plain.points


def test_with_more_epochs_the_rate_is_that_of_the_longer_training() -> None:
    """The last epochs do not train at a rate of 0."""
    at = Training(4).run(EPOCHS).at
    longer = Training(4, epochs=2 * EPOCHS).run(2 * EPOCHS, (EPOCHS, 0, at[2]))
    assert [rate for _, rate in longer.points] == pytest.approx(
        [LR * CURVES["cosine"](done / 2) for done, _ in longer.points]
    )
    assert longer.points[0][1] == pytest.approx(LR / 2)


@pytest.mark.parametrize("epochs", [1, 2, 5, 7])
def test_a_stepped_rate_drops_after_each_third_of_the_training(epochs: int) -> None:
    training = Training(1, None, scheduler="step", max_steps=90, lr=1.0, epochs=epochs)
    expected = [1.0] * 30 + [0.1] * 30 + [0.01] * 30
    assert training.steps(90) == pytest.approx(expected)


def test_a_recipes_own_optimiser_keeps_its_own_rate() -> None:
    assert Training(4, own=0.5, scheduler="linear").run(3, (2, RECORDS // 2, 9)).points[0] == (
        2.5,
        pytest.approx(0.5 * 0.75),
    )
    fine = Training(8, own=2e-6, scheduler="none", warmup_epochs=2).run(3.0)
    assert {rate for _, rate in fine.points} == {2e-6}, "nor does a warm-up start above it"
