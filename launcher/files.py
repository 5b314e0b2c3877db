"""Laptop: walk files, expand the paths that somebody typed, and format tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from stoker.config.values import expanded
from stoker.errors import UsageError
from stoker.storage.filesystems import Entry, walk


def files_below(source: Path) -> list[tuple[str, Path, Entry]]:
    """Laptop: (name relative to `source`, path, size and time) of a file, or of every file in a folder.

    Raises:
        UsageError: a folder cannot be listed, or a link leads nowhere or to a folder above it.
    """
    if source.is_file():
        about = source.stat()
        return [
            (source.name, source, Entry(str(source), source.name, True, about.st_size, about.st_mtime_ns))
        ]
    below = [entry for entry in walk(str(source), hidden=True) if entry.is_file]
    return sorted((Path(e.path).relative_to(source).as_posix(), Path(e.path), e) for e in below)


def expanded_words(words: list[str]) -> list[str]:
    """Laptop: expand `~` and `$VARIABLES` in paths that the shell left alone, as in `--source-dir=~/x`.

    Raises:
        UsageError: a path that cannot be expanded.
    """
    end = words.index("--") if "--" in words else len(words)
    found = []
    for word in words[:end]:
        option, path = re.fullmatch(r"(--[\w-]+=)?(.*)", word, re.DOTALL).groups("")  # type: ignore[union-attr]
        try:
            found.append(option + expanded(path) if path[:1] in ("~", "$") else word)
        except ValueError as error:
            raise UsageError(f"{word}: {error}") from None
    return [*found, *words[end:]]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Laptop: format aligned columns, with numbers right-aligned."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def cell(text: str, width: int) -> str:
        return text.rjust(width) if text[:1].isdigit() else text.ljust(width)

    return "\n".join(
        "  ".join(cell(text, width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
