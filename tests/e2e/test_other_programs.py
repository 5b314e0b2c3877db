"""Programs of other projects whose packages are there anyway; the others: tests/programs."""

from __future__ import annotations

from pathlib import Path

from trained import trains_alike


def test_timm_train_with_a_loader_for_all_epochs(tmp_path: Path) -> None:
    """Two processes that import timm, and a cluster: under 30 s on two free cores, as the others here."""
    trains_alike(tmp_path, "timm_train", steps=30)


def test_torchvision_detection_reference(tmp_path: Path) -> None:
    """Two trainings of a Faster R-CNN."""
    trains_alike(tmp_path, "detection", steps=20)


def test_accelerate_dispatches_from_one_of_two_ranks(tmp_path: Path) -> None:
    """Four processes that import Accelerate, and a cluster."""
    trains_alike(tmp_path, "accelerated", "dispatch", ranks=2, steps=12)


def test_trainers_of_lightning_and_hugging_face(tmp_path: Path) -> None:
    """They rebuild loaders, or make their own: two processes that import both, and a cluster."""
    trains_alike(tmp_path, "frameworks", steps=40)
