"""Slurm's commands on a login node: programs in PATH that print what those of Slurm 22.05 printed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def commands_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a folder with the commands into PATH. No test submits unless it replaces `sbatch`."""
    folder.mkdir()
    fake(folder, "sbatch", "echo 'sbatch: error: not in this test' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def fake(folder: Path, name: str, lines: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{lines}\n")
    program.chmod(0o755)
