"""Recipes with data that somebody should look at before training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from stoker.data import (
    BadRecord,
    Boxes,
    DecodeMask,
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


class Broken(RecordTransform):
    """Fails on every fourth record, as code for another data set does."""

    random = False

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        if record["label"] % 4 == 0:
            raise KeyError(f"annotation of {record['key']}")
        return record


class Counting(RecordTransform):
    """Gives each record the number of those before it in this process."""

    count = 0

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        type(self).count += 1
        return {**record, "count": self.count}


class Drawn(RecordTransform):
    """Draws from `rng`, from a generator of its own and from one that it creates late: all are seeded."""

    def __init__(self) -> None:
        self.own, self.late = np.random.default_rng(0), list[Any]()

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        self.late = self.late or [np.random.default_rng(1)]
        return {**record, "drawn": [rng.random(), self.own.random(), self.late[0].random()]}


class Shapes(RecordTransform):
    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        return {**record, "image": record["image"][: 10 + record["label"]]}


def whole(batch: dict[str, Any]) -> dict[str, Any]:
    mean = batch["image"].mean((1, 2, 3))
    return {"image": batch["image"], "label": batch["label"], "mean": mean}


def as_array(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "drawn": np.stack([*map(np.array, batch["drawn"])])}


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
            "broken": [*dropped("note"), Broken()],
            "counts": [*dropped("note"), Counting()],
            "drawn": [*dropped("note"), Drawn(), as_array],
            "shapes": [*dropped("note"), Shapes()],
            "batch": [*dropped("note"), whole],
            "raises": [*dropped("note"), raises],
            "boxes": [*dropped("note"), DecodeMask(), Boxes(), v2.RandomHorizontalFlip(1.0)],
        }
        return chains[self.chain]


class Refusing(RecordTransform):
    random = False

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        raise ValueError(f"no frame 10 of 31 in record {record['key']}")


class Numbered(Recipe):
    """Records with digits for keys, all of which fail for one reason."""

    def read(self, split: str) -> Any:
        return read_torch([{"number": number} for number in range(12)])

    def preprocess(self, split: str) -> list[Any]:
        return [Refusing()]
