"""The members of tar shards: record, column and value of each, and where labels are.

The head surveys shards before training; chain workers read by what it found.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.errors import UsageError
from stoker.protocol import Record
from stoker.read.folders import IMAGE_SUFFIXES
from stoker.read.tar import members

NUMBERS = ("cls", "class", "label", "index", "inx", "cls2", "count")
"""Suffixes of numbers, as webdataset decodes them, and `label`; of text if a split has nothing else there."""
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
        self.dotted = ""
        """The first member that names its column."""
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
        self.dotted = self.dotted or (dotted and f"{member}: {dotted}")
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


def parse_member(suffix: str, content: bytes, texts: bool = False) -> Any:
    if suffix in NUMBERS:
        return text_of(content) if texts else number_of(content)
    if suffix == "json":
        return json.loads(content)
    return content.decode("utf-8-sig") if suffix in ("txt", "text", "id") else content


def text_of(content: bytes) -> str:
    text = content.decode().strip()
    if not text.isprintable() or not text:
        raise ValueError(f"invalid literal for a class: {content[:40]!r}")
    try:
        float(text)
    except ValueError:
        return text
    raise ValueError(f"invalid literal for int(): {content[:40]!r}")


def number_of(content: bytes) -> int:
    """A number, or the place of the one in a list such as `[0. 1. 0.]`."""
    if b"_" in content:  # which Python's int skips
        raise ValueError(f"invalid literal for int(): {content[:40]!r}")
    inner = content.strip()
    if inner[:1] != b"[":
        return int(content)
    return place_of_one(
        [float(part) for part in re.split(rb"[\s,]+", inner.strip(b"[], \n\t")) if part]
    )


def place_of_one(values: list[Any]) -> int:
    if len(values) < 2 or sorted(values) != [0] * (len(values) - 1) + [1]:
        raise ValueError(f"the list {values!r:.60} has not exactly one 1 among zeros")
    return values.index(1)


LABEL_KEYS = ("label", "cls", "class", "target")
FOLDER, JSON, TEXT = "folder", "json", "text"


@dataclass
class Values:
    count: int = 0
    words: int = 0
    """Number of texts, with repeats."""
    numbers: set[int] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    lengths: set[int] = field(default_factory=set)
    """Lengths of one-hot lists."""
    odd: str = ""

    def take(self, value: Any) -> None:
        self.count += 1
        if isinstance(value, bytes) and value.strip()[:1] == b"[":
            self.lengths.add(value.count(b",") or len(value.split()))
        elif isinstance(value, list):
            self.lengths.add(len(value))
        number, text = _number(value), _text(value)
        if number is not None:
            self.numbers.add(number)
        elif text is not None:
            self.words += 1
            self.texts.add(text)
        elif value is not None:
            self.odd = self.odd or f"{value!r:.60}"

    def add(self, other: Values) -> None:
        self.count += other.count
        self.words += other.words
        self.numbers |= other.numbers
        self.texts |= other.texts
        self.lengths |= other.lengths
        self.odd = self.odd or other.odd

    @property
    def are_text(self) -> bool:
        return bool(self.texts) and not self.numbers

    @property
    def labels(self) -> set[Any]:
        return self.texts if self.are_text else self.numbers

    @property
    def why_none(self) -> str:
        if len(self.lengths) > 1:
            return "lists of different lengths, which are not one-hot; write one number per record"
        if self.numbers and 2 * self.words >= self.count:
            return f"both text ({min(self.texts)}) and numbers ({min(self.numbers)}); write either"
        if self.odd and not self.labels:
            return f"{self.odd}, neither an integer nor the name of a class"
        return ""


class Rule(NamedTuple):
    place: str = ""
    name: str = ""
    texts: bool = False
    why: str = ""


NO_RULE = Rule()


@dataclass
class Survey:
    rows: int = 0
    columns: dict[str, str] = field(default_factory=dict)
    """Column → the first suffix."""
    values: dict[str, Values] = field(default_factory=lambda: defaultdict(Values))
    """Values of columns with numbers, and of places for labels."""
    folders: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Folder of images → shards that have it."""
    dotted: str = ""

    def add(self, other: Survey) -> None:
        self.rows += other.rows
        self.columns = {**other.columns, **self.columns}
        for name, values in other.values.items():
            self.values[name].add(values)
        for folder, shards in other.folders.items():
            self.folders[folder] |= shards
        self.dotted = self.dotted or other.dotted

    def label(self) -> Rule:
        """Where labels are if no member is one.

        Text counts only if it repeats, for captions do not; folders only if they do not depend on the shard.
        """
        for name in (f"{JSON}.{key}" for key in LABEL_KEYS):
            if (
                name in self.values
                and self.values[name].count == self.rows
                and self.values[name].labels
            ):
                return Rule(JSON, name, self.values[name].are_text)
        text = self.values.get(TEXT, Values())
        if (
            self.rows
            and text.count == self.rows
            and 2 * len(text.numbers | text.texts) <= self.rows
        ):
            return Rule(TEXT, TEXT, text.are_text)
        if "" in self.folders or not self.folders:
            return NO_RULE
        if len({folder.rpartition("/")[0] for folder in self.folders}) > 1:
            return Rule(why="the folders in the shards have different depths or parents")
        shards = set().union(*self.folders.values())
        if len(shards) > 1 and all(len(where) == 1 for where in self.folders.values()):
            return Rule(why="each folder is in one shard only, so it may number the shards")
        for folder in self.folders:
            self.values[FOLDER].texts.add(folder.rpartition("/")[2])
        return Rule(FOLDER, FOLDER, True)


