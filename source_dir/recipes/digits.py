"""Handwritten digits: the built-in recipe with a custom chain and a small network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.data import CheckLabel, DecodeImage, Record, RecordTransform
from stoker.image_classification import ImageClassification
from stoker.recipe import Split

if TYPE_CHECKING:
    from torch import nn


class Jiggle(RecordTransform):
    """Chain worker: rotates, shifts and scales an image slightly, at random per record and epoch.

    Uses OpenCV. torchvision transforms work as well, but then every chain worker imports torch and
    torchvision, which adds seconds to each start.
    """

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        import cv2

        image = record["image"]
        height, width = image.shape[:2]
        angle, scale = rng.uniform(-8, 8), rng.uniform(0.9, 1.1)
        matrix = cv2.getRotationMatrix2D((width / 2, height / 2), angle, scale)
        matrix[:, 2] += rng.uniform(-2, 2, size=2)
        return {**record, "image": cv2.warpAffine(image, matrix, (width, height))[..., None]}


class Digits(ImageClassification):
    """Greyscale 32×32 images of ten digits, from tar shards, Parquet or class folders."""

    num_classes: int | None = 10
    image_size: int = 32
    color: str = "L"  # type: ignore[assignment]

    def preprocess(self, split: Split) -> list[Any]:
        chain: list[Any] = [DecodeImage("L"), CheckLabel(10)]
        return [*chain, Jiggle()] if split == "train" else chain

    def model(self) -> nn.Module:
        from torch import nn

        def block(inputs: int, outputs: int) -> list[nn.Module]:
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

        return nn.Sequential(
            *block(1, 16), *block(16, 32), *block(32, 64), nn.Flatten(), nn.Linear(64 * 16, 10)
        )
