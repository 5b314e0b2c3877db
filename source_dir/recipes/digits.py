"""Handwritten digits: the built-in recipe with a chain and a small network of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.data.transforms import CheckLabel, DecodeImage
from stoker.image_classification import ImageClassification
from stoker.recipe import Split

if TYPE_CHECKING:
    from torch import nn


class Digits(ImageClassification):
    """Grey 32×32 images of ten digits, from tar shards, Parquet or class folders alike."""

    num_classes: int | None = 10
    image_size: int = 32
    color: str = "L"  # type: ignore[assignment]

    def preprocess(self, split: Split) -> list[Any]:
        from torchvision.transforms import v2

        chain: list[Any] = [DecodeImage("L"), CheckLabel(10)]
        if split == "train":
            chain.append(v2.RandomAffine(degrees=8, translate=(0.06, 0.06), scale=(0.9, 1.1)))
        return chain

    def model(self) -> nn.Module:
        from torch import nn

        def block(inputs: int, outputs: int) -> list[nn.Module]:
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

        return nn.Sequential(
            *block(1, 16), *block(16, 32), *block(32, 64), nn.Flatten(), nn.Linear(64 * 16, 10)
        )
