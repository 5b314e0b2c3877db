"""ms-swift as people run it, with one line changed; its loader is a subclass of torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained import trains_alike


@pytest.mark.parametrize("mode", ["map", "stream"])
def test_sft(tmp_path: Path, mode: str) -> None:
    trains_alike(tmp_path, "swift_sft", mode, steps=12)
