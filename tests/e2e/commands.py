"""Commands as a user types them."""

from __future__ import annotations

import signal
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


def typed(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """As `submit`, and the terminal is still open."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launcher/submit.py"), *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def shown_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    shown = ""
    for line in process.stdout:
        shown += line
        if text in line:
            break
    return shown
