"""Head: detects the reader for the data in a folder."""

from __future__ import annotations

from stoker.data.sources.base import Source
from stoker.data.sources.delta import read_delta
from stoker.data.sources.files import IMAGE_SUFFIXES, PARQUET_SUFFIXES, is_delta_table
from stoker.data.sources.images import read_images
from stoker.data.sources.parquet import read_parquet
from stoker.data.sources.webdataset import read_webdataset
from stoker.errors import UsageError
from stoker.storage.filesystems import join, list_files


def read_any(root: str, split: str, columns: list[str] | None = None) -> Source | None:
    """Head: read tar shards, Parquet, a Delta table or image folders, whichever the folder holds.

    Args:
        root: folder or URI.
        split: train or val.
        columns: read these columns only; default: all. Image folders have `image` and `label`.

    Raises:
        UsageError: the folder is empty, or holds none of these formats.
    """
    if is_delta_table(root) or is_delta_table(join(root, split)):
        return read_delta(root, split, columns)
    files = list_files(root)
    names = [f.path.lower() for f in files]
    if any(name.endswith(".tar") for name in names):
        return read_webdataset(root, split, columns, strict=False)
    if any(name.endswith(PARQUET_SUFFIXES) for name in names):
        return read_parquet(root, split, columns)
    if any(name.endswith(IMAGE_SUFFIXES) for name in names):
        return read_images(root, split)
    raise UsageError(
        f"{root}: holds neither images nor .parquet nor .tar files (first file: {files[0].base_name})"
    )
