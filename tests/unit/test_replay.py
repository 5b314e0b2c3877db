"""The GPU's rate: the real training step on batches that are at hand; here on a CPU that sleeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launcher.advise.size.gpu_profile import measure_gpu
from launcher.advise.size.measure import table_name
from stoker.config.loading import load
from stoker.recipe import load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "benchmarks/recipes"
PARAMS = {"records": 1000, "cpu_s": 0.0, "bytes_per_sample": 10}


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_rate_is_that_of_the_training_alone(accumulate: int) -> None:
    config = load(None, ["train.batch_size=16", f"train.accumulate_steps={accumulate}"]).config
    recipe = load_recipe("asleep:Asleep", PARAMS | {"gpu_samples_per_s": 800}, RECIPES)
    found = measure_gpu(config, recipe, {"payload": np.zeros((64, 10), dtype=np.uint8)}, seconds=1.0)
    # Sleeping takes what it is told or longer, where the machine is busy.
    assert 50 < found.samples_per_s < 805
    assert found.spread >= 0.02


@pytest.mark.parametrize(
    ("driver", "table"),
    [
        ("NVIDIA A10G", "A10G"),
        ("Tesla L4", "L4"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_drivers_name_of_a_gpu_is_found_in_the_table(driver: str, table: str | None) -> None:
    assert table_name(driver) == table
