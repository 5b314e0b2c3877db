"""Sources with numbered records: a range of numbers, and map-style PyTorch datasets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from stoker.errors import UsageError
from stoker.protocol import BadRecord, Record, Shard
from stoker.read.sources import IndexedSource, Source, cut_indices, digest, put_back, read_again, states

if TYPE_CHECKING:
    import numpy as np


class NumberedSource(IndexedSource):
    """Records 0 … count-1; the keys are these numbers."""

    @abstractmethod
    def count(self) -> int: ...

    def shards(self, records: int, order: np.random.Generator | None, homes: int = 0) -> list[Shard]:
        return cut_indices(self.count(), records, order, homes)

    def listing(self, shard: Shard) -> list[tuple[str, Shard]]:
        return [(str(index), Shard("", items=(index,))) for index in shard.items]


class RangeSource(NumberedSource):
    """The numbers 0 … n-1 as records of one column `index`."""

    random = False

    def __init__(self, n: int) -> None:
        if n < 1:
            raise UsageError(f"read_range({n}): a split needs at least one record")
        self.n = n

    def count(self) -> int:
        return self.n

    def fingerprint(self) -> str:
        return digest("range", self.n)

    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        for index in shard.items:
            yield {"key": str(index), "index": index}


class TorchSource(NumberedSource):
    """A map-style `torch.utils.data.Dataset`.

    An item is a dict of columns, or a tuple of `columns`. An item that raises is a bad record.
    """

    def __init__(self, dataset: Any, columns: tuple[str, ...] = ("image", "label")) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UsageError(
                f"read_torch({type(dataset).__name__}): needs a map-style dataset, with __len__ and"
                " __getitem__"
            )
        self.dataset = dataset
        self.columns = columns

    def check(self) -> None:
        if len(self.dataset) == 0:
            raise UsageError(f"read_torch({type(self.dataset).__name__}): the dataset is empty")

    def classes(self) -> list[str] | None:
        """The names that torchvision's datasets have as `classes`, also below a Subset."""
        inner = self.dataset
        while type(inner).__name__ == "Subset":
            inner = inner.dataset
        names = getattr(inner, "classes", None)
        known = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        return list(names) if known and names else None

    def count(self) -> int:
        return len(self.dataset)

    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        for index in shard.items:
            rewind = partial(put_back, states())
            item = read_again(str(index), partial(self.dataset.__getitem__, index), rewind, far=True)
            if isinstance(item, BadRecord):
                yield item
                continue
            if not isinstance(item, dict):
                values = item if isinstance(item, tuple | list) else (item,)
                if len(values) != len(self.columns):
                    raise UsageError(
                        f"read_torch({type(self.dataset).__name__}): item {index} has {len(values)} values,"
                        f" but columns= names {len(self.columns)}: {', '.join(self.columns)}"
                    )
                item = dict(zip(self.columns, values, strict=True))
            # Hugging Face's Image(decode=False).
            encoded = {name: v["bytes"] for name, v in item.items() if _is_encoded(v)}
            yield {"key": str(index), **item, **encoded}


def _is_encoded(value: Any) -> bool:
    return type(value) is dict and value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes)


def read_torch(dataset: Any, columns: tuple[str, ...] = ("image", "label")) -> Source:
    """A map-style PyTorch dataset; `columns` names the values of tuples."""
    return TorchSource(dataset, columns)


def read_range(n: int) -> Source:
    """`n` records with only the column `index`; the chain makes the rest."""
    return RangeSource(n)
