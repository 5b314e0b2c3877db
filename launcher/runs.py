"""Laptop: run directories, and following the logs of remote runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from launcher.places import RemoteRun, Run
from stoker.errors import UsageError

if TYPE_CHECKING:
    from launcher.job import Job

Answer = TypeVar("Answer")
UNREACHABLE_S = 600.0
LEAST_FREE_BYTES = 20 * 2**20
"""Less does not even fit a run's logs."""


def new_run_dir(job: Job) -> Path:
    """Laptop: the path of a new run directory below `output_dir`; does not create it.

    Raises:
        UsageError: it cannot be created there.
    """
    root = Path(job.resolved.config.output_dir).resolve()
    refuse_unwritable(root)
    return named(job, root)


def named(job: Job, root: Path) -> Path:
    """Laptop: the path of a new run directory in a folder; does not create it."""
    name = f"{job.name}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while (run_dir := root / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return run_dir


def refuse_unwritable(folder: Path) -> None:
    """Laptop: refuse a folder that cannot hold a run.

    Raises:
        UsageError: the folder is not writable, or its disk is full.
    """
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        raise UsageError(f"output_dir: {folder} cannot be written: {there}: {error.strerror}") from None
    if free < LEAST_FREE_BYTES:
        raise UsageError(f"output_dir: the disk of {there} is full ({free >> 20} MB free)")


def point_latest(run_dir: Path) -> str | None:
    """Laptop: point `latest` atomically at a run directory; returns the previous target."""
    latest, draft = run_dir.parent / "latest", run_dir.parent / f".latest-{os.getpid()}"
    before = str(latest.readlink()) if latest.is_symlink() else None
    draft.symlink_to(run_dir.name)
    draft.replace(latest)
    return before


def forget(run_dir: Path, latest: str | None) -> None:
    """Laptop: remove the directory of a refused run.

    Args:
        run_dir: the run directory.
        latest: the previous target of the link `latest`.
    """
    link = run_dir.parent / "latest"
    if link.is_symlink() and str(link.readlink()) == run_dir.name:
        link.unlink()
        if latest and (run_dir.parent / latest).is_dir():
            link.symlink_to(latest)
    shutil.rmtree(run_dir, ignore_errors=True)
    with contextlib.suppress(OSError):
        run_dir.parent.rmdir()  # only if empty


def last_lines(run: Run, word: str, timeout_s: float, most: int = 1) -> tuple[list[str], bool]:
    """Laptop: the last lines of a run's log that contain a word, and whether all of it was read.

    Raises:
        UsageError: the log is unavailable.
    """
    found: deque[str] = deque(maxlen=most)
    failed: list[BaseException] = []

    def read() -> None:
        try:
            found.extend(line for line in run.logs(False) if word in line)
        except BaseException as error:
            failed.append(error)

    # The services' timeouts apply per response, and a log has any number of responses.
    reader = threading.Thread(target=read, name="log", daemon=True)
    reader.start()
    reader.join(timeout_s)
    if failed:
        raise failed[0]
    return list(found), not reader.is_alive()


class LostError(UsageError):
    """Laptop: a service that had answered no longer does; the run may go on."""


@dataclass
class Patience:
    """Laptop: asks a service about a run. Once it has answered, failures get `UNREACHABLE_S` to pass."""

    poll_s: float
    passing: type[UsageError] = UsageError
    """Errors that may pass by themselves."""
    answered: bool = False

    def __call__(self, ask: Callable[[], Answer]) -> Answer:
        """The answer.

        Raises:
            UsageError: the service has never answered, and does not now.
            LostError: it no longer does.
        """
        since = None
        while True:
            try:
                found = ask()
            except UsageError as error:
                if not self.answered:
                    raise
                if not isinstance(error, self.passing):
                    raise LostError(*error.problems) from None
                if since is None:
                    since = time.monotonic()
                    print(
                        f"{error}; asking again for up to {UNREACHABLE_S:.0f} s", file=sys.stderr, flush=True
                    )
                elif time.monotonic() - since > UNREACHABLE_S:
                    raise LostError(f"{error}, for {UNREACHABLE_S:.0f} s now") from None
                time.sleep(self.poll_s)
            else:
                self.answered = True
                return found


def show(line: str) -> None:
    """Laptop: print and flush, so that pipes get the line immediately."""
    print(line, flush=True)


def follow(run: RemoteRun, tell: Callable[[str], None] = show) -> int:
    """Laptop: show the logs until the job ends, then the outcome; Ctrl-C leaves the job running.

    Returns:
        The job's exit code; 130 after Ctrl-C; 1 if its outcome remains unknown.
    """
    tell(f"{run.id}: Ctrl-C stops watching, not the job")
    try:
        for line in run.logs(follow=True):
            tell(line)
        code = run.wait()
        tell(run.closing())
    except KeyboardInterrupt:
        tell(run.detached())
        return 130
    except LostError as error:
        again = shlex.join(["stoker", "logs", "-f", run.id])
        tell(f"{error}; the job may still be running, or have ended. Watch it again: {again}")
        return 1
    return code
