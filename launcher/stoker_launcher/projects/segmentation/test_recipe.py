"""pytest test_recipe.py: the recipe without a cluster, in seconds."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors

from recipe import Shapes


def encoded(pixels: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def test_image_and_mask_are_cropped_alike() -> None:
    mask = np.random.default_rng(0).integers(0, 3, (48, 64), dtype=np.uint8)
    image = np.stack([mask * 100] * 3, axis=2)
    record = {"key": "a", "image": encoded(image), "mask": encoded(mask)}
    torch.manual_seed(0)
    *decode, (_, crop) = Shapes(data="").preprocess("train")
    for stage in decode:
        record = stage(record, np.random.default_rng(1))
    image = tv_tensors.Image(torch.as_tensor(np.asarray(record["image"])).permute(2, 0, 1))
    pixels, classes = crop(image, tv_tensors.Mask(torch.as_tensor(np.asarray(record["mask"]))))
    assert classes.shape == (32, 32) == pixels.shape[1:]
    assert (pixels == classes * 100).all()


def test_the_loss_is_a_number_and_the_output_as_large_as_the_mask() -> None:
    recipe = Shapes(data="", width=4)
    batch = {"image": torch.rand(2, 3, 16, 16), "mask": torch.zeros(2, 16, 16, dtype=torch.uint8)}
    result = recipe.training_step(recipe.model(), batch)
    assert torch.isfinite(result["loss"]) and result["preds"].shape == (2, 3, 16, 16)
