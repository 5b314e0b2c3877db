"""Every host: records as columns of a block: schema, rows that differ in length, files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.errors import SchemaError
from stoker.protocol import (
    HWC_SUFFIX,
    ID_COLUMN,
    KEY_COLUMN,
    OBJECT,
    TEXT,
    BadRecord,
    Column,
    Pad,
    Record,
    Schema,
)
from stoker.read.host_cache import framed, unframed
from stoker.read.sources import record_id

if TYPE_CHECKING:
    from numpy.typing import NDArray

LENGTH_SUFFIX = "_length"
"""Suffix of the batch column with the length of each row of a padded column."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """Concatenated rows: row i is values[offsets[i] : offsets[i + 1]].

    Implements what column code needs of an array: `dtype`, `shape` (its second number is -1), `nbytes`, a
    length, and slices.
    """

    values: Any
    offsets: Any
    """int64, from 0 to the number of values; one more than there are rows."""

    @classmethod
    def of(cls, rows: list[Any], dtype: str) -> Ragged:
        """Build from arrays that differ at most in their first dimension."""
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
        """Adjacent rows; their values are views."""
        refuse_bad_offsets(self.offsets, len(self.values))
        start, stop, _ = rows.indices(len(self))
        offsets = self.offsets[start : max(start, stop) + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def refuse_bad_offsets(offsets: Any, values: int) -> None:
    if offsets[0] != 0 or offsets[-1] != values or (offsets[1:] < offsets[:-1]).any():
        raise SchemaError(
            f"row offsets from {offsets[0]} to {offsets[-1]} do not divide {values} values: damaged block"
        )


def padded(name: str, parts: list[Ragged], pad: Pad, empty: Callable[..., Any]) -> dict[str, Any]:
    """The rows of all parts in one array, padded to the longest, and their lengths."""
    import numpy as np

    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    width = -(-int(lengths.max(initial=0)) // pad.multiple) * pad.multiple
    batch = empty((len(lengths), width, *parts[0].values.shape[1:]), parts[0].dtype)
    batch[...] = pad.value
    at = 0
    for part in parts:
        for row, (start, stop) in enumerate(pairwise(part.offsets.tolist()), at):
            batch[row, : stop - start] = part.values[start:stop]
        at += len(part)
    return {name: batch, name + LENGTH_SUFFIX: lengths}


def bucketed(records: list[Record], column: str, seed: str) -> list[Record]:
    """The records of a block, with similar lengths next to each other.

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
    has_length = getattr(value, "shape", ()) or isinstance(value, list | tuple | str | bytes)
    return len(value) if has_length else 0


BATCHABLE = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
"""NumPy dtype names that a tensor can hold."""


class Packed(NamedTuple):
    records: list[Record]
    columns: dict[str, Any]
    schema: Schema
    bad: list[BadRecord]


def pack_columns(
    records: list[Record],
    expected: Schema | None = None,
    stage: str = "",
    pads: Mapping[str, Pad] = {},
) -> Packed:
    own = dict.fromkeys(name for record in records for name in record)
    found = expected.columns if expected else own
    names = [name for name in found if name != "key"]
    good, bad = _complete(records, names, expected)
    columns: dict[str, Any] = {}
    kinds: dict[str, Column] = {}
    if good:
        keys = [record["key"] for record in good]
        for name in names:
            values = [record[name] for record in good]
            pad = None if stage else pads.get(name)
            if pad and name == "image" and any(hasattr(v, "numpy") and v.ndim == 3 for v in values):
                raise SchemaError("column 'image': pad would add black channels to a tensor")
            values = _arrays(name, values)
            wanted = expected.columns[name] if expected else None
            origin = expected.record if expected else ""
            kind = _kind(name, keys, values, wanted, origin, stage, pad)
            columns[name], kinds[name] = _stack(values, kind, name, keys, stage), kind
    return Packed(good, columns, Schema(kinds, good[0]["key"] if good else ""), bad)


def schema_of(columns: dict[str, Any], record: str = "", pads: Mapping[str, Pad] = {}) -> Schema:
    found = {n: Column(_name(values.dtype), values.shape[1:]) for n, values in columns.items()}
    texts = [name for name, values in columns.items() if values.dtype == object]
    return Schema(found | dict.fromkeys(texts, Column(TEXT)), record, pads)


@cache
def _name(dtype: Any) -> str:
    name: str = dtype.name  # NumPy rebuilds it at each access
    return name


