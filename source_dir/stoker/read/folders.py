"""Head: finds the files of a split, and sorts out those that are none of its records."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import cache
from posixpath import splitext
from typing import Any
from urllib.parse import unquote

from stoker.errors import UsageError
from stoker.figures import count_of
from stoker.storage.filesystems import IMAGE_SUFFIXES as IMAGE_SUFFIXES
from stoker.storage.filesystems import (
    child_folders,
    children,
    filesystem_of,
    is_file,
    is_hidden,
    join,
    list_files,
)

SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "eval", "test", "testing"),
}
LAST = ("test", "testing")
"""Read for validation if there is nothing else."""
PARQUET_SUFFIXES = (".parquet", ".pq")
TAR_SUFFIXES = (".tar",)
IGNORED = re.compile(r"(readme|licen[cs]e)(\..*)?|thumbs\.db|desktop\.ini")
"""Names, in lower case, of files that are never data, besides hidden ones."""
_PART = re.compile(r"(.*)-(\d+)-of-(\d+)(.*)")
_INTEGER = re.compile(r"0|-?[1-9]\d{0,17}")
NULL = "__HIVE_DEFAULT_PARTITION__"


def is_delta_table(uri: str) -> bool:
    return "_delta_log" in child_folders(uri, hidden=True)


def split_folder(root: str, split: str) -> str | None:
    """The sub-folder of a split; None if the data has only other splits."""
    if name := split_name(root, split):
        return join(root, name)
    if split == "train":
        files = list_files(root)
        there = child_folders(root)
        images = any(f.path.lower().endswith(IMAGE_SUFFIXES) for f in files)
        hint = (
            "; split it into train/ and val/ first, see docs/tutorials/own-images.md, or name a CSV file"
            " with the labels in params.labels"
        )
        hint = hint if images and not {*there} & {*SPLIT_NAMES["val"]} else ""
        raise UsageError(
            f"{root}: has no folder train/ (found: {', '.join(there) or 'no folder'}){hint}"
        )
    return None


def split_files(
    root: str, split: str, suffixes: tuple[str, ...], ignore: Sequence[str] = ()
) -> tuple[list[Any], tuple[str, ...]]:
    """The files of a split, in its folder or named with its prefix, and lines on what is not read."""
    one = is_one(root, suffixes)
    mine = [] if one else files_of(root, split, underscored=True)
    if one and split == "train":
        mine = list_files(root)
    if is_file(root):
        return mine, ()
    lines = () if one else note_on_unread(root, split)
    if any("/_delta_log/" in f.path or f.path.endswith(".metadata.json") for f in mine):
        raise UsageError(
            f"{root}: the {split} split holds a Delta or Iceberg table, so some files may be outdated; read"
            " it with read_delta, or with ray.data.read_iceberg"
        )
    top = len(filesystem_of(root)[1])
    hidden = {f.path for f in mine if is_hidden(f.path[top:])}
    left = [path[top:].strip("/") for path in sorted(hidden) if path.lower().endswith(suffixes)]
    shown = [f for f in mine if f.path not in hidden]
    if shown or split == "val":
        read, notes = of_kind(root, shown, suffixes, ignore) if shown else ([], ())
    elif name := split_name(root, split):
        list_files(join(root, name), suffixes)  # says what the folder holds instead
        read, notes = [], ()
    else:
        raise UsageError(
            f"{root}: no train split: expected a folder train/ or files train-*{suffixes[0]}"
            f" (found {list_files(root, suffixes)[0].base_name})"
        )
    _refuse_parts(root, read)
    return read, (*lines, *notes, *not_read(root, left))


def _refuse_parts(root: str, files: list[Any]) -> None:
    """Refuse a set such as `train-00002-of-00004` that lacks a part, or has one twice. The others may be in
    the folders of other splits."""
    top = len(filesystem_of(root)[1])
    in_folders = _parts(f.base_name for f in list_files(root) if "/" in f.path[top:].strip("/"))
    for name, parts in _parts(f.path for f in files).items():
        if not (_is_whole(parts) or _is_whole(in_folders[name.rpartition("/")[2]])):
            raise UsageError(
                f"{name}-…-of-{parts[0][0]}: {count_of(len(parts), 'file')}, which are not this set; complete"
                " it, remove copies, or leave files out with ignore"
            )


def _parts(paths: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
    """Name of each set → size and number that its files name."""
    sets = defaultdict(list)
    for match in filter(None, map(_PART.fullmatch, paths)):
        sets[match[1]].append((int(match[3]), int(match[2])))
    return sets


def _is_whole(parts: list[tuple[int, int]]) -> bool:
    if not parts:
        return False
    count = parts[0][0]
    numberings = range(count), range(1, count + 1), range(count + 1)
    return any(
        len(r) == len(parts) and sorted(parts) == [(count, n) for n in r] for r in numberings
    )


def is_one(root: str, suffixes: tuple[str, ...]) -> bool:
    """Whether data without splits is one file, or a folder that its writer calls a file, as Spark."""
    named = root.rstrip("/").lower().endswith(suffixes)
    return is_file(root) or (
        named and not any(files_of(root, split, True) for split in SPLIT_NAMES)
    )


def files_of(root: str, split: str, underscored: bool = False) -> list[Any]:
    """The files of a split, of any kind: in its folder, or else named with its prefix or partition."""
    if name := split_name(root, split):
        return list_files(join(root, name), underscored=underscored)
    files, top = list_files(root, underscored=underscored), len(filesystem_of(root)[1])
    found = {
        name: [f for f in files if _is_of((name,), f.path[top:])] for name in SPLIT_NAMES[split]
    }
    return found.get(only(root, split, [name for name in found if found[name]]), [])


def of_kind(
    folder: str, files: list[Any], suffixes: tuple[str, ...], ignore: Sequence[str] = ()
) -> tuple[list[Any], tuple[str, ...]]:
    """The files with one of these suffixes, and a line that counts those that `ignore` leaves out.

    Raises:
        UsageError: there are others, apart from hidden ones and `IGNORED`.
    """
    top = len(filesystem_of(folder)[1])
    read, left, others = [], [], []
    for file in sorted(files, key=lambda file: file.path):
        path, name = file.path[top:].strip("/"), file.base_name
        if any(fnmatch(path, pattern) or fnmatch(name, pattern) for pattern in ignore):
            left.append(path)
        elif name.lower().endswith(suffixes):
            read.append(file)
        elif not (IGNORED.fullmatch(name.lower()) or is_hidden(name, underscored=True)):
            others.append(path)
    if others:
        pattern = f"*{splitext(others[0])[1]}" if splitext(others[0])[1] else others[0]
        raise UsageError(
            f"{folder}: {count_of(len(others), 'file')} not of the kind {' or '.join(suffixes[:2])} (first:"
            f' {others[0]}); move or convert them, or leave them out with ignore: ["{pattern}"] in params,'
            " or as an argument of the reader"
        )
    if not read:
        raise UsageError(f"{folder}: the folder holds no {' or '.join(suffixes[:2])} file")
    return read, not_read(folder, left)


def not_read(folder: str, paths: list[str]) -> tuple[str, ...]:
    found = defaultdict(list)
    for path in paths:
        _, sign, suffix = path.rpartition("/")[2].rpartition(".")
        found[f".{suffix}" if sign and len(suffix) < 9 else "without a suffix"].append(path)
    texts = [
        f"{len(those)} {kind} ({those[0]}{', …' * (len(those) > 1)})"
        for kind, those in found.items()
    ]
    what = f"{count_of(len(paths), 'file')} not read"
    return (f"{folder}: {what}: {', '.join(texts[:4])}{', …' * (len(texts) > 4)}",) if paths else ()


def note_on_unread(root: str, split: str) -> tuple[str, ...]:
    """A line on folders and files beside the splits; empty except for the training split."""
    names = sum(SPLIT_NAMES.values(), ())
    there = children(root) if split == "train" else []
    if any(f.base_name in names for f in there):
        found = [f.base_name + "/" * (not f.is_file) for f in there if f.base_name not in names]
    else:
        files, top = list_files(root) if there else [], len(filesystem_of(root)[1])
        found = [f.base_name for f in files if not _is_of(names, f.path[top:])]
    found = [n for n in found if not (is_hidden(n) or n[0] == "_" or IGNORED.fullmatch(n.lower()))]
    found.sort(key=lambda name: not name.endswith("/"))
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return (f"{root}: {', '.join(found[:3])}{more} not read: in no split",) if found else ()


@cache
def _prefixes(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name + sign for name in names for sign in "-_.0123456789")


def _is_of(names: tuple[str, ...], path: str) -> bool:
    """Whether the name of a file, or of a folder that Spark wrote as one, begins with that of a split, or a
    folder is a partition `split=NAME`."""
    *folders, name = path.split("/")
    written = [folder for folder in folders if folder.lower().endswith(PARQUET_SUFFIXES)]
    begins = any(part.startswith(_prefixes(names)) for part in (name, *written))
    return begins or any(f"split={name}" in folders for name in names)


def partitions_of(root: str, files: list[Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Path → the columns that its folders give (`label=cat/`, of Hive and Spark), and their types.

    A column is of integers if all its values below the root are, in any split; `01` is text.
    """
    import pyarrow as pa

    top = len(filesystem_of(root)[1])

    def columns(file: Any) -> dict[str, str]:
        folders = file.path[top:].split("/")[:-1]
        return {
            unquote(name): unquote(value)
            for name, sign, value in (folder.partition("=") for folder in folders)
            if sign
        }

    if not any(columns(file) for file in files):
        return {}, {}
    texts: dict[str, set[str]] = defaultdict(set)
    for file in list_files(root):
        for name, value in columns(file).items():
            texts[name].add(value)
    numbers = {n for n, values in texts.items() if all(map(_INTEGER.fullmatch, values - {NULL}))}

    def value_of(name: str, text: str) -> Any:
        return None if text == NULL else int(text) if name in numbers else text

    types = {name: pa.int64() if name in numbers else pa.string() for name in texts}
    return {
        f.path: {name: value_of(name, text) for name, text in columns(f).items()} for f in files
    }, types


def split_name(root: str, split: str) -> str:
    """The name of a split's folder; empty if there is none."""
    names = child_folders(root)
    return only(root, split, [name for name in SPLIT_NAMES[split] if name in names])


def only(root: str, split: str, names: list[str]) -> str:
    """The name to read of those of a split; a test split if there is no other for validation."""
    found = [name for name in names if name not in LAST] or names
    if len(found) > 1:
        raise UsageError(
            f"{root}: {found[0]} and {found[1]} both name the {split} split; merge or rename one"
        )
    return found[0] if found else ""
