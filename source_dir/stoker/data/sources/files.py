"""Head: finds the files of a split."""

from __future__ import annotations

from typing import Any

from stoker.errors import UsageError, nearest
from stoker.storage.filesystems import IMAGE_SUFFIXES as IMAGE_SUFFIXES
from stoker.storage.filesystems import child_folders, join, list_files

SPLIT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}
PARQUET_SUFFIXES = (".parquet", ".pq")
TAR_SUFFIXES = (".tar",)
_UNREAD: dict[tuple[str, ...], tuple[str, ...]] = {
    IMAGE_SUFFIXES: (
        *(".heic", ".heif", ".avif", ".jxl", ".jp2", ".jfif", ".jpe", ".ppm", ".pgm", ".svg"),
        *(".dcm", ".dng", ".cr2", ".nef", ".arw"),
    ),
    **{
        data: tuple(suffix + packed for suffix in data for packed in (".gz", ".bz2", ".xz", ".zst", ".zip"))
        for data in (TAR_SUFFIXES, PARQUET_SUFFIXES)
    },
}
"""Files of the same kind that no source reads: beside others they would be missing silently."""


def is_delta_table(uri: str) -> bool:
    """Head: whether a folder is a Delta table."""
    return "_delta_log" in child_folders(uri, hidden=True)


def split_folder(root: str, split: str) -> str | None:
    """Head: the sub-folder of a split; None if the data has only other splits.

    Raises:
        UsageError: the data has no train split, or its folders leave open which one is meant.
    """
    if name := _folder_name(root, split):
        return join(root, name)
    if split == "train":
        files = list_files(root)
        there = child_folders(root)
        hint = ""
        if there and not {*there} & {*SPLIT_NAMES["val"]} and files[0].path.lower().endswith(IMAGE_SUFFIXES):
            hint = "; split it into train/ and val/ first, see docs/tutorials/own-images.md"
        raise UsageError(f"{root}: has no folder train/ (found: {', '.join(there) or 'no folder'}){hint}")
    return None


def split_files(root: str, split: str, suffixes: tuple[str, ...]) -> list[Any]:
    """Head: the files of a split: in its folder, or named with its prefix.

    Raises:
        UsageError: the train split has no files, or the split holds compressed ones.
    """
    files = list_files(root, suffixes)
    if root.lower().endswith(suffixes):
        return files if split == "train" else []
    mine = files_of(root, split)
    refuse_unread(mine, suffixes)
    named = [f for f in mine if f.path.lower().endswith(suffixes)]
    if mine and not named and (name := _folder_name(root, split)):
        list_files(join(root, name), suffixes)  # says what is there instead
    if not named and split == "train":
        raise UsageError(
            f"{root}: no train split: expected a folder train/ or files train-*{suffixes[0]}"
            f" (found {files[0].base_name})"
        )
    return named


def files_of(root: str, split: str) -> list[Any]:
    """Head: the files of a split, of any kind: in its folder, or else named with its prefix.

    Raises:
        UsageError: several folders or prefixes name the split.
    """
    if name := _folder_name(root, split):
        return list_files(join(root, name))
    files = list_files(root)
    signs = "-_.0123456789"
    found = {
        name: [f for f in files if f.base_name.startswith(tuple(name + sign for sign in signs))]
        for name in SPLIT_NAMES[split]
    }
    return found.get(_only(root, split, [name for name in found if found[name]]), [])


def refuse_unread(files: list[Any], suffixes: tuple[str, ...]) -> None:
    """Head: refuse data files that the reader of these suffixes does not read.

    Raises:
        UsageError: names the first one.
    """
    unread = [f.path for f in files if f.path.lower().endswith(_UNREAD[suffixes])]
    if unread:
        raise UsageError(
            f"{unread[0]}: files of this kind are not read ({len(unread)} of {len(files)}); convert or"
            f" decompress them to {' or '.join(suffixes)}, or move them elsewhere"
        )


def _folder_name(root: str, split: str) -> str:
    """The name of a split's folder; empty if there is none."""
    there = child_folders(root)
    name = _only(root, split, [name for name in SPLIT_NAMES[split] if name in there])
    if not name and split == "val" and {*there} & {*SPLIT_NAMES["train"]}:
        # A run without validation would be the only sign of a misspelt name.
        for other in there:
            if nearest(other.lower(), SPLIT_NAMES["val"][:3], cutoff=0.8):
                raise UsageError(f"{root}: {other}/ is no split; rename it to val/, or move it elsewhere")
    return name


def _only(root: str, split: str, names: list[str]) -> str:
    """The name to read; a test split is read if there is no other for validation."""
    certain = [name for name in names if name != "test"]
    if len(certain) > 1:
        raise UsageError(
            f"{root}: {certain[0]} and {certain[1]} both name the {split} split; merge or rename one"
        )
    return names[0] if names else ""
