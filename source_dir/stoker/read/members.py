"""The members of tar shards: record, column and value of each, and labels in JSON or folders."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stoker.errors import UsageError
from stoker.protocol import Record
from stoker.read.folders import IMAGE_SUFFIXES
from stoker.read.tar import members

NUMBERS = ("cls", "class", "label", "index", "inx", "cls2", "count")
"""Suffixes of integers, as webdataset decodes them, and `label`."""
TEXTS = ("txt", "text", "id")
JSON, FOLDER = "json", "folder"
FIELD = f"{JSON}."
"""Begins the name of a column that is a field of a record's `.json`."""
_COLUMNS = {
    **dict.fromkeys((suffix[1:] for suffix in IMAGE_SUFFIXES), "image"),
    **dict.fromkeys(NUMBERS[:5], "label"),
    **dict.fromkeys(("txt", "text"), "text"),
}
_COLUMN = re.compile(r"[\w-]+(\.[\w-]+)*")


class Naming:
    """Maps the members of one shard to record and column.

    `<stem>.<suffix>` names a column by its suffix: an image suffix → `image`, `cls`, `class`, `label`,
    `index` and `inx` → `label`, `txt` and `text` → `text`, any other → a column of its name.
    `<stem>.<column>.<suffix>` names the column explicitly. Only the suffix decides how the content is read.
    Hidden files are ignored.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.stems: set[str] = set()
        self._stem: str | None = None
        self._columns: dict[str, str] = {}
        """Column → member, in the current record."""

    def place(self, member: str) -> tuple[str, str, str] | None:
        """Stem, column and suffix of the next member; None for a hidden file."""
        folder, _, base = member.rpartition("/")
        if base.startswith("."):
            return None
        name, _, rest = base.partition(".")
        stem = f"{folder}/{name}" if folder else name
        column, _, suffix = rest.lower().rpartition(".")
        dotted = f"the dot in {name}.{column} ends the name of record {name}" if column else ""
        if dotted and not _COLUMN.fullmatch(column):
            raise UsageError(
                f"{self.path}: {member}: {dotted}; rename it without dots before the suffix"
            )
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
                + (f"; or rename them without dots, because {dotted}" if dotted else "")
            )
        self._columns[column] = member
        return stem, column, suffix


def parse_member(suffix: str, content: bytes) -> Any:
    if suffix in NUMBERS:
        if b"_" in content:  # which Python's int skips
            raise ValueError(f"invalid literal for int(): {content[:40]!r}")
        return int(content)
    if suffix == JSON:
        return json.loads(content)
    return content.decode("utf-8-sig").rstrip("\r\n") if suffix in TEXTS else content


def is_derived(column: str) -> bool:
    """Whether a column is made of another member, or of a record's folder."""
    return column == FOLDER or column.startswith(FIELD)


def member_of(column: str) -> str:
    """The column whose member gives this one."""
    return JSON if column.startswith(FIELD) else column


def derive(column: str, stem: str, record: Record) -> Any:
    """The value of such a column, or of another, in the record of this name."""
    value: Any = folder_of(stem) if column == FOLDER else record.get(member_of(column))
    if column.startswith(FIELD):
        value = value.get(column.removeprefix(FIELD)) if isinstance(value, dict) else None
    if value in (None, ""):
        raise ValueError(f"has no {column}")
    return value


def folder_of(stem: str) -> str:
    return stem.rpartition("/")[0].rpartition("/")[2].removeprefix(".")


@dataclass
class Survey:
    rows: int = 0
    columns: dict[str, str] = field(default_factory=dict)
    """Column → the first suffix."""
    values: dict[str, set[Any]] = field(default_factory=lambda: defaultdict(set))
    """The distinct values of columns of integers, of `folder`, and of one other column."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Column → why its first value that is neither a number nor text is none."""

    def take(self, column: str, value: Any) -> None:
        if isinstance(value, str | int | float):
            self.values[column].add(value)
        else:
            self.wrong.setdefault(column, f"a record has {value!r:.60}")


def survey_of(file: Any, path: str, labels: str = "") -> Survey:
    """Read the headers of a shard, and the contents of members with integers or with these labels."""
    found, naming = Survey(), Naming(path)
    source = member_of(labels)

    def wanted(name: str) -> bool:
        suffix = name.lower().rpartition(".")[2]
        return suffix in NUMBERS or bool(labels and suffix in (JSON, *TEXTS))

    for member in members(file, path, wanted):
        place = naming.place(member.name)
        if place is None:
            continue
        stem, column, suffix = place
        found.columns.setdefault(column, suffix)
        found.values[FOLDER] |= {folder_of(stem)} - {""}
        if suffix not in NUMBERS and column != source:
            continue
        name = labels if column == source else column
        try:
            value = parse_member(suffix, member.content)
            found.take(name, value if name == column else derive(name, stem, {source: value}))
        except ValueError as error:
            found.wrong.setdefault(name, f"{member.name}: {error}")
    found.rows = len(naming.stems)
    return found


def merged(surveys: Iterable[Survey]) -> Survey:
    whole = Survey()
    for survey in surveys:
        whole.rows += survey.rows
        whole.columns = {**survey.columns, **whole.columns}
        for name, values in survey.values.items():
            whole.values[name] |= values
        whole.wrong = {**survey.wrong, **whole.wrong}
    return whole
