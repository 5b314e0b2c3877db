"""What the benchmarks compute from what they see, and that their jobs are jobs; no timing."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import end_to_end, epoch_gap, gpu
from benchmarks.jobs import RECIPES
from benchmarks.loaders.work import Consumer, files_of, longest_gap, pillow, rate, write_folder
from stoker.config.schema import Config
from stoker.recipe import load_recipe

pytestmark = pytest.mark.unit


def jpeg(level: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (64, 48), (level, level, level)).save(content, "JPEG")
    return content.getvalue()


def test_the_rate_is_that_of_the_window_alone() -> None:
    """Slow at first (starting), then 10 records in 1 s, then slow again (the last tasks, alone)."""
    times = [(0.0, 10), (50.0, 40), (51.0, 50), (52.0, 60), (53.0, 70), (54.0, 80), (55.0, 90), (56.0, 95)]
    assert rate(times, 100) == pytest.approx(45 / 5)
    assert longest_gap(times) == 50.0


def test_all_loaders_read_each_image_of_the_folder_once(tmp_path: Path) -> None:
    write_folder(tmp_path, [jpeg(50), jpeg(150)], total=10, classes=2)
    files = files_of(tmp_path)
    assert len(files) == len({path for path, _ in files}) == 10
    assert [label for _, label in files] == [0, 1] * 5
    image = pillow()(Path(files[0][0]).read_bytes())
    assert image.shape == (3, 224, 224)
    assert image.dtype == torch.uint8


def test_the_consumer_notes_what_it_was_given(tmp_path: Path) -> None:
    consumer = Consumer(total=8)
    for level in (10, 20, 30, 40):
        consumer.take(torch.full((2, 3, 224, 224), level, dtype=torch.uint8), torch.tensor([0, 1]))
    consumer.write(tmp_path / "seen.json")
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["rows"], seen["mean"]) == (8, 25.0)
    assert json.loads(seen["sorted_labels"]) == {"0": 4, "1": 4}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 8_000}, "8000 of 8960 images"),
        ({"mean": 140.0}, "mean pixel 140.00"),
        ({"sorted_labels": '{"0": 12800}'}, "other labels"),
    ],
)
def test_speed_from_doing_less_is_found(change: dict[str, Any], reason: str) -> None:
    seen = {"rows": end_to_end.TOTAL, "mean": 126.0, "sorted_labels": '{"0": 6400, "1": 6400}'}
    found = {"Stoker": [seen], end_to_end.BASE: [seen]}
    end_to_end.check(found)
    with pytest.raises(RuntimeError, match=reason):
        end_to_end.check(found | {"peer": [seen | change]})


def test_memory_that_grows_does_not_count_as_flat() -> None:
    ready = round(epoch_gap.PREFETCH_S / epoch_gap.STEP_S) * epoch_gap.BATCH * 224 * 224 * 3
    flat = [ready + 400 * 2**20] * epoch_gap.EPOCHS
    growing = [value + number * 2**20 for number, value in enumerate(flat)]
    assert epoch_gap.memory(flat)[1].met
    assert not epoch_gap.memory(growing)[1].met


@pytest.mark.parametrize("kind", ["JPEG", "synthetic"])
@pytest.mark.long
def test_both_kinds_of_data_train_the_same_model(tmp_path: Path, kind: str) -> None:
    from stoker.chain.chain import Chain
    from stoker.chain.entries import as_stages
    from stoker.train.feed import as_tensors

    write_folder(tmp_path / "data", [jpeg(9)], total=8)
    size = gpu.Size(records=8, batch=4, precision="fp32", image=32)
    job = gpu.job_of("resnet10t", kind, tmp_path, size)
    Config.model_validate(job)
    recipe = load_recipe(job["recipe"], job["params"], RECIPES)
    source = recipe.read("train")
    assert source.count() == 8
    records = list(source.read(source.shards(4, None)[0], None))
    columns, _ = Chain(as_stages(recipe.preprocess("train")), seed=0).run(records, epoch=0)
    batch = as_tensors({name: np.array(column) for name, column in columns.items()})[0]
    assert batch["image"].shape == (4, 3, 32, 32)
    assert batch["image"].dtype == torch.uint8
    loss: Any = recipe.training_step(recipe.model(), recipe.on_device("train")(batch))
    assert torch.isfinite(loss)
