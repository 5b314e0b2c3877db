"""Programs of other projects as people run them: with one line changed, the same losses, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained import trains_alike


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["map", "stream"])
def test_hugging_face_trainer(tmp_path: Path, mode: str, ranks: int) -> None:
    trains_alike(tmp_path, "trainer", mode, ranks=ranks, steps=12)


@pytest.mark.parametrize("mode", ["map", "shard"])
def test_accelerate_on_two_ranks(tmp_path: Path, mode: str) -> None:
    trains_alike(tmp_path, "accelerated", mode, ranks=2, steps=12)


@pytest.mark.parametrize("mode", ["padded", "packed"])
def test_trl_sft(tmp_path: Path, mode: str) -> None:
    trains_alike(tmp_path, "sft", mode, steps=12)


def test_lhotse_dynamic_buckets(tmp_path: Path) -> None:
    trains_alike(tmp_path, "speech", steps=16)


def test_ultralytics_yolo(tmp_path: Path) -> None:
    trains_alike(tmp_path, "yolo", steps=18, YOLO_CONFIG_DIR=str(tmp_path))
