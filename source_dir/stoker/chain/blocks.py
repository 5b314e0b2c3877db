"""Every host: converts blocks of columns to Ray Data's Arrow tables and back without copying."""

from __future__ import annotations

import json
import math
from typing import Any

from stoker.chain.ragged import Ragged

DTYPE = b"dtype"
"""NumPy dtype of a column that Arrow would pack into bits or does not support: its bytes are stored."""
RAGGED = b"ragged"
"""Shape of one value of a variable-length column; its lists hold the numbers of all values."""


def to_table(columns: dict[str, Any]) -> Any:
    """Chain worker: columns → a table.

    Args:
        columns: arrays whose first axis is the row, or Ragged; object arrays hold strings.

    Returns:
        A `pyarrow.Table` with fixed-shape tensor columns, and lists of numbers.
    """
    import numpy as np
    import pyarrow as pa
    from ray.data.extensions import ArrowTensorArray

    arrays, fields = [], []
    for name, column in columns.items():
        about = {}
        values = column.values if isinstance(column, Ragged) else column
        if values.dtype == object:
            array = pa.array(values, pa.large_string())
        else:
            values = np.ascontiguousarray(values)
            if values.dtype.kind in "bc" or values.dtype == np.float16:
                about[DTYPE] = values.dtype.name.encode()
                values = values.view(np.uint8).reshape(*values.shape, values.itemsize)
            if isinstance(column, Ragged):
                shape = values.shape[1:]
                about[RAGGED] = json.dumps(shape).encode()
                offsets = pa.array(column.offsets * math.prod(shape))
                array = pa.LargeListArray.from_arrays(offsets, pa.array(values.reshape(-1)))
            else:
                array = pa.array(values) if values.ndim == 1 else ArrowTensorArray.from_numpy(values)
        arrays.append(array)
        fields.append(pa.field(name, array.type, metadata=about or None))
    return pa.table(arrays, pa.schema(fields))


def columns_of(block: Any) -> dict[str, Any]:
    """Every host: a block as NumPy columns, as views of its memory if possible.

    Args:
        block: made by `to_table`, or any block of Ray Data.
    """
    from ray.data.block import BlockAccessor

    accessor = BlockAccessor.for_block(block)
    names = list(accessor.column_names())
    fields: Any = getattr(block, "schema", None)
    about = {name: fields.field(name).metadata or {} for name in names} if hasattr(fields, "field") else {}
    plain = [name for name in names if RAGGED not in about.get(name, {})]
    found: dict[str, Any] = accessor.to_numpy(plain) if plain else {}
    columns = {name: found[name] if name in found else _ragged(block, name, about[name]) for name in names}
    for name, column in columns.items():
        if DTYPE in about.get(name, {}):
            dtype = about[name][DTYPE].decode()
            if isinstance(column, Ragged):
                columns[name] = Ragged(column.values.view(dtype)[..., 0], column.offsets)
            else:
                columns[name] = column.view(dtype)[..., 0]
    return columns


def _ragged(block: Any, name: str, about: dict[bytes, bytes]) -> Ragged:
    chunks = block.column(name)
    lists = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
    shape = json.loads(about[RAGGED])
    # Unchecked: the code that takes rows checks the offsets against all values.
    return Ragged(lists.values.to_numpy().reshape(-1, *shape), lists.offsets.to_numpy() // math.prod(shape))
