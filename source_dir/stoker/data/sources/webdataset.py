"""WebDataset tar shards: files with the same stem form one record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from stoker.data.messages import BadRecord, Record, Shard
from stoker.data.sources import checksums
from stoker.data.sources.base import Source, StreamedSource
from stoker.data.sources.checksums import sums_of
from stoker.data.sources.files import IMAGE_SUFFIXES, TAR_SUFFIXES, split_files
from stoker.data.sources.identity import fingerprint_of_files
from stoker.data.sources.tar import CHUNKS_PREPARED, Ahead, members, streamed
from stoker.errors import UsageError
from stoker.storage.filesystems import common_folder, filesystem_of_files, is_local

if TYPE_CHECKING:
    import numpy as np

WALK_LIMIT_BYTES = 4 * 2**30
"""Local shards up to this total size are walked header by header before training."""

SHUFFLE_WINDOW = 1024
"""Number of records to buffer while a shuffled shard is read."""

_END = b"\0" * 1024

_COLUMNS = {
    **dict.fromkeys((suffix[1:] for suffix in IMAGE_SUFFIXES), "image"),
    **dict.fromkeys(("cls", "index"), "label"),
    **dict.fromkeys(("txt", "text"), "text"),
}
"""Columns whose name differs from the suffix."""

T = TypeVar("T")


class WebDatasetSource(StreamedSource):
    """Head and chain worker: `0001.jpg`, `0001.cls` → `image` (bytes), `label`; see `Naming`.

    Args:
        files: pyarrow FileInfo of each shard.
        sums: SHA-256 by path; every shard is verified while it is read. Empty: do not verify.
        columns: of the records; None: all.
        strict: whether a column that no record has is an error.
    """

    random = False

    def __init__(
        self,
        files: list[Any],
        sums: dict[str, str] | None = None,
        columns: list[str] | None = None,
        strict: bool = False,
    ) -> None:
        self.columns, self.strict = columns, strict
        self._found: dict[str, None] = {"key": None}
        """Columns of the walked shards."""
        self.paths = [f.path for f in files]
        self.folder = common_folder(files)
        self.sizes = [f.size for f in files]
        self.filesystem = filesystem_of_files(files)
        self.sums = sums or {}
        self.rows: list[int | None] = [None] * len(files)
        self.far = not is_local(files[0].path)
        self._prepared: tuple[str, Ahead] | None = None
        """Path of the shard that will probably be read next, and its first chunks."""

    def check(self) -> None:
        local = is_local(self.paths[0]) and sum(self.sizes) <= WALK_LIMIT_BYTES
        with ThreadPoolExecutor(8) as pool:
            self.rows = list(pool.map(self._walk if local else self._tail, self.paths, self.sizes))
        if self.count() == 0:
            raise UsageError(f"{self.paths[0]}: the tar shards hold no records")
        # Only if every header was read: a column may be optional.
        if self.strict and local and (absent := [c for c in self.columns or () if c not in self._found]):
            known = ", ".join([*self._found][1:])
            raise UsageError(f"{self.folder}: columns: no record has {absent[0]!r}; they have: {known}")

    def _walk(self, path: str, size: int) -> int:
        self._tail(path, size)
        naming = Naming(path)
        with self.filesystem.open_input_file(path) as file:
            for member in members(file, path, contents=False):
                if place := naming.place(member.name):
                    self._found[place[1]] = None
        return len(naming.stems)

    def _tail(self, path: str, size: int) -> None:
        """Refuse a truncated shard by one small read: a whole tar ends with two empty blocks."""
        if size == 0:
            raise UsageError(f"{path}: the tar shard is empty (0 bytes)")
        with self.filesystem.open_input_file(path) as file:
            file.seek(max(0, size - len(_END)))
            whole = size % 512 == 0 and file.read(len(_END)) == _END
        if not whole:
            raise UsageError(
                f"{path}: not a whole tar shard: it does not end as a tar does ({size} bytes);"
                " copy or write it again"
            )

    def count(self) -> int | None:
        known = [rows for rows in self.rows if rows is not None]
        return sum(known) if len(known) == len(self.rows) else None

    def fingerprint(self) -> str:
        names = [path.removeprefix(self.folder) for path in self.paths]
        layout = names, self.columns, [*self.sums.values()]
        return fingerprint_of_files(self.filesystem, self.paths, self.sizes, layout)

    def shards(self, records: int, order: np.random.Generator | None) -> list[Shard]:
        shards = [
            Shard(path, rows=rows, home=path, name=path.removeprefix(self.folder))
            for path, rows in zip(self.paths, self.rows, strict=True)
        ]
        if order is not None:
            shards = [shards[i] for i in order.permutation(len(shards))]
        return shards

    def arrangement(self, count: int, order: np.random.Generator | None) -> list[int]:
        return list(shuffled(range(count), order))

    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        stream = shuffled(self._stream(shard.path), order)
        return stream if self.columns is None else map(self._wanted, stream)

    def _wanted(self, record: Record | BadRecord) -> Record | BadRecord:
        """A record with only the requested columns."""
        names = ("key", *(self.columns or ()))
        return record if isinstance(record, BadRecord) else {n: record[n] for n in names if n in record}

    def prepare(self, shard: Shard) -> None:
        self._drop()
        if self.far:
            self._prepared = shard.path, Ahead(self.filesystem.open_input_file(shard.path), CHUNKS_PREPARED)

    def _drop(self) -> None:
        if self._prepared is not None:
            self._prepared[1].close()
            self._prepared = None

    def _open(self, path: str) -> Any:
        """Open a shard, or take over what was prepared of it."""
        if self._prepared is not None and self._prepared[0] == path:
            (_, prepared), self._prepared = self._prepared, None
            return prepared
        self._drop()
        file = self.filesystem.open_input_file(path)
        return Ahead(file) if self.far else file

    def _stream(self, path: str) -> Iterator[Record | BadRecord]:
        """Yield records; the last one only after the whole shard was read and verified."""
        shard = path.removeprefix(self.folder)
        naming = Naming(path)
        sha256 = hashlib.sha256() if self.sums else None
        current: Record = {}
        with self._open(path) as file, streamed(file, sha256) as stream:
            for member in members(stream, path):
                place = naming.place(member.name)
                if place is None:
                    continue
                stem, column, suffix = place
                key = f"{shard}:{stem}"
                if current and current["key"] != key:
                    yield _checked(current)
                    current = {}
                current["key"] = key
                _put(current, column, suffix, member.content)
        if sha256 is not None:
            checksums.compare(path, sha256.hexdigest(), self.sums[path])
        if current:
            yield _checked(current)


class Naming:
    """Head and chain worker: maps the members of one shard to record and column.

    `<stem>.<suffix>` names a column by its suffix: an image suffix → `image`, `cls` and `index` → `label`,
    `txt` and `text` → `text`, any other → a column of its name. `<stem>.<column>.<suffix>` names the column
    explicitly. Only the suffix decides how the content is read. Hidden files are ignored.

    Args:
        path: of the shard, for errors.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.stems: set[str] = set()
        self._stem: str | None = None
        self._columns: dict[str, str] = {}
        """Of the current record: column → member."""

    def place(self, member: str) -> tuple[str, str, str] | None:
        """Stem, column and suffix of the next member; None for a hidden file.

        Raises:
            UsageError: two members for one column, a record in two places, or a name without a column.
        """
        folder, _, base = member.rpartition("/")
        if base.startswith("."):
            return None
        name, _, rest = base.partition(".")
        stem = f"{folder}/{name}" if folder else name
        column, _, suffix = rest.lower().rpartition(".")
        column = column or _COLUMNS.get(suffix, suffix)
        if column in ("", "key") or column.startswith("__"):
            raise UsageError(
                f"{self.path}: {member} gives no column: name it {name}.<column>.<suffix>"
                " (not key, nor beginning with __)"
            )
        if stem != self._stem:
            if stem in self.stems:
                raise UsageError(
                    f"{self.path}: the members of record {stem} are not adjacent (the second part begins at"
                    f" {member}); write the shard in the order of names, as tar --sort=name does"
                )
            self.stems.add(stem)
            self._stem, self._columns = stem, {}
        if column in self._columns:
            raise UsageError(
                f"{self.path}: {self._columns[column]} and {member} both give the column {column}; name"
                f" one of them {name}.<column>.{suffix}: {name}.mask.png gives the column mask"
            )
        self._columns[column] = member
        return stem, column, suffix


