"""Recipes with data that somebody should look at before training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from stoker.data import (
    BadRecord,
    Joint,
    Record,
    RecordTransform,
    Shard,
    Source,
    cut_indices,
    read_torch,
)
from stoker.recipe import Recipe


class Made(Source):
    def __init__(self, records: int) -> None:
        self.records = records

    def count(self) -> int:
        return self.records

    def fingerprint(self) -> str:
        return str(self.records)

    def shards(self, records: int, order: Any) -> list[Shard]:
        return cut_indices(self.records, records, order)

    def read(self, shard: Shard, order: Any) -> Iterator[Record | BadRecord]:
        for i in shard.items:
            yield {
                "key": f"<b>{i}</b>",
                "image": np.full((24, 32, 3), i % 250, np.uint8) + np.arange(3, dtype=np.uint8),
                "mask": np.pad(np.ones((8, 8), np.uint8), ((4, 12), (6, 18))),
                "boxes": np.array([[6, 4, 14, 12]], np.float32),
                "label": i % 12,
                "caption": f"<script>alert({i})</script>",
                "source": "camera",
                "note": None,
            }


class Normalised(RecordTransform):
    """Floats around zero, with a NaN in one record."""

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        image = record["image"].astype(np.float32) / 127.5 - 1
        if record["key"] == "<b>3</b>":
            image[0, 0] = np.nan
        return {**record, "image": image}


class Broken(RecordTransform):
    """Fails on every fourth record, as code for another data set does."""

    random = False

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        if record["label"] % 4 == 0:
            raise KeyError(f"annotation of {record['key']}")
        return record


class Unlabelled(RecordTransform):
    """Masks whose first row belongs to no class, and the second one to that of a larger data set."""

    def __init__(self, second: int = 0) -> None:
        self.second = second

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        mask = record["mask"].copy()
        mask[0], mask[1] = 255, self.second
        return {**record, "mask": mask}


class Halved(RecordTransform):
    """Masks at half the resolution, so that nothing says that they show the same as the image."""

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        return {**record, "target": record["target"][::2, ::2]}


class Shapes(RecordTransform):
    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        return {**record, "image": record["image"][: 10 + record["label"]]}


def whole(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        "image": batch["image"],
        "label": batch["label"],
        "mean": batch["image"].mean((1, 2, 3)),
    }


def raises(batch: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("no such table")


def dropped(*columns: str) -> list[Any]:
    from stoker.data import Drop

    return [Drop(*columns)]


class LookedAt(Recipe):
    """One kind of trouble, as `chain` names it."""

    chain: str = "fine"
    records: int = 60
    num_classes: int = 12

    def read(self, split: str) -> Any:
        return Made(self.records) if split == "train" else Made(7)

    def preprocess(self, split: str) -> list[Any]:
        from torchvision.transforms import v2

        chains: dict[str, list[Any]] = {
            "fine": dropped("note"),
            "null": [],
            "normalised": [*dropped("note"), Normalised()],
            "broken": [*dropped("note"), Broken()],
            "unlabelled": [*dropped("note", "caption", "source"), Unlabelled()],
            "beyond": [*dropped("note", "caption", "source"), Unlabelled(30)],
            "shapes": [*dropped("note"), Shapes()],
            "batch": [*dropped("note"), whole],
            "raises": [*dropped("note"), raises],
            "alone": [*dropped("note"), v2.RandomHorizontalFlip(), Joint(v2.Resize(16))],
            "boxes": [*dropped("note"), Joint(v2.RandomHorizontalFlip(1.0), ["mask"], ["boxes"])],
        }
        return chains[self.chain]


class Arrays:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        image = np.random.default_rng(i).integers(0, 255, (3, 24, 32), np.uint8)
        return image, (image[0] > 128).astype(np.int64), np.arange(24)


class Plain(Recipe):
    chain: str = "flip"

    def read(self, split: str) -> Any:
        return read_torch(Arrays(), ("image", "target", "rows"))

    def preprocess(self, split: str) -> list[Any]:
        from torchvision.transforms import v2

        flip = v2.RandomHorizontalFlip()
        chains: dict[str, list[Any]] = {
            "flip": [flip],
            "crop": [v2.RandomCrop(16)],
            "resize, flip": [v2.Resize((12, 16)), flip],
            "flip, drop": [flip, *dropped("target")],
            "colour": [v2.ColorJitter(0.1)],
            "flip of other sizes": [Halved(), flip],
        }
        return chains[self.chain]
