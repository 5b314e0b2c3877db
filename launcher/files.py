"""Laptop: walk files and format tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

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
