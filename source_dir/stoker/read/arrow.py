"""Every host: values of Arrow columns, where they are NULL, and what `nulls=` of a reader makes of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stoker.errors import UsageError
from stoker.figures import count_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


PICKLED = "ray.data.arrow_pickled_object"
TENSORS = ("ray.data.arrow_tensor", "ray.data.arrow_variable_shaped_tensor")


def values_of(column: Any) -> Callable[[int], Any]:
    """Row number → Python value or NumPy array; chosen once per column by its type."""
    import pyarrow as pa

    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType | pa.ExtensionType):
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        there = array.is_valid().to_numpy(zero_copy_only=False)
        place, array = there.cumsum() - 1, array.drop_null()  # Arrow converts no array with NULLs
        shaped = hasattr(array, "to_numpy_ndarray")
        tensors = array.to_numpy_ndarray() if shaped else array.to_numpy(zero_copy_only=False)
        return lambda row: tensors[place[row]] if there[row] else None
    # Chunks of more than 2 GB together cannot be combined.
    array = column.chunk(0) if column.num_chunks == 1 else column
    if is_image(kind):
        chunks = [chunk.field("bytes") for chunk in column.chunks]
        content = chunks[0] if len(chunks) == 1 else pa.chunked_array(chunks)
        return lambda row: content[row].as_py()
    if is_list(kind):
        return lambda row: list_array(array[row].values)
    return lambda row: array[row].as_py()


def is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(_plain(kind) == pa.string())


def is_image(kind: Any) -> bool:
    """Whether a type is Hugging Face's struct of an image, {bytes, path}, of which the bytes are the value."""
    import pyarrow as pa

    names = {each.name for each in kind} if pa.types.is_struct(kind) else set()
    known = "bytes" in names and names <= {"bytes", "path"}
    return known and same_values(kind.field("bytes").type, pa.binary())


def list_array(values: Any) -> NDArray[Any]:
    """A list as an array; lists in it become dimensions if they are equally long."""
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
    """Whether two types differ only in how writers store the same values."""
    import pyarrow as pa

    return bool(pa.null() in (one, other) or _plain(one) == _plain(other))


def _plain(kind: Any, number: bool = True) -> Any:
    """A type that stands for all whose values become the same in Python."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return _plain(kind.value_type, number)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    binary = types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary
    if any(is_one(kind) for is_one in binary):
        return pa.binary()
    if number and types.is_integer(kind):
        return pa.int64()
    if number and types.is_floating(kind):
        return pa.float64()
    if is_list(kind):
        return pa.list_(_plain(kind.value_type, number=False))
    if types.is_struct(kind):
        fields = sorted(
            (kind.field(i).name, _plain(kind.field(i).type)) for i in range(kind.num_fields)
        )
        return pa.binary() if is_image(kind) else pa.struct(fields)
    return kind


def refuse_code(schema: Any, path: str) -> None:
    """Refuse columns whose values a Python class makes, such as Ray's pickled objects.

    Ray refuses them in files that it reads itself. Where its classes are loaded, reading a value unpickles.
    """
    for column in schema:
        if kind := _made_by_python(column):
            raise UsageError(
                f"{path}: column {column.name} is of the type {kind}, whose values could run code; leave it"
                " out with columns=[…], or write it as numbers, text or bytes"
            )


def _made_by_python(field: Any) -> str:
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
    """Which rows of a column are NULL, or are a list with a NULL; None if no row is."""
    import numpy as np

    masks = [_mask(chunk) for chunk in column.chunks]
    if all(mask is None for mask in masks):
        return None
    both = zip(column.chunks, masks, strict=True)
    whole = np.concatenate([np.zeros(len(c), bool) if m is None else m for c, m in both])
    if rows is None:
        return whole
    counted = np.zeros_like(whole)
    counted[rows] = whole[rows]
    return counted if counted.any() else None


def _mask(array: Any) -> Any:
    import numpy as np
    import pyarrow as pa
    from pyarrow import compute

    if isinstance(array.type, pa.BaseExtensionType):  # Arrow's own are no pa.ExtensionType
        array = array.storage
    kind = array.type
    mask: Any = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    inner: Any = None
    if is_image(kind):
        inner = _mask(array.field("bytes"))
    elif is_list(kind):
        there = np.flatnonzero(~mask) if mask is not None else np.arange(len(array))
        lists = array if mask is None else array.drop_null()
        values = _mask(lists.flatten())
        if values is not None:
            inner = np.zeros(len(array), bool)
            inner[there[compute.list_parent_indices(lists).to_numpy()[values]]] = True
    return mask if inner is None else inner if mask is None else mask | inner


Nulls = dict[str, Any]
"""Column → "quarantine", "keep" or a value of the column's type."""