def survey_of(
    file: Any, path: str, labels: bool, texts: str = "", most: int | None = None
) -> Survey:
    """Read the headers of a shard, and the contents of members with numbers."""
    found, naming = Survey(), Naming(path)
    read = (
        (*NUMBERS, JSON, "txt", TEXT)
        if labels
        else (*NUMBERS, "txt", TEXT, "id")
        if texts
        else NUMBERS
    )

    def wanted(name: str) -> bool:
        return most is not None or name.lower().rpartition(".")[2] in read

    for member in members(file, path, wanted):
        place = naming.place(member.name)
        if place is None:
            continue
        if most is not None and len(naming.stems) > most:
            break
        stem, column, suffix = place
        found.columns.setdefault(column, suffix)
        if suffix in NUMBERS or column == texts:
            found.values[column].take(member.content)
        elif labels and column == TEXT:
            found.values[TEXT].take(member.content)
        elif labels and suffix == JSON and column != JSON:
            found.values[column].take(_parsed(member.content))
        elif labels and column == JSON:
            for name, value in _fields(member.content):
                found.values[f"{JSON}.{name}"].take(value)
        elif labels and column == "image":
            found.folders[member_folder(stem)].add(path)
    found.rows = len(naming.stems) if most is None else min(len(naming.stems), most)
    found.dotted = naming.dotted
    return found


def merged(surveys: Iterable[Survey]) -> Survey:
    whole = Survey()
    for survey in surveys:
        whole.add(survey)
    return whole


def label_of(record: Record, rule: Rule, stem: str) -> Any:
    """The label of a record of this name in its shard; None if it has none where the rule says."""
    if rule.place == FOLDER:
        return member_folder(stem).rpartition("/")[2] or None
    value = record.get(rule.place)
    if rule.place == JSON:
        value = value.get(rule.name.partition(".")[2]) if isinstance(value, dict) else None
    if value is None:
        return None
    label = _text(value) if rule.texts else _number(value)
    if label is None and not isinstance(value, float):  # which CheckLabel judges
        raise ValueError(f"{value!r:.60} in its {rule.place} is no label")
    return value if label is None else label


def member_folder(stem: str) -> str:
    """The folder of a record's members, without a leading dot."""
    return stem.rpartition("/")[0].removeprefix(".").strip("/")


def _fields(content: bytes) -> list[tuple[str, Any]]:
    whole = _parsed(content)
    return (
        [(name, whole[name]) for name in LABEL_KEYS if name in whole]
        if isinstance(whole, dict)
        else []
    )


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content


def _number(value: Any) -> int | None:
    with contextlib.suppress(ValueError, TypeError):
        if isinstance(value, bytes | str):
            return number_of(value if isinstance(value, bytes) else value.encode())
        if isinstance(value, list):
            return place_of_one(value)
        if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
            return int(value)
    return None


def _text(value: Any) -> str | None:
    try:
        return text_of(value if isinstance(value, bytes) else value.encode())
    except (ValueError, AttributeError):
        return None
