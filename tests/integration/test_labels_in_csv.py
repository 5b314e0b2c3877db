"""Jobs on images whose labels stand in a CSV file, by parameters of ImageClassification alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image
from running import run_job

COLOURS = ("blue", "green", "red")


def test_images_with_several_labels_are_learned_and_their_classes_exported(
    ray_cluster: None, tmp_path: Path
) -> None:
    draw, rows = np.random.default_rng(0), ["id,labels,split"]
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
