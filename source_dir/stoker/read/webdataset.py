"""WebDataset tar shards: files with the same stem form one record."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar

from stoker.errors import UsageError
from stoker.protocol import BadRecord, Record, Shard
from stoker.read.folders import TAR_SUFFIXES, split_files
from stoker.read.identity import fingerprint_of_files
from stoker.read.members import (
    FOLDER,
    JSON,
    NUMBERS,
    TEXTS,
    Naming,
    Survey,
    derive,
    is_derived,
    member_of,
    merged,
    parse_member,
    survey_of,
)
from stoker.read.sources import Source, StreamedSource, permuted
from stoker.read.tar import CHUNKS_PREPARED, Ahead, members, streamed
from stoker.storage.filesystems import common_folder, filesystem_of, is_local

if TYPE_CHECKING:
    import numpy as np

WALK_LIMIT_BYTES = 4 * 2**30
"""Local shards up to this total size are walked header by header before training."""

SHUFFLE_WINDOW = 1024

_END = b"\0" * 1024
_surveys: dict[tuple[str, int, int, str], Survey] = {}
"""(path, size, modification time, how) of shards that this process has walked: a run opens its data twice."""

T = TypeVar("T")


class WebDatasetSource(StreamedSource):
    """`0001.jpg`, `0001.cls` → `image` (bytes), `label`; see `Naming`."""

    random = False

    def __init__(
        self,
        files: list[Any],
        filesystem: Any,
        columns: list[str] | None = None,
        strict: bool = False,
        label: str | None = None,
    ) -> None:
        self.columns, self.strict = columns, strict
        self.derived = {column: column for column in columns or () if is_derived(column)}
        """Column → `folder` or the field of JSON that it is, or the member that is the label."""
        if label and (columns is None or "label" in columns):
            self.derived["label"] = label
        self.members = {member_of(self.derived.get(column, column)) for column in columns or ()}
        self.paths = [f.path for f in files]
        self.folder = common_folder(files)
        self.sizes = [f.size for f in files]
        self.times = [f.mtime_ns for f in files]
        self.filesystem = filesystem
        self.rows: list[int | None] = [None for _ in files]
        self.far = not is_local(files[0].path)
        self._prepared: tuple[str, Ahead] | None = None
        """Path of the shard that will probably be read next, and its first chunks."""

    def check(self) -> None:
        found = self.survey
        if self.count() == 0:
            raise UsageError(f"{self.paths[0]}: the tar shards hold no records")
        # Only if every header was read: a column may be optional.
        members = [member_of(self.derived.get(c, c)) for c in self.columns or ()]
        absent = [name for name in members if name not in ("key", FOLDER, *found.columns)]
        if self.walked and self.strict and absent:
            hint = "; or set label to json.FIELD, folder or a column" * (absent[0] == "label")
            raise UsageError(
                f"{self.folder}: columns: no record has {absent[0]!r}; they have:"
                f" {', '.join(found.columns)}{hint}"
            )
        left = sorted({*found.columns} - {*members}) if self.columns is not None else []
        if self.walked and left:
            self.notes += (f"{self.folder}: members that are not read: {', '.join(left)}",)

    @property
    def walked(self) -> bool:
        """Whether every header is read before training."""
        return not self.far and sum(self.sizes) <= WALK_LIMIT_BYTES

    @cached_property
    def survey(self) -> Survey:
        """Reads the end of each shard and, of local ones, all headers; also sets `rows`."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._tail, self.paths, self.sizes))
            if not self.walked:
                return Survey()
            each = list(pool.map(self._walk, self.paths, self.sizes, self.times))
        self.rows = [survey.rows for survey in each]
        return merged(each)

    def _survey_of(self, column: str) -> Survey:
        """With the values of this column."""
        if column in self.survey.values:
            return self.survey
        labels = repeat(column)
        return merged(map(self._walk, self.paths, self.sizes, self.times, labels))

    def column_types(self) -> dict[str, Any]:
        members = self.survey.columns
        columns = {name: name for name in members} | self.derived
        return {
            name: self._type(column)
            for name, column in columns.items()
            if self.walked and member_of(column) in (FOLDER, *members)
        }

    def _type(self, column: str) -> Any:
        import pyarrow as pa

        suffix = self.survey.columns.get(member_of(column))
        if suffix != JSON:
            text = column == FOLDER or suffix in TEXTS
            return pa.string() if text else pa.int64() if suffix in NUMBERS else pa.binary()
        if column not in (*(self.columns or ()), *self.derived.values()):
            return pa.null()  # unknown
        kinds = {*map(type, self._survey_of(column).values[column])}
        if str in kinds and len(kinds) > 1:
            raise UsageError(f"{self.folder}: {column} holds both text and numbers; write either")
        return pa.string() if str in kinds else pa.float64() if float in kinds else pa.int64()

    def label_values(self, column: str) -> set[Any] | None:
        column = self.derived.get(column, column)
        if not self.walked or member_of(column) not in (FOLDER, *self.survey.columns):
            return None
        found = self._survey_of(column)
        if found.rows and not found.values[column]:
            why = found.wrong.get(column, "no record has one")
            raise UsageError(
                f"{self.folder}: {column} holds no label: {why}; write integers into .cls, or text into .txt"
                " and set params.label_column: text"
            )
        return found.values[column]

    def _walk(self, path: str, size: int, time_ns: int, labels: str = "") -> Survey:
        key = path, size, time_ns, labels
        if (known := _surveys.get(key)) is not None:
            return known
        with self.filesystem.open_input_file(path) as file:
            found = survey_of(file, path, labels)
        if time.time_ns() - time_ns > 10**9:  # a file that changes again at once may keep its time
            _surveys[key] = found
        return found

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
        return None if None in self.rows else sum(rows or 0 for rows in self.rows)

    def fingerprint(self) -> str:
        layout = [path.removeprefix(self.folder) for path in self.paths], self.columns, self.derived
        return fingerprint_of_files(self.filesystem, self.paths, self.sizes, layout)

    def shards(self, records: int, order: np.random.Generator | None) -> list[Shard]:
        shards = [
            Shard(path, rows=rows, home=path, name=path.removeprefix(self.folder))
            for path, rows in zip(self.paths, self.rows, strict=True)
        ]
        return permuted(shards, order)

    def arrangement(self, count: int, order: np.random.Generator | None) -> list[int]:
        return list(shuffled(range(count), order))

    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        return shuffled(self._stream(shard.path), order)

    def for_workers(self) -> WebDatasetSource:
        light = copy.copy(self)
        light.__dict__.pop("survey", None)
        return light

    def prepare(self, shard: Shard) -> None:
        self._drop()
        if self.far:
            self._prepared = (
                shard.path,
                Ahead(self.filesystem.open_input_file(shard.path), CHUNKS_PREPARED),
            )

    def _drop(self) -> None:
        if self._prepared is not None:
            self._prepared[1].close()
            self._prepared = None

    def _open(self, path: str) -> Any:
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
        current: Record = {}
        with streamed(self._open(path)) as stream:
            for member in members(stream, path):
                place = naming.place(member.name)
                if place is None:
                    continue
                stem, column, suffix = place
                key = f"{shard}:{stem}"
                if current and current["key"] != key:
                    yield self._whole(current, shard)
                    current = {}
                current["key"] = key
                if self.columns is None or column in self.members:
                    try:
                        current[column] = parse_member(suffix, member.content)
                    except ValueError as error:
                        current["__bad"] = f".{suffix}: {error}"
        if current:
            yield self._whole(current, shard)

    def _whole(self, record: Record, shard: str) -> Record | BadRecord:
        reason, stem = record.pop("__bad", None), record["key"][len(shard) + 1 :]
        try:
            record |= {name: derive(column, stem, record) for name, column in self.derived.items()}
        except ValueError as error:
            reason = reason or str(error)
        if reason:
            return BadRecord(record["key"], reason)
        if self.columns is None:
            return record
        found = {name: record[name] for name in ("key", *self.columns) if name in record}
        if len(found) == 1 and self.columns and "key" not in self.columns:
            return BadRecord(record["key"], f"has no member for {' or '.join(self.columns)}")
        return found


def shuffled(stream: Iterable[T], order: np.random.Generator | None) -> Iterator[T]:
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


def read_webdataset(
    root: str | os.PathLike[str],
    split: str,
    columns: list[str] | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
    label: str | None = None,
) -> Source | None:
    """Read tar shards under `root/<split>/` or named `root/<split>*.tar`.

    Args:
        root: folder or URI; a single file is the train split.
        split: train or val.
        columns: return these columns only; default: all.
        strict: refuse a column that no record of local shards has.
        ignore: patterns of files that are not read, such as `*.txt`.
        label: what the column `label` holds, unless a member such as `0.cls` does: `json.label` for a field of
            `0.json`, `folder` for the name of the member's folder, or another column.
    """
    root = os.fspath(root)
    if root.startswith("pipe:"):
        raise UsageError(
            f"{root}: pipe: addresses run commands and are refused; use a path or s3://"
        )
    files, notes = split_files(root, split, TAR_SUFFIXES, ignore)
    if not files:
        return None
    return WebDatasetSource(files, filesystem_of(root)[0], columns, strict, label).noting(*notes)
