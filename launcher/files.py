"""Laptop: walk files and format tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


def files_below(source: Path) -> Iterator[tuple[str, Path, os.stat_result]]:
    """Laptop: yield (name relative to `source`, path, stat) for a file or every file in a folder."""
    if source.is_file():
        yield source.name, source, source.stat()
        return
    for folder, subfolders, names in os.walk(source):
        subfolders.sort()
        for name in sorted(names):
            path = Path(folder) / name
            if path.is_file():  # not a broken link, a socket or a pipe
                yield path.relative_to(source).as_posix(), path, path.stat()


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
