"""Early stopping means what Lightning's EarlyStopping means, and an unknown metric is refused early."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
from rows import Counting
from torchmetrics import MeanAbsoluteError, MeanMetric
from torchmetrics.classification import BinaryF1Score
from torchmetrics.text import Perplexity

from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.events.summary import Metrics
from stoker.train.stopping import (
    EarlyStopping,
    check_monitors,
    modes,
    monitored,
    monitors,
    with_modes,
)


def stopping_at(**limits: object) -> EarlyStopping:
    overrides = [f"train.early_stopping.{key}={value}" for key, value in limits.items()]
    config = load(None, ["train.early_stopping.monitor=val/loss", *overrides]).config
    found = EarlyStopping.of(config.train.early_stopping)
    assert found is not None
    return found


def stops_after(values: list[float], **limits: object) -> int | None:
    """The epoch (from 1) after which training stops."""
    stopping = stopping_at(**limits)
    for epoch, value in enumerate(values, start=1):
        stopping.update({"val/loss": value})
        if stopping.reason:
            return epoch
    return None


@pytest.mark.parametrize(
    ("values", "limits", "epoch"),
    [
        ([3, 2, 1, 1, 1, 1], {"patience": 3}, 6),
        ([3, 2, 1, 1, 0.9, 1, 1], {"patience": 3}, None),
        ([3, 2, 2], {"patience": 0}, 3),
        ([1.0, 0.95, 0.9], {"patience": 2, "min_delta": 0.1}, 3),
        (
            [1.0, 0.75, 0.5, 0.5],
            {"patience": 1, "min_delta": 0.25},
            2,
        ),  # exactly min_delta is no improvement
        ([1.0, 0.5, 0.2], {"stopping_threshold": 0.5}, 3),  # must be passed, not reached
        ([1, math.nan, 2, 0.5, 1], {"patience": 3}, None),
        ([math.nan, math.inf, 0.5, 1], {"patience": 3}, None),
        ([1, math.nan, math.nan, math.nan], {"patience": 3}, 4),
        ([1, 2, math.inf], {"mode": "max", "patience": 1, "stopping_threshold": 9}, 3),
        ([1, 2, 3, 3], {"mode": "max", "patience": 1}, 4),
    ],
)
def test_when_it_stops(values: list[float], limits: dict[str, object], epoch: int | None) -> None:
    assert stops_after(values, **limits) == epoch


def test_it_goes_on_counting_after_a_restart() -> None:
    first, second = stopping_at(patience=3), stopping_at(patience=3)
    for value in (1, 2, 2):
        first.update({"val/loss": value})
    second.restore(asdict(first))
    second.update({"val/loss": 2})
    assert "has not improved by more than 0 for 3 epochs; best 1" in second.reason


def problems_of(overrides: list[str], has_val: bool) -> tuple[str, ...]:
    try:
        check_monitors(load(None, overrides).config, Counting(), has_val)
    except UsageError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("key", ["train.early_stopping.monitor", "checkpoint.monitor"])
@pytest.mark.parametrize(
    ("metric", "has_val", "says"),
    [
        ("val/lss", True, "no metric 'val/lss'; did you mean val/loss?"),
        ("loss", True, "no metric 'loss'; "),
        ("val/loss", False, "(no validation)"),
        ("val/acc1", True, ""),
        ("val/loss", True, ""),
        ("train/loss", False, ""),
        ("perf/anything", True, "does not say whether higher is better"),
    ],
)
def test_an_unknown_metric_is_refused_before_training(
    key: str, metric: str, has_val: bool, says: str
) -> None:
    problems = problems_of([f"{key}={metric}"], has_val)
    assert len(problems) == bool(says)
    assert all(
        problem.startswith(key.rpartition(".")[0]) and says in problem for problem in problems
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["checkpoint.mode=min"], "checkpoint.mode: min needs checkpoint.monitor"),
        (
            [
                "train.early_stopping.monitor=val/loss",
                "train.early_stopping.mode=min",
                "checkpoint.mode=max",
            ],
            "checkpoint.mode: max contradicts train.early_stopping.mode: min",
        ),
        (["train.early_stopping.monitor=val/loss", "checkpoint.mode=min"], ""),
        (["checkpoint.monitor=val/acc1", "checkpoint.mode=max"], ""),
    ],
)
def test_a_direction_without_a_metric_or_both_ways_is_refused(given: list[str], says: str) -> None:
    problems = problems_of(given, True)
    assert len(problems) == bool(says)
    assert all(says in problem for problem in problems)


def test_the_best_value_is_told_also_if_it_improved_by_less_than_min_delta() -> None:
    stopping = stopping_at(patience=2, min_delta=0.1)
    for value in (0.5, 0.45, 0.48):
        stopping.update({"val/loss": value})
    assert stopping.reason.endswith("best 0.45")


class Scored(Counting):
    """Reports metrics of torchmetrics, one of its own, and a number without a direction."""

    def metrics(self) -> dict[str, object]:
        return {
            "glossary_f1": BinaryF1Score(),
            "mae": MeanAbsoluteError(),
            "bpb": Perplexity(),
            "mine": MeanMetric(),
            "count_loss": MeanMetric(),
        }


@pytest.mark.parametrize("key", ["checkpoint.monitor", "train.early_stopping.monitor"])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("glossary_f1", "max"),
        ("mae", "min"),
        ("bpb", "min"),
        ("count_loss", "min"),
        ("loss", "min"),
        ("mine", None),
    ],
)
def test_mode_is_what_the_metric_says_and_is_never_read_from_its_name(
    name: str, mode: str | None, key: str
) -> None:
    overrides, recipe = [f"{key}=val/{name}"], Scored()
    if mode is None:
        mode_key = key.replace("monitor", "mode")
        with pytest.raises(UsageError) as refused:
            check_monitors(load(None, overrides).config, recipe, True)
        assert [p.partition(":")[0] for p in refused.value.problems] == [mode_key]
        overrides, mode = [*overrides, f"{mode_key}=max"], "max"
    config = load(None, overrides).config
    check_monitors(config, recipe, True)
    config = with_modes(config, recipe)
    early, best = monitors(config)
    assert (best if key.startswith("checkpoint") else early).mode == mode
    if key.startswith("checkpoint"):
        chosen = monitored(config, {f"val/{name}": 0.5, "train/loss": 1.0})
        assert chosen is not None and chosen["mode"] == mode


def test_only_metrics_with_a_known_mode_have_a_best_value() -> None:
    metrics = Metrics(modes=modes(load(None, []).config, Scored()))
    for value in (0.4, 0.2, 0.3):
        metrics.take(
            {f"val/{name}": value for name in ("glossary_f1", "mae", "mine", "mae/cat", "loss")}
            | {"val/latency_ms": value}
        )
    assert metrics.best == {
        "val/glossary_f1": 0.4,
        "val/mae": 0.2,
        "val/mae/cat": 0.2,
        "val/loss": 0.2,
    }
