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
SPARK_IMAGE = {"origin", "height", "width", "nChannels", "mode", "data"}


def values_of(column: Any) -> Callable[[int], Any]:
    """Chain worker: row number → Python value or NumPy array; chosen once per column by its type."""
    import pyarrow as pa

    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType | pa.ExtensionType):
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        shaped = hasattr(array, "to_numpy_ndarray")
        tensors = array.to_numpy_ndarray() if shaped else array.to_numpy(zero_copy_only=False)
        return lambda row: tensors[row]
    # Chunks of more than 2 GB together cannot be combined.
    array = column.chunk(0) if column.num_chunks == 1 else column
    if content_of_struct(kind) == "bytes":
        chunks = [chunk.field("bytes") for chunk in column.chunks]
        content = chunks[0] if len(chunks) == 1 else pa.chunked_array(chunks)
        return lambda row: content[row].as_py()
    if content_of_struct(kind) == "data":
        return lambda row: pixels_of(array[row].as_py())
    if is_list(kind):
        return lambda row: array_of(array[row].values)
    return lambda row: array[row].as_py()


def is_list(kind: Any) -> bool:
    """Every host: whether the values of a type are lists."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: Any) -> bool:
    """Every host: whether the values of a type are text."""
    import pyarrow as pa

    return bool(_plain(kind) == pa.string())


def content_of_struct(kind: Any) -> str:
    """Every host: the field with the image in a struct of Hugging Face (`bytes`) or Spark (`data`)."""
    import pyarrow as pa

    if not pa.types.is_struct(kind):
        return ""
    names = {kind.field(i).name for i in range(kind.num_fields)}
    found = "data" if names == SPARK_IMAGE else "bytes" if names <= {"bytes", "path"} else ""
    known = found in names and same_values(kind.field(found).type, pa.binary())
    return found if known else ""


def pixels_of(image: dict[str, Any]) -> NDArray[np.uint8]:
    """Chain worker: Spark's image struct as an array, height × width × channels, RGB.

    Raises:
        ValueError: pixels of another type than uint8, or not as many as its size says.
    """
    import numpy as np

    channels, shape = image["nChannels"], (image["height"], image["width"], image["nChannels"])
    order = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}.get(channels)
    # OpenCV's number of a type: its depth, 0 for uint8, and eight times the number of channels less one.
    if order is None or image["mode"] != 8 * (channels - 1):
        raise ValueError(f"Spark image of mode {image['mode']}; must be uint8 with 1, 3 or 4 channels")
    return np.frombuffer(image["data"], np.uint8).reshape(shape)[..., order]


def array_of(values: Any) -> NDArray[Any]:
    """Chain worker: a list as an array; lists in it become dimensions if they are equally long."""
    import pyarrow as pa
    from pyarrow import compute

    shape, flat = [len(values)], values
    while is_list(flat.type):
        if pa.types.is_fixed_size_list(flat.type):
            shape.append(flat.type.list_size)
        else:
            lengths = compute.unique(compute.list_value_length(flat)).to_pylist()
            if len(lengths) > 1:
                ragged: NDArray[Any] = values.to_numpy(zero_copy_only=False)
                return ragged
            shape += lengths or [0]
        flat = flat.flatten()
    found: NDArray[Any] = flat.to_numpy(zero_copy_only=False).reshape(shape)
    return found


def same_values(one: Any, other: Any) -> bool:
    """Every host: whether two types differ only in how writers store the same values."""
    import pyarrow as pa

    return bool(pa.null() in (one, other) or _plain(one) == _plain(other))


def _plain(kind: Any, number: bool = True) -> Any:
    """A type that stands for all whose values become the same in Python.

    Args:
        kind: a type.
        number: numbers become Python's; those in a list become an array of their own type.
    """
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return _plain(kind.value_type, number)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        return pa.binary()
    if number and types.is_integer(kind):
        return pa.int64()
    if number and types.is_floating(kind):
        return pa.float64()
    if is_list(kind):
        return pa.list_(_plain(kind.value_type, number=False))
    if types.is_struct(kind):
        fields = sorted((kind.field(i).name, _plain(kind.field(i).type)) for i in range(kind.num_fields))
        return pa.binary() if content_of_struct(kind) == "bytes" else pa.struct(fields)
    return kind


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
    if content := content_of_struct(kind):
        inner = _mask(array.field(content))
    elif is_list(kind):
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
