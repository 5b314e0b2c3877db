"""Head: the reader for the data in a folder; the columns of a table, and the labels in one of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from stoker.errors import UsageError
from stoker.read.arrow import content_of_struct, is_list, is_text
from stoker.read.delta import read_delta, refuse_catalog_name
from stoker.read.folders import (
    IMAGE_SUFFIXES,
    PARQUET_SUFFIXES,
    SPLIT_NAMES,
    TAR_SUFFIXES,
    files_of,
    is_delta_table,
    is_one,
    kinds_of,
    only,
)
from stoker.read.images import is_missing, read_images, unclear
from stoker.read.parquet import read_parquet
from stoker.read.sources import Source
from stoker.read.webdataset import read_webdataset
from stoker.storage.filesystems import filesystem_of, is_hidden, join, list_files

USUAL = re.compile("im(g|age)|pic|label|class|target|categor")
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


def read_any(root: str, split: str, columns: list[str] | None = None) -> Source | None:
    """Read tar shards, Parquet, a Delta table or image folders, whichever the folder holds.

    Args:
        root: folder or URI.
        split: train or val.
        columns: read these columns only; default: all. Image folders have `image` and `label`.

    Raises:
        UsageError: the folder is empty, or the split holds none of these formats, or several.
    """
    refuse_catalog_name(root)
    if is_delta_table(root):
        return by_column(partial(read_delta, root), split, columns)
    if any(is_delta_table(join(root, name)) for name in SPLIT_NAMES[split]):
        return read_delta(root, split, columns)
    mine, one = files_of(root, split, underscored=True), is_one(root, PARQUET_SUFFIXES)
    if not mine and split == "val" and not one:
        return None
    files = mine or list_files(root)
    top = len(filesystem_of(root)[1])
    shown = (
        next(
            (f for f in files if f.path.lower().endswith(kind) and not is_hidden(f.path[top:])),
            None,
        )
        for kind in FORMATS
    )
    kinds = {kind: f.base_name for kind, f in zip(FORMATS, shown, strict=True) if f is not None}
    kinds = kinds or {kind: f.base_name for f, kind in kinds_of(files) if kind}
    if len(kinds) > 1 and mine:
        raise UsageError(
            f"{root}: the {split} split mixes formats ({' and '.join(kinds.values())}); move one elsewhere,"
            " or read the other in a recipe"
        )
    if TAR_SUFFIXES in kinds:
        return read_webdataset(root, split, columns, strict=False)
    if PARQUET_SUFFIXES in kinds and one:
        return by_column(partial(read_parquet, root, "train"), split, columns)
    if PARQUET_SUFFIXES in kinds:
        return read_parquet(root, split, columns)
    if IMAGE_SUFFIXES in kinds:
        return read_images(root, split)
    where = f"{root}: the {split} split" if mine else f"{root}:"
    name = files[0].path[top:].strip("/")
    raise UsageError(
        f"{where} holds neither images nor .parquet nor .tar files (first file: {name})"
    )


def column_types(source: Any) -> dict[str, Any]:
    """Column → Arrow type of tables, tar shards or a `ray.data.Dataset`; empty for other sources."""
    if hasattr(source, "map_batches"):
        schema = source.schema()
        return dict(zip(schema.names, schema.types, strict=True)) if schema else {}
    return source.column_types() if hasattr(source, "column_types") else {}


def refuse_absent_columns(
    data: str, types: dict[str, Any], params: dict[str, str], hints: Mapping[str, str] = {}
) -> None:
    fits = dict(zip(params, (_may_be_image, _may_be_label), strict=True))
    problems = []
    for param, column in params.items():
        if column not in types:
            likely = [name for name, kind in types.items() if fits[param](kind) and name != "key"]
            likely.sort(key=lambda name: USUAL.search(name.lower()) is None)
            others = f" (or {', '.join(likely[1:])})" if len(likely) > 1 else ""
            there = f"has no column {column}; it has {', '.join(types)}"
            write = (
                f": set params.{param}={likely[0]}{others}"
                if likely
                else ", which cannot stand for it"
            )
            problems.append(f"{data}: {there}{write}{hints.get(param, '')}")
    if problems:
        raise UsageError(*problems)


def _may_be_image(kind: Any) -> bool:
    import pyarrow as pa

    binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return bool(binary or content_of_struct(kind) or (is_list(kind) and is_list(kind.value_type)))


def _may_be_label(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(kind))


def names_in(data: str, source: Any, column: str, train: Sequence[str] = ()) -> list[str]:
    """The names of a column's classes, if Hugging Face datasets wrote the files."""
    found = [*train]
    for text in dict.fromkeys(
        each.get(b"huggingface") for each in getattr(source, "metadata", list)()
    ):
        try:
            names = [str(name) for name in json.loads(text)["info"]["features"][column]["names"]]
        except (KeyError, TypeError, ValueError):
            continue
        for number, (one, other) in enumerate(zip(found, names, strict=False)):
            if one != other:
                raise UsageError(
                    f"{data}: {number} in column {column} is {one} in one file and {other} in another; write"
                    " them again with the same ClassLabel"
                )
        found = found or names
    return found


def distinct_labels(
    data: str, source: Any, column: str, numbers: bool, listed: Sequence[str] = ()
) -> list[Any] | None:
    """The labels in a column; of text, those that are not `listed` must be classes by what they say."""
    import pyarrow as pa

    if two := getattr(source, "twice", {}).get(column):
        raise UsageError(f"{data}: {two} would be one class; rename one of them")
    kind = column_types(source).get(column)
    if kind is None or not (numbers or is_text(kind)):
        return None
    wrong = f"{data}: column {column} {{}}; labels must be integers or text"
    # pandas writes integers beside a NULL as floats, and Snowflake as decimals.
    if not (_may_be_label(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise UsageError(wrong.format(f"is {kind}"))
    found = source.unique(column) if hasattr(source, "map_batches") else source.label_values(column)
    if found is None:
        return None
    labels = sorted({value for value in found if value is not None})
    for value in labels:
        if not (value.strip() if isinstance(value, str) else value % 1 == 0):
            raise UsageError(wrong.format(f"holds {value!r}"))
    if is_text(kind) and not listed:
        if marks := [value for value in labels if is_missing(value)]:
            text = f"holds {', '.join(marks)}; leave those rows out, or list all classes in class_names"
            raise UsageError(f"{data}: column {column} {text}")
        if why := unclear(
            found if isinstance(found, Counter) else Counter(dict.fromkeys(labels, 0))
        )[0]:
            raise UsageError(f"{data}: column {column} holds labels {why}")
    return labels if is_text(kind) else [int(value) for value in labels]
