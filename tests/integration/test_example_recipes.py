"""The recipes of `source_dir/recipes` whose data are not images of one size, trained on generated data."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from running import run_job


@pytest.mark.parametrize(
    ("recipe", "records", "epochs", "data", "metric", "good"),
    [
        ("recipes.text:Reviews", 1000, 2, {"cache": "memory"}, "val/acc1", 0.9),
        ("recipes.segmentation:Shapes", 400, 1, {}, "val/iou", 0.5),
        pytest.param(
            "recipes.audio:Tones", 600, 1, {"transport": "ray"}, "val/acc1", 0.8, marks=pytest.mark.soak
        ),
        pytest.param("recipes.video:Motion", 800, 3, {}, "val/acc1", 0.5, marks=pytest.mark.soak),
    ],
)
def test_an_example_learns_and_loses_no_record(
    ray_cluster: None,
    tmp_path: Path,
    recipe: str,
    records: int,
    epochs: int,
    data: dict[str, Any],
    metric: str,
    good: float,
) -> None:
    importlib.import_module(recipe.partition(":")[0]).write(tmp_path / "data", records=records)
    outcome = run_job(
        tmp_path,
        recipe=recipe,
        params={"data": str(tmp_path / "data")},
        data={"order": "exact", "block_records": 50, **data},
        train={"epochs": epochs, "batch_size": 16, "optimizer": "adamw", "lr": 0.003},
    )
    assert outcome.code == 0, outcome.summary.error
    assert (outcome.summary.records.read, outcome.summary.records.trained) == (epochs * records,) * 2
    assert outcome.summary.metrics.best[metric] > good
