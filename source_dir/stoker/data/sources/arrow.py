"""Every host: values of Arrow columns, and where they are NULL."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stoker.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PICKLED = "ray.data.arrow_pickled_object"
TENSORS = ("ray.data.arrow_tensor", "ray.data.arrow_variable_shaped_tensor")


def values_of(column: Any) -> Callable[[int], Any]:
    """Chain worker: row number → Python value or NumPy array; chosen once per column by its type."""
    import pyarrow as pa

    kind = column.type
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(kind, pa.FixedShapeTensorType) or hasattr(array, "to_numpy_ndarray"):
        tensors = array.to_numpy_ndarray()
        return lambda row: tensors[row]
    if isinstance(kind, pa.ExtensionType):
        tensors = array.to_numpy(zero_copy_only=False)
        return lambda row: tensors[row]
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        content = array.field("bytes")
        return lambda row: content[row].as_py()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return lambda row: array[row].values.to_numpy(zero_copy_only=False)
    return lambda row: array[row].as_py()


def refuse_code(schema: Any, path: str) -> None:
    """Every host: refuse columns whose values a Python class makes, such as Ray's pickled objects.

    Ray refuses them in files that it reads itself. Where its classes are loaded, reading a value unpickles.

    Raises:
        UsageError: names the column and its type.
    """
    for field in schema:
        if kind := _made_by_python(field):
            raise UsageError(
                f"{path}: column {field.name} is of the type {kind}, whose values could run code; leave it"
                " out with columns=[…], or write it as numbers, text or bytes"
            )


def _made_by_python(field: Any) -> str:
    """The name of such an extension type in a column; empty if there is none."""
    import pyarrow as pa

    kind = field.type
    if (field.metadata or {}).get(b"ARROW:extension:name") == PICKLED.encode():
        return PICKLED  # a process that has not loaded Ray's classes
    if isinstance(kind, pa.ExtensionType) and not kind.extension_name.startswith(TENSORS):
        return str(kind.extension_name)
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    parts = [kind.field(i) for i in range(kind.num_fields)]
    if pa.types.is_dictionary(kind):
        parts.append(pa.field("", kind.value_type))
    return next(filter(None, map(_made_by_python, parts)), "")


def mask_of(column: Any, rows: NDArray[np.int64] | None = None) -> NDArray[np.bool_] | None:
    """Every host: which rows of a column are NULL, or are a list with a NULL; None if no row is.

    Args:
        column: chunked.
        rows: rows to check; None: all.
    """
    import numpy as np

    masks = [_mask(chunk) for chunk in column.chunks]
    if all(mask is None for mask in masks):
        return None
    whole = np.concatenate(
        [np.zeros(len(c), bool) if m is None else m for c, m in zip(column.chunks, masks, strict=True)]
    )
    if rows is None:
        return whole
    counted = np.zeros_like(whole)
    counted[rows] = whole[rows]
    return counted if counted.any() else None


def _mask(array: Any) -> NDArray[np.bool_] | None:
    import numpy as np
    import pyarrow as pa
    from pyarrow import compute

    if isinstance(array.type, pa.ExtensionType):
        array = array.storage
    kind = array.type
    mask = _nulls(array) if array.null_count else None
    inner = None
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        inner = _mask(array.field("bytes"))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        there = np.flatnonzero(~mask) if mask is not None else np.arange(len(array))
        lists = array if mask is None else array.drop_null()
        values = _mask(lists.flatten())
        if values is not None:
            inner = np.zeros(len(array), bool)
            inner[there[compute.list_parent_indices(lists).to_numpy()[values]]] = True
    if inner is None:
        return mask
    return inner if mask is None else mask | inner


def _nulls(array: Any) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
    return found
