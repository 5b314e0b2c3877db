"""Recipes whose data lack values, or end the process that reads them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from rows import Counting, Numbers

from stoker.data import Record, RecordTransform
from stoker.image_classification import ImageClassification
from stoker.recipe import Recipe


class RayRows(Recipe):
    """A `ray.data.Dataset` with a NULL among integers, text and an array per row."""

    records: int = 60

    def read(self, split: str) -> Any:
        import pyarrow as pa
        import ray

        if split == "val":
            return None
        n = self.records
        table = pa.table(
            {
                "key": [f"k{i}" for i in range(n)],
                "x": pa.array([None if i == 7 else 2**53 + i for i in range(n)], pa.int64()),
                "word": [f"w{i}" for i in range(n)],
                "v": [[i / 2, i / 4] for i in range(n)],
            }
        )
        return ray.data.from_arrow([table.slice(i, 20) for i in range(0, n, 20)])


class Worded(ImageClassification):
    def read(self, split: str) -> Any:
        import ray

        pixels = np.arange(12 * 8 * 8 * 3, dtype=np.uint8).reshape(12, 8, 8, 3)
        words = ["dog", "cat", "dog"] * 4
        if split == "val":
            words[3] = self.data
        rows = [{"key": f"k{i}", "img": pixels[i], "what": word} for i, word in enumerate(words)]
        return ray.data.from_items(rows, override_num_blocks=2)


class Kills(RecordTransform):
    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        if record["key"] == "0":
            os._exit(9)
        return record


class FirstKills(Counting):
    def preprocess(self, split: str) -> list[Any]:
        return [Kills()] if split == "train" else []


class Unloadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)

    def __call__(self, record: Any) -> Any:
        return record


class OnlyHere(Counting):
    def preprocess(self, split: str) -> list[Any]:
        return [Unloadable()] if split == "train" else []


class Optional(Counting):
    def read(self, split: str) -> Any:
        return WithHoles(self.train_records) if split == "train" else None


class WithHoles(Numbers):
    def read(self, shard: Any, order: Any) -> Any:
        for record in super().read(shard, order):
            yield record if int(record["key"]) % 3 == 1 else {**record, "more": 1}
