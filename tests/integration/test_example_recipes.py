"""The recipes of the project on generated data: those of source_dir/recipes, and images with a CSV file."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from running import run_job

EXAMPLES: dict[str, tuple[int, int, dict[str, Any], str, float]] = {
    "recipes.text:Reviews": (1000, 2, {"cache": "memory"}, "val/acc1", 0.9),
    "recipes.segmentation:Shapes": (400, 1, {}, "val/iou", 0.5),
    "recipes.audio:Tones": (600, 1, {"transport": "ray"}, "val/acc1", 0.8),
    "recipes.video:Motion": (800, 3, {}, "val/acc1", 0.5),
}
FIRST, *OTHERS = EXAMPLES


@pytest.mark.parametrize(
    "recipe", [FIRST, *(pytest.param(r, marks=pytest.mark.soak) for r in OTHERS)]
)
def test_an_example_learns_and_loses_no_record(
    ray_cluster: None, tmp_path: Path, recipe: str
) -> None:
    records, epochs, data, metric, good = EXAMPLES[recipe]
    importlib.import_module(recipe.partition(":")[0]).write(tmp_path / "data", records=records)
    outcome = run_job(
        tmp_path,
        recipe=recipe,
        params={"data": str(tmp_path / "data")},
        data={"order": "exact", "block_records": 50, **data},
        train={"epochs": epochs, "batch_size": 16, "optimizer": "adamw", "lr": 0.003},
    )
    assert outcome.code == 0, outcome.summary.error
    assert outcome.summary.records.read == outcome.summary.records.trained == epochs * records
    assert outcome.summary.metrics.best[metric] > good


COLOURS = ("blue", "green", "red")


def test_images_with_several_labels_are_learned_and_their_classes_exported(
    ray_cluster: None, tmp_path: Path
) -> None:
    draw, rows = np.random.default_rng(0), ["image,label,split"]
    (tmp_path / "data/images").mkdir(parents=True)
    for number in range(120):
        has = draw.integers(0, 2, 3)
        pixels = np.stack([np.full((16, 16), 255 * on) for on in has[::-1]], -1).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"data/images/{number:03}.png")
        labels = "|".join(name for name, on in zip(COLOURS, has, strict=True) if on)
        rows.append(f"{number:03},{labels},{'val' if number % 5 == 0 else 'train'}")
    (tmp_path / "data/tags.csv").write_text("\n".join(rows))
    params = {"data": str(tmp_path / "data"), "labels": "tags.csv", "label_separator": "|"}
    outcome = run_job(
        tmp_path,
        params={**params, "model": "test_resnet", "image_size": 16, "augment": "none"},
        train={"epochs": 5, "batch_size": 16, "optimizer": "adamw", "lr": 0.01, "workers": 1},
        export=["torch_export"],
    )
    assert outcome.code == 0, outcome.summary.error
    assert outcome.summary.metrics.best["val/f1"] > 0.95
    notes = [event["text"] for event in outcome.summary.events if event["event"] == "note"]
    assert any("without a label, so of no class" in note for note in notes)
    about = json.loads((outcome.run_dir / "model/model.json").read_text())
    assert about["classes"] == [*COLOURS]
    assert about["outputs"][0]["shape"] == ["batch", 3]
