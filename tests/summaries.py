"""What every run directory has, wherever its job ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.events.summary import Summary


def fields(summary: dict[str, Any]) -> set[str]:
    """The names of a summary's fields, and as `part.name` those of its parts that always have the same."""
    parts = [
        name for name, value in Summary().model_dump().items() if isinstance(value, dict) and value
    ]
    return set(summary) | {f"{part}.{name}" for part in parts for name in summary[part]}


def trained(run_dir: Path, epoch: int) -> int:
    """How many records an epoch trained, each of them once."""
    ids = (run_dir / f"records/train-epoch-{epoch:03d}-rank-0.txt").read_text().split()
    assert len(ids) == len(set(ids))
    return len(ids)


EVERYWHERE = fields(Summary().model_dump(by_alias=True))
