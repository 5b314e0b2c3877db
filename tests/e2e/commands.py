"""Commands as a user types them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "source_dir/configs/digits.yaml")


class Demo(NamedTuple):
    folder: Path
    """Where it was typed; `runs/latest` is below."""
    screen: str


def submit(*arguments: str, cwd: Path, timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launcher/submit.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
