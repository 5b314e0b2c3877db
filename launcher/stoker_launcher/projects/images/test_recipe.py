"""pytest test_recipe.py: the recipe without a cluster, in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from recipe import Brighten, Images, write


def test_the_classes_are_found_in_the_data(tmp_path: Path) -> None:
    write(tmp_path / "signs", records=12)
    assert Images(data=str(tmp_path / "signs")).discover() == {"num_classes": 3}


def test_an_image_stays_an_image() -> None:
    grey = {"key": "a", "image": np.full((4, 4, 3), 200, np.uint8), "label": 1}
    found = Brighten(0.5)(grey, np.random.default_rng(0))
    assert found["image"].dtype == np.uint8 and found["image"].shape == (4, 4, 3)
    assert found["image"].std() == 0 and found["image"][0, 0, 0] != 200 and found["label"] == 1


def test_a_batch_gives_a_loss_and_gradients(tmp_path: Path) -> None:
    recipe = Images(data=str(tmp_path), num_classes=3)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    batch = recipe.on_device("train")({"image": images, "label": torch.tensor([0, 1, 2, 0])})
    model = recipe.model()
    loss = recipe.training_step(model, batch)
    assert isinstance(loss, torch.Tensor) and torch.isfinite(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(weights.grad is not None for weights in model.parameters())
