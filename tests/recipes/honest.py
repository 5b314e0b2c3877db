"""Honest recipes: none of them may be refused, and none may get a note or advice that would spoil it."""

from __future__ import annotations

import io
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from stoker.data import (
    Boxes,
    DecodeImage,
    DecodeMask,
    KeyPoints,
    RecordTransform,
    read_torch,
)
from stoker.recipe import Recipe


def picture(seed: int, channels: int = 3) -> Any:
    y, x = np.mgrid[0:24, 0:24].astype(float)
    waves = np.random.default_rng(seed).random((channels, 3))
    parts = [127 + 100 * np.sin(x * a / 9 + y * b / 9 + c * 6) for a, b, c in waves]
    pixels = np.stack(parts, -1).clip(0, 255).astype(np.uint8)
    return pixels[..., 0] if channels == 1 else pixels


def encoded(pixels: Any) -> bytes:
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def mask(seed: int) -> Any:
    return (picture(seed, 1) > 120).astype(np.uint8)


class Base(Recipe):
    chain: ClassVar[tuple[Any, ...]] = ()
    shapes: ClassVar[str] = ""
    """What a batch holds: columns and the shapes of a record in them."""

    def row(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def read(self, split: str) -> Any:
        return read_torch([self.row(index) for index in range(16 if split == "train" else 8)])

    def preprocess(self, split: str) -> list[Any]:
        return list(self.chain)

    def model(self) -> Any:
        return nn.Linear(1, 2)

    def training_step(self, model: Any, batch: Any) -> Any:
        for name, shape in (column.split() for column in filter(None, self.shapes.split(", "))):
            assert "×".join(map(str, batch[name].shape[1:])) == shape, (name, batch[name].shape)
            assert type(batch[name]) is torch.Tensor
        return model(torch.ones(2, 1)).mean()

    def validation_step(self, model: Any, batch: Any) -> Any:
        return {"loss": self.training_step(model, batch)}

    def metrics(self) -> dict[str, Any]:
        return {}


class Siamese(Base):
    """Triplets of grey pictures: each is augmented for itself, here only the anchor."""

    def row(self, index: int) -> dict[str, Any]:
        names = ("image", "positive", "negative")
        return {n: picture(index + i, 1) for i, n in enumerate(names)} | {"label": index % 2}

    def preprocess(self, split: str) -> list[Any]:
        return [v2.RandomHorizontalFlip()] if split == "train" else []


class BinaryLate(Base):
    """Masks of 0 and 255, divided on the device: "pass ignore_index=255" would ignore all of the foreground."""

    class_names = ("background", "nerve")
    chain = (DecodeImage("L"), DecodeMask("mask"), v2.RandomCrop(16))
    shapes = "image 1×16×16, mask 16×16"

    def row(self, index: int) -> dict[str, Any]:
        return {"image": encoded(picture(index, 1)), "mask": encoded(mask(index) * 255)}


class Turn(RecordTransform):
    def __call__(self, record: Any, rng: Any) -> Any:
        turns = int(rng.integers(4))
        return {**record, **{n: np.rot90(record[n], turns).copy() for n in ("image", "policy")}}


class Boards(Base):
    """Binary planes of a board: 0 and 1 are what they are."""

    chain = (Turn(),)

    def row(self, index: int) -> dict[str, Any]:
        planes = np.random.default_rng(index).integers(0, 2, (19, 19, 3)).astype(np.uint8)
        return {"image": planes, "policy": np.zeros((19, 19), np.int64)}


class Depths(Base):
    """Depths of the camera's view in metres, NaN where nothing was measured; colours alone are changed."""

    chain = (DecodeImage(), v2.ColorJitter(0.2))
    shapes = "image 3×24×24, depth 24×24"

    def row(self, index: int) -> dict[str, Any]:
        depth = np.where(mask(index), picture(index, 1) / np.float32(50), np.nan)
        return {"image": encoded(picture(index)), "depth": depth.astype(np.float32)}


class Views(Base):
    """Four views of an object in one tensor, all of them cropped alike."""

    chain = (v2.RandomCrop(16), v2.RandomHorizontalFlip())
    shapes = "image 4×3×16×16, labels 4"

    def row(self, index: int) -> dict[str, Any]:
        views = torch.from_numpy(
            np.stack([picture(index + i).transpose(2, 0, 1) for i in range(4)])
        )
        return {"image": views, "labels": np.full(4, -100)}


class Instances(Base):
    """Numbers of instances beyond 255, as in the files of Cityscapes, and their boxes, which may be none."""

    chain = (DecodeImage(), DecodeMask("ids"), Boxes("boxes"), v2.RandomHorizontalFlip())
    pad: ClassVar[dict[str, int]] = {"boxes": 0}
    shapes = "image 3×24×24, ids 24×24"

    def row(self, index: int) -> dict[str, Any]:
        ids = mask(index).astype(np.uint16) * (26_000 + index)
        boxes = np.array([[2, 2, 9, 9]] * (index % 3), np.float32).reshape(-1, 4)
        return {"image": encoded(picture(index)), "ids": encoded(ids), "boxes": boxes}


class Detectors(Base):
    """Counts of a detector in 16 bits, which the model scales itself, and floats that are normalised here."""

    chain = (v2.RandomVerticalFlip(), v2.ToDtype(torch.float32), v2.Normalize([900.0], [300.0]))
    shapes = "image 1×24×24, raw 24×24"

    def row(self, index: int) -> dict[str, Any]:
        counts = picture(index, 1).astype(np.uint16) * 9
        return {"image": counts[..., None], "raw": counts}


class Poses(Base):
    """Key points that move with the picture, and which of them are visible; some records are repeated."""

    chain = (DecodeImage(), KeyPoints("keypoints"), v2.RandomHorizontalFlip(), v2.CenterCrop(20))
    shapes = "image 3×20×20, keypoints 17×2, visible 17"

    def row(self, index: int) -> dict[str, Any]:
        points = np.full((17, 2), index % 4, np.int64)
        return {
            "image": encoded(picture(index % 4)),
            "keypoints": points,
            "visible": np.ones(17, bool),
        }


GIVEN = ("Siamese", "BinaryLate", "Boards")
MORE = ("Depths", "Views", "Instances", "Detectors", "Poses")
