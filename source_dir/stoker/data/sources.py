"""Sources: where records come from. The head plans and checks pieces, CPU tasks read them.

read_images(".data/flowers", "train")      class per folder, under train/ and val/
read_parquet(".data/rows", "train")        bytes, numbers, strings, tensors
read_webdataset(".data/shards", "train")   tar shards
read_delta(".data/table")                  a Delta table
read_torch(dataset)                        any map-style torch dataset
read_range(10_000)                         numbers, for synthetic data
read_any(".data/flowers", "train")         whichever of the first four it is
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.config import UsageError
from stoker.data.filesystems import child_folders, join, list_files

if TYPE_CHECKING:
    import numpy as np

    from stoker.data.nulls import Nulls
    from stoker.data.parquet import Filters

Record = dict[str, Any]
"""One record: columns by name, and its identity under "key"."""

SPLIT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}
ID_MODULUS = 2**63
PARQUET_SUFFIXES = (".parquet", ".pq")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")


class BadRecord(NamedTuple):
    """CPU task: a record that could not be read or preprocessed, and why."""

    key: str
    reason: str
    passing: bool = False
    """Whether it may well be read later, or on another host; it is bad only when that was tried."""


@dataclass(frozen=True)
class Piece:
    """Head → CPU task: what one task reads, of a file or a range of indices."""

    path: str
    start: int = 0
    stop: int = 0
    rows: int | None = None
    """How many records it holds, where that is known without reading it."""
    items: tuple[Any, ...] = ()
    home: str = ""
    """Records of pieces with one home come from the same part of the data in every epoch, so what a host
    keeps of them it finds again; empty: they come from anywhere."""


class Source(ABC):
    """Head and CPU task: the records of one split."""

    random: bool = True
    """False: reading draws no random numbers. Else the global generators (`random`, `numpy.random`, torch)
    are seeded for every record, by (seed, epoch, key) where `listing` tells the keys."""

    def check(self) -> None:  # noqa: B027 - nothing to check is a good answer
        """Head: look at what can be looked at before training.

        Raises:
            UsageError: absent, empty, truncated or lacking a column, naming the file.
        """

    @abstractmethod
    def pieces(self, records: int, order: np.random.Generator | None) -> list[Piece]:
        """Head: the split cut into pieces of about `records` records, permuted by `order`."""

    def pieces_at_home(self, records: int, order: np.random.Generator | None, homes: int) -> list[Piece]:
        """Head: as `pieces`, permuted only within `homes` parts of the data, which are the same in every
        epoch. Sources whose pieces are the same in every epoch anyway ignore `homes`."""
        return self.pieces(records, order)

    def listing(self, piece: Piece) -> list[tuple[str, Piece]] | None:
        """CPU task: key and piece of each record of a piece; None where only reading it tells the keys."""
        return None

    def name_of(self, piece: Piece) -> str:
        """CPU task: what a piece is called wherever the data lies: it seeds the order of its records."""
        return piece.path

    def arrangement(self, count: int, order: np.random.Generator | None) -> list[int] | None:
        """CPU task: in which order `read` gives the `count` records of a piece; None: nobody knows."""
        return None

    @abstractmethod
    def read(self, piece: Piece, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        """CPU task: the records of a piece; a record that cannot be read comes as a BadRecord.

        Raises:
            OSError: the way to the data failed; the head has the piece read again, elsewhere if it can.
        """

    @abstractmethod
    def count(self) -> int | None:
        """Head: the number of records, None where only reading would tell."""

    def for_tasks(self) -> Source:
        """Head: what CPU tasks need for `read`; a long list of files, say, stays on the head."""
        return self

    def fingerprint(self) -> str:
        """Head: short text that changes when other records would be read; made within about a second.

        Empty: nothing but reading tells, so a sample of the records is read (`stoker.data.identity`).
        """
        return ""

    def classes(self) -> list[str] | None:
        """Head: names of the classes in the order of their labels, where the source knows them."""
        return None


def read_images(root: str, split: str) -> Source | None:
    """Head: images in a folder per class, `root/train/cat/1.jpg`; None without that split."""
    from stoker.data.images import ImageFolderSource

    folder = split_folder(root, split)
    return ImageFolderSource(folder, root) if folder else None


def read_parquet(
    root: str,
    split: str,
    columns: list[str] | None = None,
    filters: Filters | None = None,
    nulls: Nulls | None = None,
) -> Source | None:
    """Head: Parquet files under `root/<split>/` or named `root/<split>*.parquet`.

    Args:
        root: folder or URI; a single file is the train split.
        split: train or val.
        columns: read these columns only; default: all.
        filters: keep rows that match, [("label", "<", 5), …]; row groups that cannot match are not read.
        nulls: what becomes of a column's NULLs, {"age": "quarantine"}: the record is left out and booked;
            "keep": NaN of a float, else 0, False or "" with a column age__valid; or a value instead of them.
            NULLs of other columns are refused before training.

    Raises:
        UsageError: nothing there, or a Delta table, whose old files are not to be read.
    """
    from stoker.data.checksums import sums_of
    from stoker.data.parquet import ParquetSource

    if is_delta_table(root):
        raise UsageError(f"{root}: is a Delta table, some of its files may be old; read it with read_delta")
    files = split_files(root, split, PARQUET_SUFFIXES)
    sums = sums_of(root, files, PARQUET_SUFFIXES) if files else None
    return ParquetSource(files, columns, filters, nulls=nulls, sums=sums) if files else None


def read_delta(
    table: str,
    split: str | None = None,
    columns: list[str] | None = None,
    filters: Filters | None = None,
    version: int | None = None,
    nulls: Nulls | None = None,
) -> Source | None:
    """Head: a Delta table; with the extra `delta` (`pip install deltalake`).

    Args:
        table: path or s3:// address of a table, or of a folder with the tables train and val.
        split: train or val; None: the table itself, `filters` saying which of its rows.
        columns: read these columns only; default: all.
        filters: keep rows that match, [("split", "==", "train"), …]; partitions and row groups that
            cannot match are not read.
        version: the table as it was at this version; default: as it is when the job starts.
        nulls: what becomes of a column's NULLs, as `read_parquet` takes it.

    Raises:
        UsageError: no such table, version or column, or a table that needs a feature not known here.
    """
    from stoker.data.delta import open_delta

    if split is None or is_delta_table(table):
        if split not in (None, "train"):
            return None
        return open_delta(table, columns, filters, version, nulls, table)
    folder = split_folder(table, split)
    return open_delta(folder, columns, filters, version, nulls, table) if folder else None


def read_webdataset(root: str, split: str, columns: list[str] | None = None) -> Source | None:
    """Head: tar shards under `root/<split>/` or named `root/<split>*.tar`.

    Args:
        root: folder or URI; a single file is the train split.
        split: train or val.
        columns: give these columns only; default: all.
    """
    from stoker.data.checksums import sums_of
    from stoker.data.webdataset import WebDatasetSource

    if root.startswith("pipe:"):
        raise UsageError(f"{root}: pipe: addresses run commands and are refused; use a path or s3://")
    files = split_files(root, split, (".tar",))
    return WebDatasetSource(files, sums_of(root, files, (".tar",)), columns) if files else None


def read_torch(dataset: Any, columns: tuple[str, ...] = ("image", "label")) -> Source:
    """Head: a map-style torch dataset; tuples are named by `columns`."""
    from stoker.data.indexed import TorchSource

    return TorchSource(dataset, columns)


def read_range(n: int) -> Source:
    """Head: `n` records that hold nothing but their `index`; the chain makes the rest."""
    from stoker.data.indexed import RangeSource

    return RangeSource(n)


def read_any(root: str, split: str, columns: list[str] | None = None) -> Source | None:
    """Head: tar shards, Parquet, a Delta table or image folders, by what lies there.

    Args:
        root: folder or URI.
        split: train or val.
        columns: read these columns only; default: all. Image folders have `image` and `label`.

    Raises:
        UsageError: nothing there, or nothing of the three.
    """
    if is_delta_table(root) or is_delta_table(join(root, split)):
        return read_delta(root, split, columns)
    files = list_files(root)
    names = [f.path.lower() for f in files]
    if any(name.endswith(".tar") for name in names):
        return read_webdataset(root, split, columns)
    if any(name.endswith(PARQUET_SUFFIXES) for name in names):
        return read_parquet(root, split, columns)
    if any(name.endswith(IMAGE_SUFFIXES) for name in names):
        return read_images(root, split)
    raise UsageError(
        f"{root}: holds neither images nor .parquet nor .tar files (first file: {files[0].base_name})"
    )


def is_delta_table(uri: str) -> bool:
    """Head: whether a folder is a Delta table."""
    return "_delta_log" in child_folders(uri, hidden=True)


def split_folder(root: str, split: str) -> str | None:
    """Head: the sub-folder of a split, None where the data has other splits only.

    Raises:
        UsageError: the data has no train split at all.
    """
    list_files(root)
    there = child_folders(root)
    for name in SPLIT_NAMES[split]:
        if name in there:
            return join(root, name)
    if split == "train":
        raise UsageError(f"{root}: has no folder train/ (found: {', '.join(there) or 'no folder'})")
    return None


def split_files(root: str, split: str, suffixes: tuple[str, ...]) -> list[Any]:
    """Head: the files of a split: of its folder, or with its name in front.

    Raises:
        UsageError: nothing there for the train split.
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