def shuffled(stream: Iterable[T], order: np.random.Generator | None) -> Iterator[T]:
    """Chain worker: permute a stream within a sliding window."""
    if order is None:
        yield from stream
        return
    window: list[T] = []
    for item in stream:
        if len(window) < SHUFFLE_WINDOW:
            window.append(item)
            continue
        slot = int(order.integers(len(window)))
        yield window[slot]
        window[slot] = item
    yield from (window[i] for i in order.permutation(len(window)))


def _put(record: Record, column: str, suffix: str, content: bytes) -> None:
    """Add one tar member to a record; unreadable content marks the record as bad."""
    try:
        if suffix in ("cls", "index"):
            if b"_" in content:  # which Python's int skips
                raise ValueError(f"invalid literal for int(): {content[:40]!r}")
            record[column] = int(content)
        elif suffix == "json":
            record[column] = json.loads(content)
        elif suffix in ("txt", "text"):
            record[column] = content.decode()
        else:
            record[column] = content
    except ValueError as error:
        record["__bad"] = f".{suffix}: {error}"


def _checked(record: Record) -> Record | BadRecord:
    reason = record.pop("__bad", None)
    return BadRecord(record["key"], reason) if reason else record


def read_webdataset(
    root: str, split: str, columns: list[str] | None = None, strict: bool = True
) -> Source | None:
    """Head: read tar shards under `root/<split>/` or named `root/<split>*.tar`.

    Args:
        root: folder or URI; a single file is the train split.
        split: train or val.
        columns: return these columns only; default: all.
        strict: refuse a column that no record of local shards has.
    """
    if root.startswith("pipe:"):
        raise UsageError(f"{root}: pipe: addresses run commands and are refused; use a path or s3://")
    files, notes = split_files(root, split, TAR_SUFFIXES)
    if not files:
        return None
    return WebDatasetSource(files, sums_of(root, files, TAR_SUFFIXES), columns, strict).noting(*notes)
