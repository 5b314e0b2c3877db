"""Shared by the tests of whole commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from commands import DIGITS, Demo, submit


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    done = submit(DIGITS, "params.data=.data/digits/webdataset", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return Demo(folder, done.stdout + done.stderr)
