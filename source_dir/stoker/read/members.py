"""The members of tar shards: which record and column each belongs to, and its value."""

from __future__ import annotations

import json
import re
from typing import Any

from stoker.errors import UsageError
from stoker.read.files import IMAGE_SUFFIXES

NUMBERS = ("cls", "class", "label", "index", "inx", "cls2", "count")
"""Suffixes of numbers, as webdataset decodes them, and `label`; of text if a split has nothing else there."""
_COLUMNS = {
    **dict.fromkeys((suffix[1:] for suffix in IMAGE_SUFFIXES), "image"),
    **dict.fromkeys(NUMBERS[:5], "label"),
    **dict.fromkeys(("txt", "text"), "text"),
}
"""Columns whose name differs from the suffix."""
_COLUMN = re.compile(r"[\w-]+(\.[\w-]+)*")


class Naming:
    """Head and chain worker: maps the members of one shard to record and column.

    `<stem>.<suffix>` names a column by its suffix: an image suffix → `image`, `cls`, `class`, `label`,
    `index` and `inx` → `label`, `txt` and `text` → `text`, any other → a column of its name.
    `<stem>.<column>.<suffix>` names the column explicitly. Only the suffix decides how the content is read.
    Hidden files are ignored.

    Args:
        path: of the shard, for errors.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.stems: set[str] = set()
        self.dotted = ""
        """The first member that names its column."""
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
        dotted = f"the dot in {name}.{column} ends the name of record {name}" if column else ""
        if dotted and not _COLUMN.fullmatch(column):
            raise UsageError(f"{self.path}: {member}: {dotted}; rename it without dots before the suffix")
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


def value_of(suffix: str, content: bytes, texts: bool = False) -> Any:
    """Chain worker: the content of a member.

    Args:
        suffix: decides how it is read.
        content: of the member.
        texts: numbers of this column are text.

    Raises:
        ValueError: it is not what the suffix says.
    """
    if suffix in NUMBERS:
        return text_of(content) if texts else number_of(content)
    if suffix == "json":
        return json.loads(content)
    return content.decode() if suffix in ("txt", "text", "id") else content


def text_of(content: bytes) -> str:
    """Chain worker and head: the name of a class.

    Raises:
        ValueError: it is empty, a number, or no text.
    """
    text = content.decode().strip()
    if not text.isprintable() or not text:
        raise ValueError(f"invalid literal for a class: {content[:40]!r}")
    try:
        float(text)
    except ValueError:
        return text
    raise ValueError(f"invalid literal for int(): {content[:40]!r}")


def number_of(content: bytes) -> int:
    """Chain worker and head: a number, or the place of the one in a list such as `[0. 1. 0.]`.

    Raises:
        ValueError: it is neither.
    """
    if b"_" in content:  # which Python's int skips
        raise ValueError(f"invalid literal for int(): {content[:40]!r}")
    inner = content.strip()
    if inner[:1] != b"[":
        return int(content)
    return place_of_one([float(part) for part in re.split(rb"[\s,]+", inner.strip(b"[], \n\t")) if part])


def place_of_one(values: list[Any]) -> int:
    """Chain worker and head: the class of a one-hot list.

    Raises:
        ValueError: the list is not one-hot.
    """
    if len(values) < 2 or sorted(values) != [0] * (len(values) - 1) + [1]:
        raise ValueError(f"the list {values!r:.60} has not exactly one 1 among zeros")
    return values.index(1)
