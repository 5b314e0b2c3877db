"""Recipes whose code draws random numbers as ordinary datasets and transforms do: from global generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from stoker.data import (
    Record,
    RecordTransform,
    Shard,
    Source,
    StreamedSource,
    read_range,
    read_torch,
)
from stoker.recipe import Recipe


def drawn() -> dict[str, float]:
    import torch

    return {"r": random.random(), "n": float(np.random.rand()), "t": float(torch.rand(()))}


class Augmenting:
    """A map-style dataset as they are: it draws in `__getitem__`."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, **drawn()}


class AugmentingSource(Source):
    def __init__(self, n: int) -> None:
        self.n = n

    def count(self) -> int:
        return self.n

    def shards(self, records: int, order: Any) -> list[Shard]:
        return [Shard("", i, min(i + records, self.n)) for i in range(0, self.n, records)]

    def read(self, shard: Shard, order: Any) -> Any:
        for i in range(shard.start, shard.stop):
            yield {"key": f"k{i}", "number": i, **drawn()}


class Augment(RecordTransform):
    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        return {**record, "number": record["index"], **drawn()}


def augment(batch: dict[str, Any]) -> dict[str, Any]:
    import torch

    n = len(batch["index"])
    return {
        "number": batch["index"],
        "r": np.array([random.random() for _ in range(n)]),
        "n": np.random.rand(n),
        "t": torch.rand(n).double().numpy(),
    }


class Draws(Recipe):
    where: str = "dataset"
    n: int = 60

    def read(self, split: str) -> Any:
        if split == "val":
            return None
        if self.where == "dataset":
            return read_torch(Augmenting(self.n))
        return AugmentingSource(self.n) if self.where == "source" else read_range(self.n)

    def preprocess(self, split: str) -> list[Any]:
        return {"transform": [Augment()], "batch": [augment]}.get(self.where, [])


class Split(Recipe):
    n: int = 100

    def read(self, split: str) -> Any:
        from torch.utils.data import random_split

        numbers = [{"number": i} for i in range(self.n)]
        train, val = random_split(numbers, [0.8, 0.2])  # type: ignore[arg-type]
        return read_torch(train if split == "train" else val, cacheable=True)


class Halves(Recipe):
    n: int = 40

    def read(self, split: str) -> Any:
        from torch.utils.data import Subset

        numbers = [{"number": i} for i in range(self.n)]
        half = self.n // 2
        part = range(half) if split == "train" else range(half, self.n)
        return read_torch(Subset(numbers, list(part)), cacheable=True)  # type: ignore[arg-type]

    def preprocess(self, split: str) -> list[Any]:
        return [Plain()]


class Listed(StreamedSource):
    """Shards that differ by their items alone, in an order that is known; `keys` repeats after so many."""

    random = False

    def __init__(self, n: int, keys: int = 10**9) -> None:
        self.n, self.keys = n, keys

    def count(self) -> int:
        return self.n

    def shards(self, records: int, order: Any) -> list[Shard]:
        return [Shard("", items=tuple(range(i, min(i + 10, self.n)))) for i in range(0, self.n, 10)]

    def arrangement(self, count: int, order: Any) -> list[int]:
        return list(range(count))

    def read(self, shard: Shard, order: Any) -> Any:
        for i in shard.items:
            yield {"key": f"k{i % self.keys}", "number": i}


class Plain(RecordTransform):
    random = False

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        return {**record, "number": record.get("number", 0)}


class Cached(Draws):
    def preprocess(self, split: str) -> list[Any]:
        return [Plain()]
