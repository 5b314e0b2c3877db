"""Anywhere: human-readable counts, sizes, times, amounts and tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def count_of(number: int, noun: str) -> str:
    """1 host, 2 hosts."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(count: float) -> str:
    """1536 → 1.5 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """0.12 → 120 ms, 2.5 → 2.5 s, 4321 → 1 h 12 min."""
    minutes = round(seconds / 60)
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.{int(seconds < 10)}f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def dollars(amount: float | None, digits: int = 2) -> str:
    return "?" if amount is None else f"{amount:,.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()) -> str:
    """Aligned columns; numbers to the right, except in columns `left`."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def cell(name: str, text: str, width: int) -> str:
        return text.rjust(width) if text[:1].isdigit() and name not in left else text.ljust(width)

    return "\n".join("  ".join(map(cell, head, line, widths)).rstrip() for line in lines)