def cut_indices(n: int, records: int, order: np.random.Generator | None, homes: int = 0) -> list[Piece]:
    """Head: the indices 0 … n-1, permuted, in pieces of `records`.

    Args:
        n: how many.
        records: in a piece.
        order: permutes them; None: as they are.
        homes: permute within so many random parts of them that never change, and then the pieces of all
            parts; 0: permute all at once.
    """
    import numpy as np

    parts: list[tuple[str, list[int]]]
    if order is None:
        parts = [(str(i), list(range(i, min(i + records, n)))) for i in range(0, n, records)]
    elif homes < 2:
        indices = order.permutation(n).tolist()
        parts = [("", indices[i : i + records]) for i in range(0, n, records)]
    else:
        whole = np.random.default_rng(0).permutation(n)
        parts = []
        for home in range(homes):
            own = order.permutation(whole[home::homes]).tolist()
            parts += [(str(home), own[i : i + records]) for i in range(0, len(own), records)]
        parts = [parts[i] for i in order.permutation(len(parts))]
    return [Piece("", rows=len(part), items=tuple(part), home=home) for home, part in parts]


def digest(*parts: Any) -> str:
    """Head: what identifies data, as 16 hexadecimal digits."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def record_id(key: str) -> int:
    """Every host: a record's identity as 63 bits, so that sums of ids compare sets of records."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
