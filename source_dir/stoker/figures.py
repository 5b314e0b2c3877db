"""Anywhere: human-readable counts, sizes and times."""

from __future__ import annotations


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
    """4321 → 1 h 12 min."""
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
