"""Processes that `size` and `check` start to measure with: none outlives the command."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from stoker_launcher.places.local import handled

GRACE_S = 5.0


@contextlib.contextmanager
def measuring(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End the process and all that it started when the block ends; SIGTERM ends the block."""
    try:
        with handled(signal.SIGTERM, lambda *_: sys.exit(143)):
            yield process
    finally:
        with handled(signal.SIGTERM, signal.SIG_IGN):
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    below: set[psutil.Process] = set()
    with contextlib.suppress(psutil.Error):
        below = {*psutil.Process(process.pid).children(recursive=True)}
    if process.poll() is None:
        process.terminate()
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and (process.poll() is None or psutil.wait_procs(below, 0)[1]):
        below |= {child for one in below for child in _children(one)}
        time.sleep(0.1)
    for one in below:
        with contextlib.suppress(psutil.Error):
            one.kill()
    process.kill()
    process.wait()


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []
