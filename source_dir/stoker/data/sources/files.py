"""Head: finds the files of a split."""

from __future__ import annotations

from typing import Any

from stoker.errors import UsageError
from stoker.storage.filesystems import child_folders, join, list_files

SPLIT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}
PARQUET_SUFFIXES = (".parquet", ".pq")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")


def is_delta_table(uri: str) -> bool:
    """Head: whether a folder is a Delta table."""
    return "_delta_log" in child_folders(uri, hidden=True)


def split_folder(root: str, split: str) -> str | None:
    """Head: the sub-folder of a split; None if the data has only other splits.

    Raises:
        UsageError: the data has no train split.
    """
    files = list_files(root)
    there = child_folders(root)
    for name in SPLIT_NAMES[split]:
        if name in there:
            return join(root, name)
    if split == "train":
        hint = ""
        if there and not {*there} & {*SPLIT_NAMES["val"]} and files[0].path.lower().endswith(IMAGE_SUFFIXES):
            hint = "; split it into train/ and val/ first, see docs/tutorials/own-images.md"
        raise UsageError(f"{root}: has no folder train/ (found: {', '.join(there) or 'no folder'}){hint}")
    return None


def split_files(root: str, split: str, suffixes: tuple[str, ...]) -> list[Any]:
    """Head: the files of a split: in its folder, or named with its prefix.

    Raises:
        UsageError: the train split has no files.
    """
    files = list_files(root, suffixes)
    if root.lower().endswith(suffixes):
        return files if split == "train" else []
    for name in SPLIT_NAMES[split]:
        if name in child_folders(root):
            return list_files(join(root, name), suffixes)
    prefixes = tuple(name + sign for name in SPLIT_NAMES[split] for sign in "-_.")
    named = [f for f in files if f.base_name.startswith(prefixes)]
    if not named and split == "train":
        raise UsageError(
            f"{root}: no train split: expected a folder train/ or files train-*{suffixes[0]}"
            f" (found {files[0].base_name})"
        )
    return named
