"""WebDataset tar shards: files that share a stem are one record."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from stoker.config import UsageError
from stoker.data.filesystems import common_folder, filesystem_of_files
from stoker.data.identity import fingerprint_of_files
from stoker.data.sources import IMAGE_SUFFIXES, BadRecord, Piece, Record, Source

if TYPE_CHECKING:
    import numpy as np

WALK_LIMIT_BYTES = 4 * 2**30
"""Local shards up to this size in all are walked header by header before training."""

SHUFFLE_WINDOW = 1024
"""Records held back while a shuffled shard is read."""

_END = b"\0" * 1024

T = TypeVar("T")


class WebDatasetSource(Source):
    """Head and CPU task: `0001.jpg`, `0001.cls` → `image` (bytes), `label`; other members by suffix."""

    random = False

    def __init__(self, files: list[Any]) -> None:
        self.paths = [f.path for f in files]
        self.folder = common_folder(files)
        self.sizes = [f.size for f in files]
        self.filesystem = filesystem_of_files(files)
        self.rows: list[int | None] = [None] * len(files)

    def check(self) -> None:
        local = self.paths[0].startswith("/") and sum(self.sizes) <= WALK_LIMIT_BYTES
        with ThreadPoolExecutor(8) as pool:
            self.rows = list(pool.map(self._walk if local else self._tail, self.paths, self.sizes))
        if self.count() == 0:
            raise UsageError(f"{self.paths[0]}: the tar shards hold no record")

    def _walk(self, path: str, size: int) -> int:
        self._tail(path, size)
        keys = set()
        try:
            with self.filesystem.open_input_file(path) as file, tarfile.open(fileobj=file) as tar:
                for member in tar:
                    if member.isfile():
                        keys.add(_split_name(member.name)[0])
        except (tarfile.TarError, OSError, EOFError) as error:
            raise UsageError(f"{path}: not a whole tar shard: {error}") from None
        return len(keys)

    def _tail(self, path: str, size: int) -> None:
        """A whole tar ends with two empty blocks, so one small read finds a truncated shard."""
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
        return fingerprint_of_files(self.filesystem, self.paths, self.sizes, names)

    def pieces(self, records: int, order: np.random.Generator | None) -> list[Piece]:
        pieces = [Piece(p, rows=n, home=p) for p, n in zip(self.paths, self.rows, strict=True)]
        if order is not None:
            pieces = [pieces[i] for i in order.permutation(len(pieces))]
        return pieces

    def name_of(self, piece: Piece) -> str:
        return piece.path.removeprefix(self.folder)

    def arrangement(self, count: int, order: np.random.Generator | None) -> list[int]:
        return list(shuffled(range(count), order))

    def read(self, piece: Piece, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        return shuffled(self._stream(piece.path), order)

    def _stream(self, path: str) -> Iterator[Record | BadRecord]:
        shard = path.removeprefix(self.folder)
        current: Record | None = None
        with (
            self.filesystem.open_input_stream(path) as stream,
            tarfile.open(fileobj=stream, mode="r|") as tar,
        ):
            for member in tar:
                if not member.isfile():
                    continue
                stem, suffix = _split_name(member.name)
                key = f"{shard}:{stem}"
                file = tar.extractfile(member)
                content = file.read() if file else b""
                if current is None or current["key"] != key:
                    if current is not None:
                        yield _checked(current)
                    current = {"key": key}
                _put(current, suffix, content)
        if current is not None:
            yield _checked(current)


def shuffled(stream: Iterable[T], order: np.random.Generator | None) -> Iterator[T]:
    """CPU task: a stream permuted within a window that moves along it."""
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


def _split_name(name: str) -> tuple[str, str]:
    folder, _, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return (f"{folder}/{stem}" if folder else stem), suffix.lower()


def _put(record: Record, suffix: str, content: bytes) -> None:
    """Adds one tar member to a record; what cannot be read marks the record as bad."""
    try:
        if f".{suffix}" in IMAGE_SUFFIXES:
            record["image"] = content
        elif suffix in ("cls", "index"):
            record["label"] = int(content)
        elif suffix == "json":
            record["json"] = json.loads(content)
        elif suffix in ("txt", "text"):
            record["text"] = content.decode()
        else:
            record[suffix] = content
    except ValueError as error:
        record["_bad"] = f".{suffix}: {error}"


def _checked(record: Record) -> Record | BadRecord:
    reason = record.pop("_bad", None)
    return BadRecord(record["key"], reason) if reason else record
