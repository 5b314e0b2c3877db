"""Head: the reader for the data in a folder; the columns of a table, and the labels in one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stoker.errors import UsageError
from stoker.read.arrow import is_text
from stoker.read.delta import read_delta
from stoker.read.folders import (
    IMAGE_SUFFIXES,
    PARQUET_SUFFIXES,
    SPLIT_NAMES,
    TAR_SUFFIXES,
    files_of,
    is_delta_table,
    is_one,
    only,
    split_name,
)
from stoker.read.images import read_images
from stoker.read.labels import MOST_CLASSES
from stoker.read.parquet import read_parquet
from stoker.read.sources import Source
from stoker.read.webdataset import read_webdataset
from stoker.storage.filesystems import filesystem_of, is_hidden, join, list_files

FORMATS = TAR_SUFFIXES, PARQUET_SUFFIXES, IMAGE_SUFFIXES


def by_column(read: Callable[..., Any], split: str, columns: list[str] | None) -> Source | None:
    """The rows of one table that its column `split` gives to a split; all for training without one."""
    table = read(columns=["split"])
    kind = table.column_types().get("split")
    if kind is not None and not is_text(kind):
        raise UsageError(
            f"{table.folder}: column split is {kind}; write train and val into it, or rename it"
        )
    if kind is None:
        source: Source | None = read(columns=columns) if split == "train" else None
        return source
    values = {"NULL" if value is None else value for value in table.label_values("split")}
    mine = {name: [each for each in SPLIT_NAMES[name] if each in values] for name in SPLIT_NAMES}
    others = ", ".join(sorted(values - set(sum(SPLIT_NAMES.values(), ()))))
    if not mine["train"]:
        found = others or ", ".join(mine["val"])
        raise UsageError(
            f"{table.folder}: column split holds {found}, but no train; rename its values"
        )
    name = only(table.folder, split, mine[split])
    notes = (
        [f"{table.folder}: rows not read: of split {others}"] if others and split == "train" else []
    )
    return read(columns=columns, filters=[("split", "==", name)]).noting(*notes) if name else None


def read_any(
    root: str | os.PathLike[str],
    split: str,
    columns: list[str] | None = None,
    ignore: Sequence[str] = (),
) -> Source | None:
    """Read tar shards, Parquet, a Delta table or image folders, whichever the folder holds.

    Args:
        root: folder or URI.
        split: train or val.
        columns: read these columns only; default: all. Image folders have `image` and `label`.
        ignore: patterns of files that are not read, such as `*.txt`.

    Raises:
        UsageError: the folder is empty, or the split holds none of these formats, or several.
    """
    root = os.fspath(root)
    if is_delta_table(root):
        return by_column(partial(read_delta, root), split, columns)
    if any(is_delta_table(join(root, name)) for name in SPLIT_NAMES[split]):
        return read_delta(root, split, columns)
    mine, one = files_of(root, split, underscored=True), is_one(root, PARQUET_SUFFIXES)
    if not split_name(root, split):  # a name such as train.csv is no split of its own
        mine = [f for f in mine if f.path.lower().endswith(sum(FORMATS, ()))]
    if not mine and split == "val" and not one:
        return None
    files = mine or list_files(root)
    top, kinds = len(filesystem_of(root)[1]), dict[tuple[str, ...], str]()
    for kind in FORMATS:
        for file in files:
            if file.path.lower().endswith(kind) and not is_hidden(file.path[top:]):
                kinds[kind] = file.base_name
                break
    if len(kinds) > 1 and mine:
        raise UsageError(
            f"{root}: the {split} split mixes formats ({' and '.join(kinds.values())}); move one elsewhere,"
            " or read the other in a recipe"
        )
    if TAR_SUFFIXES in kinds:
        return read_webdataset(root, split, columns, strict=False, ignore=ignore)
    if PARQUET_SUFFIXES in kinds and one:
        return by_column(partial(read_parquet, root, "train", ignore=ignore), split, columns)
    if PARQUET_SUFFIXES in kinds:
        return read_parquet(root, split, columns, ignore=ignore)
    if IMAGE_SUFFIXES in kinds:
        return read_images(root, split, ignore=ignore)
    where = f"{root}: the {split} split" if mine else f"{root}:"
    name = files[0].path[top:].strip("/") or files[0].base_name
    raise UsageError(
        f"{where} holds neither images nor .parquet nor .tar files (first file: {name})"
    )


def column_types(source: Any) -> dict[str, Any]:
    """Column → Arrow type of tables, tar shards or a `ray.data.Dataset`; empty for other sources."""
    if hasattr(source, "map_batches"):
        schema = source.schema()
        return dict(zip(schema.names, schema.types, strict=True)) if schema else {}
    return source.column_types() if hasattr(source, "column_types") else {}


def refuse_absent_columns(data: str, source: Any, params: dict[str, str]) -> None:
    types = column_types(source)
    columns = ", ".join(f"{name} ({kind})" for name, kind in types.items())
    problems = [
        f"{data}: has no column {column}; it has {columns}: set params.{param}"
        for param, column in params.items()
        if types and column not in types
    ]
    if problems:
        raise UsageError(*problems)


def find_classes(
    data: str,
    source: Any,
    read: Callable[[Any], Any],
    column: str,
    listed: list[str],
    count: int | None,
) -> tuple[int, list[str]]:
    """The number of classes and, if the source does not list them, their names: those `listed`, or the texts in
    the column; integers number their classes."""
    own: list[str] | None = source.classes() if hasattr(source, "classes") else None
    if own is not None:
        if listed and listed != own:
            raise UsageError(
                f"params.class_names: the classes are {', '.join(own[:20])}, in this order"
            )
        if count is not None and count < len(own) and hasattr(source, "several"):
            raise UsageError(f"params.num_classes: {data} has {len(own)} classes")
        return len(own), []
    kind = column_types(source).get(column)
    text = kind is not None and is_text(kind)
    names = listed
    labels = distinct_labels(data, source, column, not (names or count))
    if labels is None and not names and text:
        raise UsageError(f"{data}: column {column} is text; list the classes in params.class_names")
    if labels is None and not (names or count):
        raise UsageError(
            "params.num_classes: is required, because the data does not list its classes"
        )
    if labels and text:
        names = names or labels
        _refuse_unknown(
            data,
            column,
            names,
            whose="params.class_names" if listed else "train",
            train=labels,
            val=read("val"),
        )
        if count not in (None, len(names)):
            raise UsageError(
                f"params.num_classes: {count}, but the data has {len(names)} classes:"
                f" {', '.join(names[:20])}; list others in params.class_names"
            )
    elif labels and labels[-1] > MOST_CLASSES:
        raise UsageError(f"{data}: column {column} holds {labels[-1]}; number the classes 0, 1, …")
    return len(names) or (labels[-1] + 1 if labels else 0), names


def _refuse_unknown(
    data: str, column: str, names: list[str], whose: str, train: list[str], val: Any
) -> None:
    """Refuse labels of either split that are no class."""
    if (kind := column_types(val).get(column)) is not None and not is_text(kind):
        raise UsageError(f"{data}: column {column} is text in train and {kind} in val")
    for split, labels in (("train", train), ("val", distinct_labels(data, val, column, False))):
        for label in labels or ():
            if label not in names:
                raise UsageError(
                    f"{data}: {split} has the label {label}, which is no class of {whose}:"
                    f" {', '.join(names[:20])}"
                )


def distinct_labels(data: str, source: Any, column: str, numbers: bool) -> list[Any] | None:
    """The labels in a column: text or integers, as written."""
    import pyarrow as pa

    kind = column_types(source).get(column)
    if kind is None or not (numbers or is_text(kind)):
        return None
    wrong = f"{data}: column {column} {{}}; labels must be integers or text"
    # pandas writes integers beside a NULL as floats, and Snowflake as decimals.
    types = pa.types
    is_number = types.is_integer, types.is_boolean, types.is_floating, types.is_decimal
    if not (is_text(kind) or any(test(kind) for test in is_number)):
        raise UsageError(wrong.format(f"is {kind}"))
    found = source.unique(column) if hasattr(source, "map_batches") else source.label_values(column)
    if found is None:
        return None
    labels = sorted({value for value in found if value is not None})
    for value in labels:
        if not (value.strip() if isinstance(value, str) else value % 1 == 0):
            raise UsageError(wrong.format(f"holds {value!r}"))
    return labels if is_text(kind) else [int(value) for value in labels]
