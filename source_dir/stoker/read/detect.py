"""Head: detects the reader for the data in a folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from stoker.errors import UsageError
from stoker.read.arrow import is_text
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
from stoker.read.images import read_images
from stoker.read.parquet import read_parquet
from stoker.read.sources import Source
from stoker.read.webdataset import read_webdataset
from stoker.storage.filesystems import filesystem_of, is_hidden, join, list_files

FORMATS = TAR_SUFFIXES, PARQUET_SUFFIXES, IMAGE_SUFFIXES


def by_column(read: Callable[..., Any], split: str, columns: list[str] | None) -> Source | None:
    """The rows of one table that its column `split` gives to a split; all for training without one."""
    table = read(columns=["split"])
    kind = table.column_types().get("split")
    if kind is None or not is_text(kind):
        source: Source | None = read(columns=columns) if split == "train" else None
        return source
    values = {"NULL" if value is None else value for value in table.label_values("split")}
    mine = {name: [each for each in SPLIT_NAMES[name] if each in values] for name in SPLIT_NAMES}
    others = ", ".join(sorted(values - set(sum(SPLIT_NAMES.values(), ()))))
    if not mine["train"]:
        found = others or ", ".join(mine["val"])
        raise UsageError(f"{table.folder}: column split holds {found}, but no train; rename its values")
    name = only(table.folder, split, mine[split])
    notes = [f"{table.folder}: rows not read: of split {others}"] if others and split == "train" else []
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
        next((f for f in files if f.path.lower().endswith(kind) and not is_hidden(f.path[top:])), None)
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
    raise UsageError(f"{where} holds neither images nor .parquet nor .tar files (first file: {name})")
