"""Every host: removes temporary folders of a process, however the process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path

OWNER = "owner"
"""A file in the folder that its cleaner keeps locked."""
LEFT_AFTER_S = 600.0
"""A folder of this age that was never locked is left over, too."""
# When a worker ends, Ray kills its children but not their children. Processes that are ending may still write
# while the folder is removed.
_SCRIPT = """
exec 3<&0 </dev/null
{ cat <&3 >/dev/null; for i in 1 2 3; do rm -rf -- "$1"; sleep 1; done; } &
"""


class Cleaner:
    """Every host: removes a folder when this process has ended.

    A shell waits for this process to end, which it sees as a closed pipe, so the folder is removed even after
    a SIGKILL. What that shell could not remove, the cleaner of the next folder with this prefix does.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        sweep(folder.parent, prefix, folder)
        draft = folder / f"{OWNER}.new"
        self._lock = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks, on which nothing is swept
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        draft.rename(folder / OWNER)  # locked from its first moment
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "stoker-cleaner", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        shell.wait(30)
        self._pipe = shell.stdin


def sweep(parent: Path, prefix: str, own: Path | None = None) -> None:
    """Every host: remove folders that ended processes have left behind, but for `own`."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            ours = about.st_uid == os.getuid() and folder != own
            if ours and _left_behind(folder, time.time() - about.st_mtime):
                shutil.rmtree(folder, ignore_errors=True)


def _left_behind(folder: Path, age_s: float) -> bool:
    try:
        file = os.open(folder / OWNER, os.O_RDWR)
    except FileNotFoundError:
        return age_s > LEFT_AFTER_S
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True