def _complete(
    records: list[Record], names: list[str], expected: Schema | None
) -> tuple[list[Record], list[BadRecord]]:
    whole = {"key", *names}
    if expected and any(record.keys() - whole for record in records):
        record, name = next((r, n) for r in records for n in r if n not in whole)
        raise SchemaError(
            f"record {record['key']} has a column {name!r} that record {expected.record} lacks; give it to"
            f" every record in the chain, or leave it out with stoker.data.Drop({name!r})"
        )
    if not any(record.get(name) is None for name in names for record in records):
        return records, []  # at half the cost
    good, bad = [], []
    for record in records:
        hole = next((name for name in names if record.get(name) is None), None)
        if hole is None:
            good.append(record)
        else:
            lacks = f"no column {hole!r}, which other records have"
            why = f"column {hole!r} is None" if hole in record else lacks
            bad.append(BadRecord(record["key"], why))
    return good, bad


def _arrays(name: str, values: list[Any]) -> list[Any]:
    if not any(hasattr(value, "numpy") for value in values):
        return values
    try:
        return [value.numpy() if hasattr(value, "numpy") else value for value in values]
    except (TypeError, RuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        raise SchemaError(f"column {name!r} holds tensors that cannot be batched: {text}") from None


def _kind(
    name: str,
    keys: list[str],
    values: list[Any],
    wanted: Column | None,
    origin: str,
    stage: str,
    pad: Pad | None,
) -> Column:
    """The dtype and shape of a column; shapes may differ for a batch stage, lengths if batches pad."""
    same = _same(values)
    kinds = [same] if same else [_describe(value) for value in values]
    if stage:
        kinds = [Column(kind.dtype, (-1,) * len(kind.shape)) for kind in kinds]
    if pad is not None:
        kinds = [k._replace(shape=(-1, *k.shape[1:])) if k.shape else k for k in kinds]
        _refuse_pad(name, keys[0], kinds[0], pad)
    wanted, origin = (wanted, origin) if wanted else (kinds[0], keys[0])
    for key, kind, value in zip(keys, kinds, values, strict=False):
        if kind.dtype == OBJECT and not stage:
            raise SchemaError(_not_batchable(name, key, value))
        if kind != wanted:
            raise SchemaError(_differs(name, key, kind, wanted, origin))
    return wanted


def _refuse_pad(name: str, key: str, kind: Column, pad: Pad) -> None:
    import numpy as np

    if not kind.ragged or 0 in kind.shape:
        raise SchemaError(
            f"column {name!r} is {kind} in record {key}, but the recipe's pad names it: only arrays of"
            " numbers can be padded; make it one, as numpy.array does of a list"
        )
    dtype = np.dtype(kind.dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        fits = isinstance(pad.value, int) and limits.min <= pad.value <= limits.max
    elif dtype.kind == "b":
        fits = isinstance(pad.value, bool)
    else:
        with np.errstate(over="ignore"):
            fits = not (np.isfinite(pad.value) and np.isinf(dtype.type(pad.value)))
    if not fits:
        raise SchemaError(
            f"column {name!r} holds {dtype}, which cannot be padded with {pad.value!r}"
        )


def _same(values: list[Any]) -> Column | None:
    import numpy as np

    if len(set(map(type, values))) > 1:
        return None
    arrays = isinstance(values[0], np.ndarray)
    if arrays and (len({v.dtype for v in values}) > 1 or len({v.shape for v in values}) > 1):
        return None
    return _describe(values[0])


def _describe(value: Any) -> Column:
    import numpy as np

    if isinstance(value, str):
        return Column(TEXT)
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.ma.MaskedArray):
        dtype: Any = value.dtype
    else:
        kind = next((k for k in (bool, int, float, complex) if isinstance(value, k)), None)
        dtype = np.dtype(kind or object)
    name = _name(dtype)
    return Column(name, getattr(value, "shape", ())) if name in BATCHABLE else Column(OBJECT)


def _stack(
    values: list[Any], kind: Column, name: str, keys: list[str], stage: str
) -> NDArray[Any] | Ragged:
    import numpy as np

    arrays = isinstance(values[0], np.ndarray)
    if kind.ragged and not stage:
        return Ragged.of(values, kind.dtype)
    differ = arrays and len({getattr(value, "shape", ()) for value in values}) > 1
    if differ or kind.dtype in (TEXT, OBJECT):
        column = np.empty(len(values), dtype=object)
        for i, value in enumerate(values):
            column[i] = str(value) if kind.dtype == TEXT else value
        return column
    if arrays:
        return np.stack(values).astype(kind.dtype, copy=False)  # native byte order
    try:
        return np.array(values, dtype=kind.dtype)
    except OverflowError:
        both = zip(keys, values, strict=True)
        key = next(k for k, value in both if not -(2**63) <= value < 2**63)
        raise SchemaError(
            f"column {name!r}: the number in record {key} does not fit {kind.dtype}"
        ) from None


def _not_batchable(name: str, key: str, value: Any) -> str:
    if isinstance(value, bytes) and name == "image":
        return f"column {name!r} is still encoded bytes; add DecodeImage() to the chain"
    if hasattr(value, "getexif"):
        stage = "DecodeImage() or v2.ToImage()" if name == "image" else f"DecodeMask({name!r})"
        return f"column {name!r} is still a PIL image (record {key}); add {stage} to the chain"
    what = f"arrays of {value.dtype}" if hasattr(value, "dtype") else type(value).__name__
    return (
        f"column {name!r} holds {what} (record {key}), which a batch cannot; make it numbers, arrays or text"
        f" in the chain, or leave it out with stoker.data.Drop({name!r})"
    )


def _differs(name: str, key: str, found: Column, wanted: Column, origin: str) -> str:
    if found.dtype == wanted.dtype:
        if name == "image":
            hint = "; DecodeImage() gives all the same channels"
        else:
            lengths = found.shape[1:] == wanted.shape[1:] and len(found.shape) == len(wanted.shape)
            hint = (
                f", or let batches pad it: pad = {{{name!r}: 0}} in the recipe" if lengths else ""
            )
        return (
            f"column {name!r} differs in shape between records: {found.shape} in {key}, {wanted.shape} in"
            f" {origin}; resize or crop in the chain{hint}"
        )
    return f"column {name!r} is {found} in record {key}, {wanted} in record {origin}; convert it in the chain"


def size_of(column: Any) -> int:
    """Bytes of a column in a block; NumPy counts only the references to strings."""
    if column.dtype != object:
        return int(column.nbytes)
    return sum(len(text) for text in column if text) + 8 * len(column)


def finished_columns(packed: Packed, with_keys: bool) -> dict[str, Any]:
    """Packed columns as they leave it: images marked by their layout, plus row ids."""
    import numpy as np

    keys: Sequence[str] = [record["key"] for record in packed.records]
    out: dict[str, Any] = {}
    for name, column in packed.columns.items():
        if not isinstance(name, str):
            raise SchemaError(
                f"column {name!r}: the name of a column must be text; rename it in the chain"
            )
        length_of = name.removesuffix(LENGTH_SUFFIX) if name.endswith(LENGTH_SUFFIX) else ""
        taken = isinstance(packed.columns.get(length_of), Ragged)
        if taken or name in (ID_COLUMN, KEY_COLUMN) or name.endswith(HWC_SUFFIX):
            raise SchemaError(f"column {name!r}: Stoker uses this name; rename it in the chain")
        array = type(column) is type(packed.records[0].get(name)) is np.ndarray
        channels_last = name == "image" and array and column.ndim == 4
        out[name + HWC_SUFFIX if channels_last else name] = column
    out[ID_COLUMN] = np.array([record_id(key) for key in keys], dtype=np.int64)
    if with_keys:
        out[KEY_COLUMN] = np.array(keys, dtype=object)
    return out


def block_parts(columns: dict[str, Any]) -> list[Any]:
    import numpy as np

    layout, arrays = [], []
    for name, column in columns.items():
        own, kind = [column], "array"
        if isinstance(column, Ragged):
            refuse_bad_offsets(column.offsets, len(column.values))
            own, kind = [column.values, column.offsets], "ragged"
        elif column.dtype == object:
            whole = "".join(text for text in column if text is not None).encode(
                errors="surrogatepass"
            )
            lengths = np.array([-1 if text is None else len(text) for text in column], np.int64)
            own, kind = [np.frombuffer(whole, np.uint8), lengths], "text"
        layout.append((name, kind, [(array.dtype.str, array.shape) for array in own]))
        arrays += own
    memory = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
    return framed(json.dumps(layout).encode(), memory)


def block_columns(content: Any) -> dict[str, Any]:
    """The columns of a block; arrays are views of the file's content."""
    import numpy as np

    layout, *memory = unframed(content)
    left = iter(memory)
    columns: dict[str, Any] = {}
    for name, kind, forms in json.loads(bytes(layout)):
        # The code that takes rows checks offsets against values.
        arrays: list[Any] = [np.ndarray(shape, dtype, next(left)) for dtype, shape in forms]
        columns[name] = arrays[0]
        if kind != "array":
            columns[name] = _texts(*arrays) if kind == "text" else Ragged(*arrays)
    return columns


def _texts(whole: Any, lengths: Any) -> NDArray[Any]:
    import numpy as np

    text, ends = bytes(whole).decode(errors="surrogatepass"), lengths.clip(0).cumsum().tolist()
    found = np.empty(len(lengths), dtype=object)
    found[:] = [
        None if n < 0 else text[end - n : end]
        for n, end in zip(lengths.tolist(), ends, strict=True)
    ]
    return found


def columns_of(block: Any) -> dict[str, Any]:
    from ray.data.block import BlockAccessor

    accessor = BlockAccessor.for_block(block)
    names = list(accessor.column_names())
    columns: dict[str, Any] = accessor.to_numpy(names) if names else {}
    return columns
