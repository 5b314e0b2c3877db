"""What training cannot honour is refused before train workers start; steps are counted as they will be."""

from __future__ import annotations

from typing import Any

import pytest
from rows import Regression

from stoker.config.schema import Config, TrainConfig
from stoker.errors import UsageError
from stoker.recipe import Recipe
from stoker.train.build import scaled_lr
from stoker.train.recipe_work import count_workers, refuse_impossible, refuse_unknown_length


class OwnOptimizer(Recipe):
    def optimizer(self, model: Any) -> Any:
        return object()


@pytest.mark.parametrize("key", ["label_smoothing", "mixup", "cutmix"])
def test_a_recipe_with_its_own_loss_keeps_it(key: str) -> None:
    train = TrainConfig.model_validate({key: 0.1})
    with pytest.raises(UsageError, match=f"train.{key}: Regression defines training_step"):
        refuse_impossible(Regression(data=""), train)
    refuse_impossible(Recipe(), train)


def test_a_recipe_with_its_own_optimiser_keeps_it_and_all_problems_are_said_at_once() -> None:
    with pytest.raises(UsageError) as refused:
        refuse_impossible(OwnOptimizer(), TrainConfig(layer_decay=0.7, scale_lr="linear"))
    lines = str(refused.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["train.layer_decay", "train.scale_lr"]


@pytest.mark.parametrize(
    "train", [{"scheduler": "cosine"}, {"warmup_epochs": 1}], ids=["scheduler", "warmup_epochs"]
)
def test_a_schedule_needs_to_know_the_number_of_records(train: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match=f"train.{next(iter(train))}: .*needs the number of records"
    ):
        refuse_unknown_length(TrainConfig.model_validate(train), None)
    refuse_unknown_length(TrainConfig.model_validate(train), 10)


@pytest.mark.parametrize(("rule", "rate"), [("none", 0.1), ("linear", 0.8), ("sqrt", 0.1 * 8**0.5)])
def test_the_rate_follows_workers_times_accumulated_batches(rule: str, rate: float) -> None:
    train = TrainConfig.model_validate({"lr": 0.1, "scale_lr": rule, "accumulate_steps": 2})
    assert scaled_lr(train, workers=4) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("workers", "resources", "expected"),
    [
        (None, {"CPU": 8.0}, (1, False)),
        (4, {"CPU": 8.0}, (4, False)),
        (2, {"CPU": 1.0}, (2, False)),
        (None, {"CPU": 8.0, "GPU": 4.0}, (4, True)),
        (2, {"CPU": 8.0, "GPU": 4.0}, (2, True)),
        (500, {"CPU": 8.0}, "train.workers: 500 workers need as many CPUs; found 8"),
        (5, {"CPU": 8.0, "GPU": 4.0}, "train.workers: 5 workers need as many GPUs; found 4"),
    ],
)
def test_as_many_train_workers_as_the_cluster_can_run(
    workers: int | None, resources: dict[str, float], expected: Any
) -> None:
    config = Config.model_validate({"recipe": "none:None", "train": {"workers": workers}})
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            count_workers(config, resources)
    else:
        assert count_workers(config, resources) == expected
