"""A CPU-heavy chain: ten Gaussian blurs on random images for a Vision Transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from stoker.data import Record, RecordTransform, read_range
from stoker.recipe import Recipe, Split

if TYPE_CHECKING:
    from torch import nn


class RandomImage(RecordTransform):
    """Chain worker: generates a random image (uint8, size × size × 3) and label for an index."""

    def __init__(self, size: int, classes: int) -> None:
        self.size, self.classes = size, classes

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        image = rng.integers(0, 256, (self.size, self.size, 3), dtype=np.uint8)
        return {"key": record["key"], "image": image, "label": int(rng.integers(self.classes))}


class SyntheticViT(Recipe):
    """Random images, `blurs` times GaussianBlur(11), timm's VisionTransformer from scratch."""

    records: int = Field(2048, ge=1, description="training records per epoch")
    val_records: int = Field(0, ge=0, description="validation records; 0: no validation")
    image_size: int = Field(224, ge=16, description="side of the images, pixels")
    num_classes: int = Field(1000, ge=2, description="number of classes of the random labels")
    blurs: int = Field(10, ge=0, description="number of blurs in the chain")
    composed: bool = Field(
        True,
        description="run all blurs as one convolution; false: each in torchvision, at 30 times the cost",
    )
    depth: int = Field(12, ge=1, description="layers of the transformer")
    width: int = Field(
        768, ge=64, description="embedding size of the transformer, a multiple of 64"
    )

    def read(self, split: Split) -> Any:
        count = self.records if split == "train" else self.val_records
        return read_range(count) if count else None

    def preprocess(self, split: Split) -> list[Any]:
        from torchvision.transforms import v2

        class OneByOne(v2.GaussianBlur):  # type: ignore[misc] # torchvision is not typed
            """A subclass, so that Stoker runs it as it is instead of fusing it."""

        blur = v2.GaussianBlur if self.composed else OneByOne
        blurs = [(f"blur {i + 1}", blur(11)) for i in range(self.blurs)]
        return [RandomImage(self.image_size, self.num_classes), *blurs]

    def model(self) -> nn.Module:
        from timm.models.vision_transformer import VisionTransformer

        module: nn.Module = VisionTransformer(
            img_size=self.image_size,
            num_classes=self.num_classes,
            depth=self.depth,
            embed_dim=self.width,
            num_heads=self.width // 64,
        )
        return module

    def on_device(self, split: Split) -> nn.Module:
        from stoker.image_classification import normalize

        return normalize("RGB")
