"""Every host: blocks of columns as the Arrow tables that Ray Data carries, and back, without copying."""

from __future__ import annotations

from typing import Any

DTYPE = b"dtype"
"""NumPy's name of a column that Arrow would pack into bits or does not know: its bytes are carried."""


def to_table(columns: dict[str, Any]) -> Any:
    """Chain worker: columns → a table.

    Args:
        columns: arrays whose first axis counts the rows; arrays of objects hold text.

    Returns:
        A `pyarrow.Table` with tensor columns of a fixed shape.
    """
    import numpy as np
    import pyarrow as pa
    from ray.data.extensions import ArrowTensorArray

    arrays, fields = [], []
    for name, values in columns.items():
        about = {}
        if values.dtype == object:
            array = pa.array(values, pa.large_string())
        else:
            values = np.ascontiguousarray(values)
            if values.dtype.kind in "bc" or values.dtype == np.float16:
                about[DTYPE] = values.dtype.name.encode()
                values = values.view(np.uint8).reshape(*values.shape, -1)
            array = pa.array(values) if values.ndim == 1 else ArrowTensorArray.from_numpy(values)
        arrays.append(array)
        fields.append(pa.field(name, array.type, metadata=about or None))
    return pa.table(arrays, pa.schema(fields))


def columns_of(block: Any) -> dict[str, Any]:
    """Every host: a block as NumPy columns, views of its memory where that is possible.

    Args:
        block: made by `to_table`, or any of Ray Data's.
    """
    from ray.data.block import BlockAccessor

    accessor = BlockAccessor.for_block(block)
    columns: dict[str, Any] = accessor.to_numpy(list(accessor.column_names()))
    fields: Any = getattr(block, "schema", None)
    for name in columns:
        about = fields.field(name).metadata if hasattr(fields, "field") else None
        if about and DTYPE in about:
            columns[name] = columns[name].view(about[DTYPE].decode())[..., 0]
    return columns