QUARANTINE, KEEP = "quarantine", "keep"
VALID_SUFFIX = "__valid"


def nulls_in(metadata: Any, paths: list[list[str]], kinds: dict[str, Any]) -> Counter[str]:
    """Column → its NULLs by a file's statistics, of those columns of which they tell."""
    known = Counter[str]()
    leaves = [(number, path) for number, path in enumerate(paths) if path[0] in kinds]
    content = {name: ["bytes"] if is_image(kind) else [] for name, kind in kinds.items()}
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for number, path in leaves:
            chunk = row_group.column(number)
            if chunk.physical_type != metadata.schema.column(number).physical_type:
                # Arrow would end the process at the statistics of such a column.
                leaf = ".".join(path)
                raise ValueError(
                    f"its row group {group} has another type of {leaf} than its schema"
                )
            # For lists, statistics count empty ones too.
            plain = path[1:] == content[path[0]]
            if plain and chunk.is_stats_set and chunk.statistics.has_null_count:
                known[path[0]] += chunk.statistics.null_count
    return known


def check_nulls(source: Any, columns: list[str]) -> None:
    """Refuse rules that do not fit, and NULLs without a rule that statistics or folders tell of. Any other ends
    the run when it is read."""
    problems = []
    rows = {path: footer.matching for path, footer in source.footers.items()}
    for column in columns:
        if column in source.nulls:
            if (rule := source.nulls[column]) != QUARANTINE:
                stand_in(column, rule, source.types[column])  # refuses a rule that does not fit
            if column + VALID_SUFFIX in columns:
                problems.append(
                    f"nulls: column {column} and {column}{VALID_SUFFIX}: rename the latter"
                )
            continue
        counts = {}
        for path, footer in source.footers.items():
            if source.constants.get(path, {}).get(column, ()) is None:
                counts[path] = footer.matching
            elif footer.nulls[column] and not source.filters:
                counts[path] = footer.nulls[column]
        if counts:
            problems.append(refusal(column, counts, rows))
    if problems:
        raise UsageError(*problems)


def stand_in(column: str, rule: Any, kind: Any) -> Any:
    """The value in a record for a NULL that a rule keeps or replaces."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    holds: dict[Any, Callable[[Any], Any]] = {
        float: types.is_floating,
        bool: types.is_boolean,
        int: types.is_integer,
        str: is_text,
    }
    python = next((each for each, is_one in holds.items() if is_one(kind)), None)
    if rule == KEEP:
        if python is None:
            raise UsageError(
                f"nulls: column {column} is {kind}; keep is for numbers, booleans and text: use quarantine"
            )
        return float("nan") if python is float else python()
    is_number = isinstance(rule, int | float) and not isinstance(rule, bool)
    if python in (float, int) and is_number and (python is float or int(rule) == rule):
        return python(rule)
    if python in (bool, str) and isinstance(rule, python):
        return rule
    raise UsageError(
        f"nulls: {rule!r} does not fit column {column}, which is {kind}; use quarantine, keep or a value of"
        " that type"
    )


def refusal(column: str, counts: dict[str, int], rows: dict[str, int]) -> str:
    path = next(iter(counts))
    others = (
        f", and {sum(counts.values()) - counts[path]} in {count_of(len(counts) - 1, 'other file')}"
    )
    return (
        f"{path}: column {column} holds {count_of(counts[path], 'NULL')} in {count_of(rows[path], 'row')}"
        f"{others if len(counts) > 1 else ''}; handle them with"
        f' nulls={{"{column}": "quarantine"}}, "keep" or a value, or leave the column out with columns=[…]'
    )


@dataclass
class Rules:
    path: str
    nulls: Nulls
    bad: dict[int, str] = field(default_factory=dict)
    """Rows to quarantine, and the column."""

    def apply(
        self, column: str, kind: Any, mask: np.ndarray[Any, Any] | None, value: Callable[[int], Any]
    ) -> dict[str, Callable[[int], Any]]:
        """A column as seen by records: name → function from row number to value; also its validity column."""
        import pyarrow as pa

        found = {column: value}
        if column not in self.nulls:
            if mask is not None and mask.any():
                raise UsageError(
                    refusal(column, {self.path: int(mask.sum())}, {self.path: len(mask)})
                )
            return found
        rule = self.nulls[column]
        if mask is not None and rule == QUARANTINE:
            self.bad |= {row: self.bad.get(row, column) for row in mask.nonzero()[0].tolist()}
        elif mask is not None:
            instead = stand_in(column, rule, kind)
            found[column] = lambda row: instead if mask[row] else value(row)
        if rule == KEEP and not pa.types.is_floating(kind):
            found[column + VALID_SUFFIX] = lambda row: mask is None or not mask[row]
        return found
