"""Laptop: the real sagemaker-training toolkit, in a cache folder of its own, fetched on demand.

Its dependencies clash with a training environment's now and then, so it is not installed there. On
a host, the project's interpreter runs it with the cache at the end of its path: the toolkit starts
user code with its own interpreter, and that must be the one that has Ray and torch.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from stoker.errors import UsageError

VERSION = "5.1.4"
INSTALL_TIMEOUT_S = 600


def cache_folder() -> Path:
    """Laptop: where this toolkit version for this Python lies, or will lie."""
    root = os.environ.get("STOKER_CACHE") or os.environ.get("XDG_CACHE_HOME")
    base = Path(root).expanduser() if root else Path.home() / ".cache"
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return base / "stoker" / f"sagemaker-training-{VERSION}-{python}"


def ensure() -> Path:
    """Laptop: the folder to append to `sys.path`; installs the toolkit where it is absent.

    Raises:
        UsageError: it cannot be installed.
    """
    folder = cache_folder()
    if (folder / "complete").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two rehearsals may start at once
        if (folder / "complete").is_file():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        print(f"installing sagemaker-training {VERSION} into {folder} (once)", flush=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input"]
        command += ["--target", str(folder), f"sagemaker-training=={VERSION}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
            )
            reason = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except subprocess.TimeoutExpired:
            reason = [f"pip took more than {INSTALL_TIMEOUT_S} s"]
        if reason:
            raise UsageError(
                f"rehearsal.entry: cannot install sagemaker-training {VERSION}: {reason[0]}; "
                "rehearsal.entry=container needs no toolkit"
            )
        (folder / "complete").touch()
    return folder


def command(folder: Path) -> list[str]:
    """Laptop: the toolkit's `train` as a host runs it."""
    script = (
        f"import sys; sys.path.append({str(folder)!r}); from sagemaker_training.cli.train import main; main()"
    )
    return [sys.executable, "-c", script]
