"""Train worker: the memory of batches, and the batch being assembled from rows of blocks."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from typing import Any

from stoker.chain.columns import Ragged, padded, refuse_bad_offsets, schema_of
from stoker.errors import SchemaError
from stoker.protocol import TEXT, BlockSlice, Column, Schema

POOLED_FROM_BYTES = 64 * 2**10
"""Smaller arrays are not pooled unless they must be pinned."""
CLASSES_PER_DOUBLING = 8
"""Sizes are rounded up to one of these, which wastes at most 9 % and lets slightly shorter batches reuse a
buffer."""


class BufferPool:
    """Allocates arrays and reclaims their memory when the last user releases it.

    Holding a batch, or a view of it, keeps its memory: nothing is overwritten. New memory costs a page fault
    per 4 KiB, and pinning costs more; in steady state a feed allocates none.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.allocated_bytes = 0
        self._free: defaultdict[int, deque[Any]] = defaultdict(deque)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An uninitialized C-ordered NumPy array."""
        import numpy as np

        dtype = np.dtype(dtype)
        count = math.prod(shape)
        size = count * dtype.itemsize
        if not size or (size < POOLED_FROM_BYTES and not self.pinned):
            return np.empty(shape, dtype)
        free = self._free[size_class(size)]
        try:
            memory = free.popleft()
        except IndexError:
            memory = self._allocate(size_class(size))
        # Wrap a memoryview, not an array: otherwise NumPy lets views of views refer past this array to the
        # memory below, and this array's finalizer would no longer mean that the memory is unused.
        array = np.frombuffer(memoryview(memory), dtype, count)
        # May be called from any thread, even during garbage collection: appending takes no lock.
        weakref.finalize(array, free.append, memory).atexit = False
        return array.reshape(shape)

    def _allocate(self, size: int) -> Any:
        import torch

        self.allocated_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned).numpy()


def size_class(size: int) -> int:
    """The buffer size for an array of `size` bytes."""
    step = CLASSES_PER_DOUBLING
    return max(4096, math.ceil(2 ** (math.ceil(math.log2(size) * step) / step)))


class BatchBuilder:
    """Assembles a batch from several blocks.

    Args:
        buffers: source of its memory, which is not initialized, so `finish` counts what was written.
        rows: of all parts together.
        schema: of the split.
    """

    def __init__(self, buffers: BufferPool, rows: int, schema: Schema) -> None:
        self.rows, self.schema, self._buffers = rows, schema, buffers
        self._filled = dict.fromkeys(schema.columns, 0)
        self._ragged: dict[str, dict[int, Ragged]] = {n: {} for n in schema.pad if n in schema.columns}
        """Variable-length rows by position of the first one; padded when all have arrived."""
        self._columns: dict[str, Any] = {
            name: [""] * rows if column.dtype == TEXT else buffers.empty((rows, *column.shape), column.dtype)
            for name, column in schema.columns.items()
            if name not in self._ragged
        }

    def target(self, name: str, at: int, rows: int) -> Any:
        """Memory for rows from row `at` on; call `wrote` when they are in place."""
        return self._columns[name][at : at + rows]

    def wrote(self, name: str, rows: int) -> None:
        """Count written rows of a column."""
        self._filled[name] += rows

    def ragged(self, name: str, at: int, offsets: Any, values: int) -> Any:
        """Memory for the values of variable-length rows; call `wrote` when they are in place.

        Args:
            name: of the column.
            at: position of the first row in the batch.
            offsets: of the rows within their values, from 0.
            values: number of values.

        Raises:
            SchemaError: offsets and values do not agree.
        """
        refuse_bad_offsets(offsets, values)
        column = self.schema.columns[name]
        target = self._buffers.empty((values, *column.shape[1:]), column.dtype)
        self._ragged[name][at] = Ragged(target, offsets)
        return target

    def text(self, name: str, values: list[str], at: int) -> None:
        """Copy strings in.

        Raises:
            SchemaError: a value is not a string.
        """
        other = next((value for value in values if not isinstance(value, str)), "")
        if other != "":
            raise SchemaError(f"column {name!r} holds {other!r}, which is not text")
        self._columns[name][at : at + len(values)] = values

    def take(self, part: BlockSlice, columns: dict[str, Any], at: int) -> int:
        """Copy a part's rows out of its block; returns the number of bytes.

        Raises:
            SchemaError: the block does not match its report.
        """
        refuse_other_block(part, self.schema, schema_of(columns), min(map(len, columns.values()), default=0))
        rows, size = part.stop - part.start, 0
        for name, column in columns.items():
            values = column[part.start : part.stop]
            size += values.nbytes
            if isinstance(values, Ragged):
                self.ragged(name, at, values.offsets, len(values.values))[...] = values.values
            elif self.schema.columns[name] == Column(TEXT):
                self.text(name, list(values), at)
            else:
                self.target(name, at, rows)[...] = values
            self.wrote(name, rows)
        return size

    def finish(self) -> dict[str, Any]:
        """The batch: arrays, and lists of strings.

        Raises:
            SchemaError: a row was never written.
        """
        for name, rows in self._filled.items():
            if rows != self.rows:
                raise SchemaError(f"column {name!r}: {rows} of the batch's {self.rows} rows were written")
        for name, parts in self._ragged.items():
            in_order = [parts[at] for at in sorted(parts)]
            self._columns |= padded(name, in_order, self.schema.pad[name], self._buffers.empty)
        return self._columns


def refuse_other_block(part: BlockSlice, schema: Schema, found: Schema, rows: int) -> None:
    """Refuse a block that does not match its report and the split's schema.

    Args:
        part: the requested rows.
        schema: of the split.
        found: the block's columns as received.
        rows: its number of rows.

    Raises:
        SchemaError: names the block and the difference.
    """
    if difference := schema.difference(found):
        raise SchemaError(f"block {part.block} has other columns than its split: {difference}")
    if rows != part.of:
        raise SchemaError(
            f"block {part.block} has {rows} rows, but was reported with {part.of}: it was made"
            " again and differs, or is damaged"
        )


def as_batch(columns: dict[str, Any], schema: Schema) -> dict[str, Any]:
    rows = min(map(len, columns.values()), default=0)
    batch = BatchBuilder(BufferPool(pinned=False), rows, schema)
    batch.take(BlockSlice("", 0, rows, of=rows), columns, 0)
    return batch.finish()
