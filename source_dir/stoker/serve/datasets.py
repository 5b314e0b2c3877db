"""A recipe's `ray.data.Dataset` as a source: Ray Data executes it pass by pass for the head, and chain
workers read its blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from stoker.chain.columns import columns_of
from stoker.messages import BadRecord, Record, Shard
from stoker.read.arrow import content_of_struct, mask_of, values_of
from stoker.read.sources import Source

if TYPE_CHECKING:
    import numpy as np


class DatasetSource(Source):
    """Head and chain worker: see the module.

    Args:
        dataset: what the recipe's `read` returned; None on chain workers.
    """

    random = False

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def shards(self, records: int, order: np.random.Generator | None) -> list[Shard]:
        """Head: empty; shards are unknown until the dataset runs, see `blocks`."""
        return []

    def blocks(self, seed: int | None, exact: bool) -> Iterator[Shard]:
        """Head: execute the dataset once.

        Args:
            seed: permutes its blocks; None: keep their order.
            exact: yield them in the same order in every run.
        """
        dataset = self.dataset if seed is None else self.dataset.randomize_block_order(seed=seed)
        dataset.context.enable_progress_bars = False
        dataset.context.execution_options.preserve_order = exact
        first = 0
        for bundle in dataset.iter_internal_ref_bundles():
            for entry in bundle.blocks:
                if rows := entry.metadata.num_rows:
                    yield Shard("", first, first + rows, rows, (entry.ref,), name="rows")
                    first += rows

    def first_rows(self, count: int) -> list[Record]:
        """Head or train worker: a few example rows."""
        return as_records(self.dataset.take_batch(count, batch_format="pyarrow"))

    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        """Chain worker: the rows of a block."""
        import ray

        records = as_records(ray.get(shard.items[0]))
        yield from records if order is None else (records[i] for i in order.permutation(len(records)))

    def count(self) -> int | None:
        """Head: None, because counting would mean reading."""
        return None

    def for_workers(self) -> Source:
        """Head: a copy without the dataset; chain workers receive its blocks."""
        return DatasetSource(None)

    def fingerprint(self) -> str:
        """Head: empty; a pipeline does not identify its records."""
        return type(self.dataset).__name__


def as_records(block: Any) -> list[Record]:
    """Chain worker: the rows of a block as records; rows without a key get one from their content.

    NULL becomes None and the other numbers keep their type: as an array, an integer column with a NULL would
    become float.
    """
    columns = columns_of(block)
    values: dict[str, Any] = {
        name: lambda row, column=column: _scalar(column[row]) for name, column in columns.items()
    }
    if hasattr(block, "schema"):
        for name in columns:
            mask = mask_of(block[name])
            if mask is not None:
                values[name] = partial(_or_none, mask, values_of(block[name]))
            elif content_of_struct(block[name].type):
                values[name] = values_of(block[name])
    count = len(next(iter(columns.values()))) if columns else 0
    rows = [{name: value(row) for name, value in values.items()} for row in range(count)]
    return [{**row, "key": _key(row)} for row in rows]


def _or_none(mask: Any, value: Callable[[int], Any], row: int) -> Any:
    return None if mask[row] else value(row)


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _key(row: dict[str, Any]) -> str:
    """A row's `key` column, or a hash of its content: rows of a foreign dataset have no other identity."""
    if "key" in row:
        return str(row["key"])
    content = hashlib.blake2b(digest_size=16)
    for name, value in row.items():
        content.update(name.encode())
        content.update(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode())
    return content.hexdigest()
