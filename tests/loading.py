"""Datasets for tests of `stoker.DataLoader`, each made of a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


def itself(index: Any) -> Any:
    return index


class Records(Dataset[Any]):
    def __init__(self, get: Callable[[int], Any] = itself, count: int = 43) -> None:
        self.get, self.count = get, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.get(index)


class Together(Records):
    """`get` makes all records of a batch at once."""

    def __getitems__(self, indices: Any) -> list[Any]:
        records: list[Any] = self.get(indices)
        return records


class Stream(IterableDataset[Any]):
    """What `read` yields for the number of the worker and how many there are: 0 and 1 without workers."""

    def __init__(self, read: Callable[[int, int], Iterable[Any]]) -> None:
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        yield from self.read(info.id, info.num_workers) if info else self.read(0, 1)


def row(index: int) -> Any:
    """What collates to a tensor, numbers and names, nested."""
    return torch.full((2,), float(index)), index, {"name": f"record {index}"}
