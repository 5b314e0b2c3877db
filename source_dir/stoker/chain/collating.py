"""Records of a recipe whose `collate` method makes a batch of them.

Chain workers pack them as rows of bytes; block servers call `collate` as a batch is asked for.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import pairwise
from typing import Any

from stoker.chain.columns import BATCHABLE, Ragged
from stoker.chain.picture import channels_last
from stoker.errors import SchemaError, where_raised
from stoker.protocol import HWC_SUFFIX, ID_COLUMN, KEY_COLUMN, RECORD_COLUMN, Record
from stoker.read.generators import HeldGenerators
from stoker.read.sources import seed_globals
from stoker.recipe import SOURCE_FOLDER, Recipe, load_recipe

CollateFn = Callable[[list[Record]], Any]
SHOWN_KEYS = 3


def collate_of(path: str, params: dict[str, Any]) -> CollateFn:
    """The `collate` of a recipe; pickled, so that each process creates the recipe for itself."""
    return partial(_collate, pickle.dumps((path, params)))


def _collate(recipe: bytes, records: list[Record]) -> Any:
    return _opened(recipe).collate(records)


@cache
def _opened(recipe: bytes) -> Recipe:
    """One object per process, so that what `collate` keeps in it is created once."""
    path, params = pickle.loads(recipe)  # noqa: S301 - written by the head or a train worker
    return load_recipe(path, params, SOURCE_FOLDER)


@cache
def _held(recipe: bytes) -> HeldGenerators:
    return HeldGenerators(_opened(recipe))


def as_rows(records: list[Record]) -> dict[str, Ragged]:
    """Records of any shape as one column, a row of bytes for each."""
    import numpy as np

    rows = []
    for record in records:
        try:
            content = pickle.dumps(dict(_plain(record)), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise SchemaError(
                f"record {record['key']} cannot be sent to collate: {where_raised(error)}; drop in the chain"
                " what cannot be pickled"
            ) from error
        rows.append(np.frombuffer(content, np.uint8))
    return {RECORD_COLUMN: Ragged.of(rows, "uint8")}


def _plain(record: Record) -> Iterator[tuple[str, Any]]:
    """Tensors as arrays; an image that is height × width × channels is marked, as `finished_columns` does."""
    for name, value in record.items():
        if name == "image" and channels_last(value):
            yield name + HWC_SUFFIX, value
        else:
            yield name, value.numpy() if hasattr(value, "numpy") else value


def records_of(rows: Ragged) -> list[Record]:
    content = memoryview(rows.values)
    ends = rows.offsets.tolist()
    return [pickle.loads(content[a:b]) for a, b in pairwise(ends)]  # noqa: S301 - of the job's chain workers


def collated(collate: CollateFn, records: list[Record], seed: str) -> dict[str, Any]:
    keys = [str(record.get("key")) for record in records]
    try:
        held = _held(*collate.args) if isinstance(collate, partial) else HeldGenerators(collate)
        seed_globals(seed)
        held.seed(seed)
        spare = held.spare(records)
        batch = collate([_as_tensors(record) for record in records])
        if held.created():
            seed_globals(seed)
            batch = collate([_as_tensors(record) for record in spare or ()])
    except Exception as error:
        which = ", ".join(keys[:SHOWN_KEYS]) + (", …" if keys[SHOWN_KEYS:] else "")
        raise SchemaError(f"collate: {where_raised(error)}, with records {which}") from error
    named = isinstance(batch, Mapping) and all(isinstance(name, str) for name in batch)
    if not named or not batch:
        what = f"{type(batch).__name__}{'' if batch else ' without entries'}"
        raise SchemaError(f"collate returned a {what}; return a dict: names → tensors or lists")
    return {name: _checked(name, value, len(records)) for name, value in batch.items()}


def _as_tensors(record: Record) -> Record:
    found = {}
    for name, value in record.items():
        if name != "key":
            tensor = _tensor_of(value)
            if tensor is not None and name.endswith(HWC_SUFFIX):
                tensor = tensor.permute(2, 0, 1)
            found[name.removesuffix(HWC_SUFFIX)] = value if tensor is None else tensor
    return found


def _tensor_of(value: Any) -> Any:
    """An array as a tensor; None: it is no array, or of a kind that has no tensor."""
    import numpy as np

    # A mask would be lost without a word.
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        return None
    if value.dtype.name not in BATCHABLE:
        return None
    import torch

    value = value.astype(value.dtype.newbyteorder("="), copy=False)
    if not value.flags.writeable or any(stride < 0 for stride in value.strides):
        value = value.copy()
    return torch.from_numpy(value)


def _checked(name: str, value: Any, records: int) -> Any:
    import torch

    tensor = value.detach() if isinstance(value, torch.Tensor) else _tensor_of(value)
    if tensor is not None:
        value, rows = tensor, tensor.shape[0] if tensor.ndim else None
    else:
        value = list(value) if isinstance(value, tuple) else value
        rows = len(value) if isinstance(value, list) else None
    if rows != records:
        what = f"a {type(value).__name__}" if rows is None else f"{rows} rows"
        raise SchemaError(
            f"collate returned {what} as {name!r} for {records} records; return tensors whose first dimension"
            " is the record, or lists with one item per record"
        )
    return value


def seed_of(seed: int, split: str, epoch: int, ids: Any) -> str:
    """What the draws of `collate` depend on: seed, pass, and the ids of the batch's records.

    Validation is the same in every epoch, as its chain is.
    """
    return f"{seed}/{epoch if split == 'train' else 0}/collate/{split}/{','.join(map(str, ids.tolist()))}"


def all_of(parts: Iterable[tuple[dict[str, Any], int, int]]) -> tuple[list[Record], Any, list[str]]:
    """The records of a batch, their ids and, if the run records them, their keys."""
    import numpy as np

    records: list[Record] = []
    ids, keys = [np.empty(0, np.int64)], []
    for columns, start, stop in parts:
        records += records_of(columns[RECORD_COLUMN][start:stop])
        ids.append(columns[ID_COLUMN][start:stop])
        keys += [str(key) for key in columns.get(KEY_COLUMN, ())[start:stop]]
    return records, np.concatenate(ids), keys
