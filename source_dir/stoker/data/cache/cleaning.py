"""Every host: removes the files of a run, however the run ends."""

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
"""A file in the run's folder that its cleaner keeps locked during the run."""
LEFT_AFTER_S = 600.0
"""An unlocked folder of this age is left over from an earlier run."""
# When a worker ends, Ray kills its children but not their children. Tasks that are ending may still write
# while the folder is removed.
_SCRIPT = """
exec 3<&0 </dev/null
{ cat <&3 >/dev/null; for i in 1 2 3; do rm -rf -- "$1"; sleep 1; done; } &
"""


class Cleaner:
    """Every host: one per run, in a process that lives as long as the run.

    A shell waits for this process to end, which it sees as a closed pipe, so the folder is removed even after
    a SIGKILL. What that shell could not remove, the next run's cleaner does.

    Raises:
        CacheError: the folder cannot be created.
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
    """Every host: remove folders that ended runs have left behind."""
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
