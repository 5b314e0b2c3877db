"""Runs that share their blocks: each gets what it would make alone, and together they make it once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running import run_job
from streaming import Train

from stoker.chain.columns import columns_of
from stoker.config.schema import Config
from stoker.errors import UsageError

EPOCHS = 2


def job(data: Path, share: str | None, **changes: Any) -> Config:
    return Config.model_validate(
        {
            "recipe": "ImageClassification",
            "params": {"data": str(data), "num_classes": 10, "image_size": 24},
            "data": {"order": "exact", "block_records": 32, "share": share, **changes},
            "train": {"epochs": EPOCHS, "batch_size": 50},
            "seed": 3,
        }
    )


class Reading:
    """A run that takes one step of its passes after the other."""

    def __init__(self, config: Config) -> None:
        self.train = Train(config)
        self.ids: list[int] = []
        self.images: list[bytes] = []
        self.made = 0.0
        """The part of its records that it preprocessed itself."""
        self._steps = self._passes()

    def _passes(self) -> Any:
        for epoch in range(EPOCHS):
            for split in ("train", "val"):
                begun = len(self.ids)
                for ids in self.train.steps(split, epoch):
                    self.ids += ids
                    self._look()
                    yield
                self.train.reconcile(split, epoch, self.ids[begun:])

    def _look(self) -> None:
        import ray

        for portion in self.train.portions:
            for part in portion.blocks:
                images = columns_of(ray.get(part.block))["image__hwc"]
                self.images += [image.tobytes() for image in images[part.start : part.stop]]
        self.train.portions.clear()

    def step(self) -> bool:
        """Take a step; whether there was one."""
        return next(self._steps, self) is None


def step(runs: list[Reading]) -> bool:
    """Take a step of each run; whether any had one."""
    return sum(run.step() for run in runs) > 0


def finish(*runs: Reading) -> list[list[tuple[int, bytes]]]:
    """The rows of each run, which take their remaining steps in turn."""
    while step([*runs]):
        pass
    for run in runs:
        run.made = 1 - float((run.train.figures()["share"] or {"pct": 0})["pct"]) / 100
        run.train.close()
    return [list(zip(run.ids, run.images, strict=True)) for run in runs]


@pytest.fixture(scope="module")
def alone(ray_cluster: None, digits: Path) -> list[tuple[int, bytes]]:
    """The rows of a run of its own."""
    (rows,) = finish(Reading(job(digits / "images", None)))
    return rows


def test_two_runs_get_what_each_would_make_alone_and_make_it_once(
    ray_cluster: None, digits: Path, alone: list[tuple[int, bytes]]
) -> None:
    one = Reading(job(digits / "images", "twice"))
    one.step()  # the other is late
    other = Reading(job(digits / "images", "twice", order="any"))
    of_one, of_other = finish(one, other)
    assert of_one == alone
    assert sorted(of_other) == sorted(alone)
    assert one.made + other.made < 1.2


def test_a_run_that_is_killed_costs_the_others_nothing_but_work(
    ray_cluster: None, digits: Path, alone: list[tuple[int, bytes]]
) -> None:
    runs = [Reading(job(digits / "images", "killed")) for _ in range(3)]
    for _ in range(5):
        step(runs)
    runs.pop(0).train.close()
    assert finish(*runs) == [alone] * 2


def test_without_its_actor_each_run_makes_everything_itself(
    ray_cluster: None, digits: Path, alone: list[tuple[int, bytes]]
) -> None:
    import ray

    runs = [Reading(job(digits / "images", "ended")) for _ in range(2)]
    step(runs)
    ray.kill(ray.get_actor("stoker-share-ended", namespace="stoker"))
    assert finish(*runs) == [alone] * 2


def test_a_run_with_other_blocks_is_refused(ray_cluster: None, digits: Path, tmp_path: Path) -> None:
    one = Train(job(digits / "images", "sweep"))
    with pytest.raises(UsageError, match="the runs named 'sweep' differ from this one in: seed;"):
        Train(job(digits / "images", "sweep").model_copy(update={"seed": 4}))
    with pytest.raises(UsageError, match="in: train chain;"):
        Train(
            job(digits / "images", "sweep").model_copy(
                update={"params": one.config.params | {"image_size": 32}}
            )
        )
    done = run_job(
        tmp_path, recipe="ImageClassification", seed=4, data={"share": "sweep", "block_records": 32},
        params=one.config.params, train={"epochs": 1, "batch_size": 50},
    )  # fmt: skip
    assert done.code == 2 and "in: seed;" in (done.summary.error or "")
    one.close()
