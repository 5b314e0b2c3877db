"""Records of different lengths whose values are known by their number, in any epoch or process."""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.data import Pad, Record, RecordTransform, read_range
from stoker.recipe import Recipe


def values(index: int) -> list[int]:
    return [index * 100 + i for i in range(index * 7 % 13)]


class Lengthen(RecordTransform):
    random = False

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        ids = np.array(values(record["index"]), np.int64)
        return {
            "key": record["key"],
            "index": record["index"],
            "ids": ids,
            "pairs": np.stack([ids, -ids], 1),
        }


class Lengths(Recipe):
    records: int = 300

    pad = {"ids": -1, "pairs": Pad(0, multiple=4)}  # noqa: RUF012 - as recipes declare it

    def read(self, split: str) -> Any:
        return read_range(self.records) if split == "train" else None

    def preprocess(self, split: str) -> list[Any]:
        return [Lengthen()]
