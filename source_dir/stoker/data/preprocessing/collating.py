"""Chain worker and CPU host: records of a recipe with a `collate` method, which turns them into a batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from stoker.data.messages import HWC_SUFFIX, ID_COLUMN, KEY_COLUMN, RECORD_COLUMN, Record
from stoker.data.preprocessing.picture import is_hwc
from stoker.data.preprocessing.ragged import Ragged
from stoker.data.sources.seeding import seed_globals
from stoker.errors import SchemaError, where_raised

Collate = Callable[[list[Record]], Any]


def as_rows(records: list[Record]) -> dict[str, Ragged]:
    """Chain worker: records of any shape as one column, a row of bytes for each."""
    import numpy as np

    rows = [
        np.frombuffer(pickle.dumps(dict(_plain(each)), protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
        for each in records
    ]
    return {RECORD_COLUMN: Ragged.of(rows, "uint8")}


def _plain(record: Record) -> Iterator[tuple[str, Any]]:
    """Tensors as arrays; an image that is height × width × channels is marked, as `columns.leave` does."""
    import numpy as np

    for name, value in record.items():
        if name == "image" and type(value) is np.ndarray and is_hwc(value.shape):
            yield name + HWC_SUFFIX, value
        elif name != "key":
            yield name, value.numpy() if hasattr(value, "numpy") else value


def records_of(rows: Ragged) -> list[Record]:
    """CPU host: the records of `as_rows`."""
    content = memoryview(rows.values)
    ends = rows.offsets.tolist()
    # Written by a chain worker of this run.
    return [pickle.loads(content[a:b]) for a, b in pairwise(ends)]  # noqa: S301


def collated(collate: Collate, records: list[Record], seed: str) -> dict[str, Any]:
    """CPU host: call a recipe's `collate`.

    Args:
        collate: takes a list of records whose arrays are tensors, images as CHW; returns a dict.
        records: of one batch.
        seed: of the global generators, from which it may draw.

    Returns:
        Tensors whose first dimension is the record, and lists with one item per record.

    Raises:
        SchemaError: it raised an exception, or returned something else.
    """
    seed_globals(seed)
    try:
        batch = collate(
            [{n.removesuffix(HWC_SUFFIX): _as_tensor(n, v) for n, v in r.items()} for r in records]
        )
    except Exception as error:
        raise SchemaError(f"collate: {where_raised(error)}") from error
    if not isinstance(batch, Mapping) or not batch or not all(isinstance(name, str) for name in batch):
        what = f"{type(batch).__name__}{'' if batch else ' without entries'}"
        raise SchemaError(f"collate returned a {what}; return a dict: names → tensors or lists")
    return {name: _checked(name, value, len(records)) for name, value in batch.items()}


def _as_tensor(name: str, value: Any) -> Any:
    import numpy as np

    # Strings and objects have no tensors.
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        return value
    import torch

    tensor = torch.from_numpy(value)
    return tensor.permute(2, 0, 1) if name.endswith(HWC_SUFFIX) else tensor


def _checked(name: str, value: Any, records: int) -> Any:
    import numpy as np
    import torch

    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        value = value.detach()
        rows = value.shape[0] if value.ndim else None
    else:
        rows = len(value) if isinstance(value, list | tuple) else None
    if rows != records:
        what = f"a {type(value).__name__}" if rows is None else f"{rows} rows"
        raise SchemaError(
            f"collate returned {what} as {name!r} for {records} records; return tensors whose first dimension"
            " is the record, or lists with one item per record"
        )
    return value


def seed_of(seed: int, split: str, epoch: int, ids: Any) -> str:
    """CPU host: what the draws of `collate` depend on: seed, pass, and the ids of the batch's records."""
    return f"{seed}/{epoch}/collate/{split}/{','.join(map(str, ids.tolist()))}"


def all_of(parts: Iterable[tuple[dict[str, Any], int, int]]) -> tuple[list[Record], Any, list[str]]:
    """CPU host: the records of a batch, their ids and, if the run records them, their keys.

    Args:
        parts: columns of a block, and its first row and the one after its last.
    """
    import numpy as np

    records: list[Record] = []
    ids, keys = [np.empty(0, np.int64)], []
    for columns, start, stop in parts:
        records += records_of(columns[RECORD_COLUMN][start:stop])
        ids.append(columns[ID_COLUMN][start:stop])
        keys += [str(key) for key in columns.get(KEY_COLUMN, ())[start:stop]]
    return records, np.concatenate(ids), keys
