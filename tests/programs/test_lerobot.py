"""lerobot-train as people run it, with one line changed."""

from __future__ import annotations

from pathlib import Path

from trained import trains_alike


def test_act(tmp_path: Path) -> None:
    trains_alike(tmp_path, "act", steps=14)
