"""WebDataset tar shards: files with the same stem form one record."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from stoker.errors import UsageError
from stoker.protocol import BadRecord, Record, Shard
from stoker.read.folders import TAR_SUFFIXES, split_files
from stoker.read.identity import fingerprint_of_files
from stoker.read.members import (
    JSON,
    LABEL_KEYS,
    NO_RULE,
    NUMBERS,
    Naming,
    Survey,
    label_of,
    merged,
    parse_member,
    survey_of,
)
from stoker.read.sources import Source, StreamedSource, permuted
from stoker.read.tar import CHUNKS_PREPARED, Ahead, members, streamed
from stoker.storage.filesystems import common_folder, filesystem_of_files, is_local

if TYPE_CHECKING:
    import numpy as np

WALK_LIMIT_BYTES = 4 * 2**30
"""Local shards up to this total size are walked header by header before training."""

GLANCED = 32
"""Records of the first shard that are read before training where shards are not walked."""

SHUFFLE_WINDOW = 1024

_END = b"\0" * 1024
_surveys: dict[tuple[str, int, int, bool, str], Survey] = {}
"""(path, size, modification time, how) of shards that this process has walked: a run opens its data twice."""

T = TypeVar("T")


class WebDatasetSource(StreamedSource):
    """`0001.jpg`, `0001.cls` → `image` (bytes), `label`; see `Naming`."""

    random = False

    def __init__(
        self, files: list[Any], columns: list[str] | None = None, strict: bool = False
    ) -> None:
        self.columns, self.strict = columns, strict
        self.texts: frozenset[str] = frozenset()
        """Columns with text where others have numbers."""
        self.rule = NO_RULE
        self.paths = [f.path for f in files]
        self.folder = common_folder(files)
        self.sizes = [f.size for f in files]
        self.times = [f.mtime_ns for f in files]
        self.filesystem = filesystem_of_files(files)
        self.rows: list[int | None] = [None for _ in files]
        self.far = not is_local(files[0].path)
        self._prepared: tuple[str, Ahead] | None = None
        """Path of the shard that will probably be read next, and its first chunks."""

    def check(self) -> None:
        found = self.survey
        if self.count() == 0:
            raise UsageError(f"{self.paths[0]}: the tar shards hold no records")
        # Only if every header was read: a column may be optional.
        derived = ("key", "label") if self.rule.place else ("key",)
        absent = [c for c in self.columns or () if c not in (*derived, *found.columns)]
        if self.walked and absent and (self.strict or (absent[0] == "image" and found.dotted)):
            dotted = f" ({self._dotted()})" if absent[0] == "image" and found.dotted else ""
            known = ", ".join(found.columns)
            raise UsageError(
                f"{self.folder}: columns: no record has {absent[0]!r}; they have: {known}{dotted}"
            )
        read = found.columns if self.columns is None else (*self.columns, self.rule.place)
        if self.walked and (left := [c for c in found.columns if c not in read]):
            self.notes += (f"{self.folder}: members that are not read: {', '.join(sorted(left))}",)

    def _dotted(self) -> str:
        return f"{self.survey.dotted}: rename it without dots if that is not meant"

    @property
    def walked(self) -> bool:
        """Whether every header is read before training."""
        return not self.far and sum(self.sizes) <= WALK_LIMIT_BYTES

    @cached_property
    def survey(self) -> Survey:
        """Reads the shards; also sets `rows`, `texts` and `rule`."""
        labels = "label" in (self.columns or ())
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._tail, self.paths, self.sizes))
            if self.walked:
                each = list(pool.map(lambda at: self._walk(at, labels), range(len(self.paths))))
        if self.walked:
            self.rows = [survey.rows for survey in each]
            found = merged(each)
        elif labels:
            path = self.paths[0]
            with streamed(self.filesystem.open_input_file(path)) as stream:
                found = survey_of(stream, path, labels, most=GLANCED)
            found.folders.clear()
        else:
            found = Survey()
        self.texts = frozenset(name for name, values in found.values.items() if values.are_text)
        if labels and found.columns and "label" not in found.columns:
            self.rule = found.label()
        return found

    def column_types(self) -> dict[str, Any]:
        import pyarrow as pa

        found = self.survey
        label = {"label": "txt" if self.rule.texts else "cls"} if self.rule.place else {}
        kinds = dict.fromkeys(NUMBERS, pa.int64()) | dict.fromkeys(
            ("txt", "text", "id"), pa.string()
        )
        types = {}
        for name, suffix in (found.columns | label).items():
            types[name] = pa.string() if name in self.texts else kinds.get(suffix, pa.binary())
            if suffix == "json" and name not in self.texts:
                types[name] = pa.int64() if name in found.values else pa.null()
        return types

    def hints(self) -> dict[str, str]:
        found = self.survey
        far = "" if self.walked else "class folders are read in local shards of up to 4 GB only"
        keys = f"no field of {', '.join(LABEL_KEYS)} is a label in every .json"
        why = self.rule.why or (keys if JSON in found.columns else far)
        why = f" ({why})" if why else ""
        return {
            "image_column": found.dotted and f"; {self._dotted()}",
            "label_column": f"; or add it as 0.cls beside 0.jpg{why}",
        }

    def label_values(self, column: str) -> set[Any] | None:
        found, name = (
            self.survey,
            self.rule.name if column == "label" and self.rule.place else column,
        )
        if not self.walked or not (self.rule.place or column in found.columns):
            return None
        if name not in found.values:
            found = merged(self._walk(at, False, column) for at in range(len(self.paths)))
        if why := found.values[name].why_none:
            raise UsageError(f"{self.folder}: column {column} holds {why}")
        return found.values[name].labels

    def _walk(self, at: int, labels: bool, texts: str = "") -> Survey:
        path = self.paths[at]
        key = (path, self.sizes[at], self.times[at], labels, texts)
        if (known := _surveys.get(key)) is not None:
            return known
        with self.filesystem.open_input_file(path) as file:
            found = survey_of(file, path, labels, texts)
        if (
            time.time_ns() - self.times[at] > 10**9
        ):  # a file that changes again at once may keep its time
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
        layout = [path.removeprefix(self.folder) for path in self.paths], self.columns
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
                if self.columns is None or column in (*self.columns, self.rule.place):
                    try:
                        current[column] = parse_member(suffix, member.content, column in self.texts)
                    except ValueError as error:
                        current["__bad"] = f".{suffix}: {error}"
        if current:
            yield self._whole(current, shard)

    def _whole(self, record: Record, shard: str) -> Record | BadRecord:
        reason = record.pop("__bad", None)
        if self.rule.place and not reason:
            try:
                label = label_of(record, self.rule, record["key"][len(shard) + 1 :])
                record |= {} if label is None else {"label": label}
            except ValueError as error:
                reason = str(error)
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
) -> Source | None:
    """Read tar shards under `root/<split>/` or named `root/<split>*.tar`.

    Args:
        root: folder or URI; a single file is the train split.
        split: train or val.
        columns: return these columns only; default: all.
        strict: refuse a column that no record of local shards has.
        ignore: patterns of files that are not read, such as `*.txt`.
    """
    root = os.fspath(root)
    if root.startswith("pipe:"):
        raise UsageError(
            f"{root}: pipe: addresses run commands and are refused; use a path or s3://"
        )
    files, notes = split_files(root, split, TAR_SUFFIXES, ignore)
    if not files:
        return None
    return WebDatasetSource(files, columns, strict).noting(*notes)
