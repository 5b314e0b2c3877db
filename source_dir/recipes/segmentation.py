"""Discs and squares: CPU hosts crop image and mask together, a small network segments the shapes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from stoker.data import DecodeImage, DecodeMask, read_webdataset
from stoker.image_classification import normalize
from stoker.recipe import Batch, Recipe, Split

if TYPE_CHECKING:
    from torch import Tensor, nn

FOLDER = Path(".data/shapes")
SHARD_RECORDS = 100
IGNORED = 255
"""Pixels of a mask that belong to no class."""


def write(folder: Path = FOLDER, records: int = 600) -> None:
    """Laptop: write tar shards of 48 × 64 images and masks (0 background, 1 disc, 2 square)."""
    from PIL import Image

    rng = np.random.default_rng(11)
    rows, columns = np.mgrid[:48, :64]
    for split, count in (("train", records), ("val", records // 4)):
        (folder / split).mkdir(parents=True, exist_ok=True)
        for first in range(0, count, SHARD_RECORDS):
            with tarfile.open(folder / split / f"{first:05}.tar", "w") as tar:
                for i in range(first, min(first + SHARD_RECORDS, count)):
                    mask = np.zeros((48, 64), np.uint8)
                    for kind in (1, 2):
                        y, x, size = rng.integers(8, 40), rng.integers(8, 56), rng.integers(5, 10)
                        down, right = abs(rows - y), abs(columns - x)
                        mask[
                            (down**2 + right**2 if kind == 1 else np.maximum(down, right) ** 2)
                            < size**2
                        ] = kind
                    colours = rng.integers(0, 100, (3, 3)) + 90 * np.array(
                        [[0, 0, 0], [1, 0, 0], [0, 0, 1]]
                    )
                    image = np.clip(colours[mask] + rng.normal(0, 20, (48, 64, 3)), 0, 255).astype(
                        np.uint8
                    )
                    for suffix, pixels in (("png", image), ("mask.png", mask)):
                        content = io.BytesIO()
                        Image.fromarray(pixels).save(content, "PNG")
                        member = tarfile.TarInfo(f"{i:05}.{suffix}")
                        member.size = content.tell()
                        tar.addfile(member, io.BytesIO(content.getvalue()))


class Shapes(Recipe):
    """Every host: trains a fully convolutional network on images and masks from tar shards."""

    data: str
    classes: int = Field(3, ge=2, description="number of classes in the masks")
    crop: int = Field(32, ge=8, description="side of the random crop, pixels")
    width: int = Field(32, ge=4, description="channels of the network")

    class_names = ("background", "disc", "square")

    def read(self, split: Split) -> Any:
        return read_webdataset(self.data, split, columns=["image", "mask"])

    def preprocess(self, split: Split) -> list[Any]:
        from torchvision import tv_tensors
        from torchvision.transforms import v2

        # Padding and rotations, and CenterCrop of smaller images, would fill the mask with class 0.
        pad = v2.Pad(self.crop, fill={tv_tensors.Mask: IGNORED, tv_tensors.Image: 0})
        random = [v2.RandomCrop(self.crop), v2.RandomHorizontalFlip()]
        crop = v2.Compose(random if split == "train" else [pad, v2.CenterCrop(self.crop)])
        return [DecodeImage(), DecodeMask("mask"), ("crop", crop)]

    def on_device(self, split: Split) -> nn.Module:
        return normalize("RGB")

    def model(self) -> nn.Module:
        from torch import nn

        layers: list[nn.Module] = []
        for inputs, dilation in ((3, 1), (self.width, 2), (self.width, 4), (self.width, 8)):
            layers += [nn.Conv2d(inputs, self.width, 3, padding=dilation, dilation=dilation)]
            layers += [nn.BatchNorm2d(self.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(self.width, self.classes, 1))

    def training_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        import torch.nn.functional as F

        preds, target = model(batch["image"]), batch["mask"].long()
        loss = F.cross_entropy(preds, target, ignore_index=IGNORED)
        return {"loss": loss, "preds": preds, "target": target}

    def metrics(self) -> dict[str, Any]:
        from torchmetrics.classification import MulticlassJaccardIndex

        return {"iou": MulticlassJaccardIndex(self.classes, ignore_index=IGNORED)}
