"""Laptop: the real sagemaker-training toolkit, fetched on demand into a separate cache folder.

Its dependencies can conflict with those of a training environment, so it is not installed there. On a
host, the project's interpreter runs it with the cache at the end of `sys.path`: the toolkit starts user
code with its own interpreter, which must be the one with Ray and torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from stoker.errors import UsageError

VERSION = "5.1.4"
INSTALL_TIMEOUT_S = 600


def cache_folder() -> Path:
    """Laptop: the cache folder for this toolkit version and this Python version."""
    root = os.environ.get("STOKER_CACHE") or os.environ.get("XDG_CACHE_HOME")
    base = Path(root).expanduser() if root else Path.home() / ".cache"
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return base / "stoker" / f"sagemaker-training-{VERSION}-{python}"


def ensure() -> Path:
    """Laptop: install the toolkit if it is missing; returns the folder to append to `sys.path`.

    Raises:
        UsageError: the toolkit cannot be installed.
    """
    with contextlib.suppress(metadata.PackageNotFoundError):
        if metadata.version("sagemaker-training") == VERSION:  # the extra `rehearsal`
            return Path(str(metadata.distribution("sagemaker-training").locate_file("")))
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
                "rehearsal.entry=container works without it"
            )
        (folder / "complete").touch()
    return folder


def command(folder: Path) -> list[str]:
    """Laptop: the command that runs the toolkit's `train` on a host."""
    script = (
        f"import sys; sys.path.append({str(folder)!r}); from sagemaker_training.cli.train import main; main()"
    )
    return [sys.executable, "-c", script]
