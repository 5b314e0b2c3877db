"""Every host: columns whose rows differ in length, and their padded arrays in a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stoker.errors import SchemaError
from stoker.messages import Pad, Record
from stoker.read.base import record_id

LENGTH_SUFFIX = "_length"
"""Suffix of the batch column with the length of each row of a padded column."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """Every host: concatenated rows: row i is values[offsets[i] : offsets[i + 1]].

    Implements what column code needs of an array: `dtype`, `shape` (its second number is -1), `nbytes`, a
    length, and slices.
    """

    values: Any
    offsets: Any
    """int64, from 0 to the number of values; one more than there are rows."""

    @classmethod
    def of(cls, rows: list[Any], dtype: str) -> Ragged:
        """Chain worker: build from arrays that differ at most in their first dimension."""
        import numpy as np

        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.concatenate(rows).astype(dtype, copy=False), offsets)

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), -1, *self.values.shape[1:])

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.offsets.nbytes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice) -> Ragged:
        """Adjacent rows; their values are views.

        Raises:
            SchemaError: its offsets are invalid.
        """
        refuse_bad_offsets(self.offsets, len(self.values))
        start, stop, _ = rows.indices(len(self))
        offsets = self.offsets[start : max(start, stop) + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def refuse_bad_offsets(offsets: Any, values: int) -> None:
    """Every host: check row offsets against the number of values.

    Raises:
        SchemaError: they do not divide the values into rows.
    """
    if offsets[0] != 0 or offsets[-1] != values or (offsets[1:] < offsets[:-1]).any():
        raise SchemaError(
            f"row offsets from {offsets[0]} to {offsets[-1]} do not divide {values} values: damaged block"
        )


def padded_length(length: int, pad: Pad) -> int:
    """Every host: to how much a batch fills up its longest row."""
    return -(-length // pad.multiple) * pad.multiple


def too_long(record: Record, pads: Mapping[str, Pad], limit: int) -> str:
    """Chain worker: which padded column of a record is longer than `data.max_tokens`; empty: none."""
    for name, pad in pads.items():
        if (length := padded_length(_length(record.get(name)), pad)) > limit:
            return f"{name} has {length} tokens, more than data.max_tokens={limit}; cut it in the chain"
    return ""


def padded(name: str, parts: list[Ragged], pad: Pad, empty: Callable[..., Any]) -> dict[str, Any]:
    """Train worker: the rows of all parts in one array, padded to the longest, and their lengths.

    Args:
        name: of the column.
        parts: at least one.
        pad: fill value and multiple.
        empty: creates an array of a shape and dtype.
    """
    import numpy as np

    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    width = padded_length(int(lengths.max(initial=0)), pad)
    batch = empty((len(lengths), width, *parts[0].values.shape[1:]), parts[0].dtype)
    batch[...] = pad.value
    at = 0
    for part in parts:
        for row, (start, stop) in enumerate(pairwise(part.offsets.tolist()), at):
            batch[row, : stop - start] = part.values[start:stop]
        at += len(part)
    return {name: batch, name + LENGTH_SUFFIX: lengths}


def bucketed(records: list[Record], column: str, seed: str) -> list[Record]:
    """Chain worker: the records of a block, with similar lengths next to each other.

    Lengths ascend through every second one and descend through the others, starting at a random place. So
    wherever batches begin, their rows have similar lengths, and no length has a fixed place in a block. The
    order depends only on the seed and the records: a remade block has the same order.
    """
    import numpy as np

    lengths = [_length(record.get(column)) for record in records]
    rising = np.argsort(lengths, kind="stable")
    circle = np.concatenate([rising[::2], rising[1::2][::-1]])
    rng = np.random.default_rng(record_id("/".join([seed, *(record["key"] for record in records)])))
    return [records[i] for i in np.roll(circle, rng.integers(len(circle)))]


def _length(value: Any) -> int:
    # Where batches pad, anything but an array is refused.
    return len(value) if getattr(value, "shape", ()) or isinstance(value, list | tuple | str | bytes) else 0
