"""Every host: removes what a run keeps on it, however the run ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path

from stoker.data.cache.store import PREFIX, open_root

OWNER = "owner"
"""A file in a run's folder that its cleaner holds locked while the run goes on."""
LEFT_AFTER_S = 600.0
"""A folder that nobody has locked by then was left behind."""
# Ray kills the children of a worker that ends, but not a child's child. Tasks that are about to end may
# still write while the folder is removed.
_SCRIPT = """
exec 3<&0 </dev/null
{ cat <&3 >/dev/null; for i in 1 2 3; do rm -rf -- "$1"; sleep 1; done; } &
"""


class Cleaner:
    """Every host: one per run, in a process that lives as long as the run does.

    A shell waits for the end of this process, which the kernel tells it by closing a pipe, so the folder is
    removed after a SIGKILL, too. What even that shell could not remove, the next run's cleaner does.

    Raises:
        CacheError: the folder cannot be made.
    """

    def __init__(self, root: Path) -> None:
        sweep(root.parent)
        open_root(root)
        self._lock = os.open(root / OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "stoker-cache", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        shell.wait(30)
        self._pipe = shell.stdin


def sweep(parent: Path) -> None:
    """Every host: remove the folders of runs that have ended without doing so."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            about = folder.stat()
            fresh = time.time() - about.st_mtime < LEFT_AFTER_S
            if about.st_uid == os.getuid() and not fresh and not _locked(folder / OWNER):
                shutil.rmtree(folder, ignore_errors=True)


def _locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
