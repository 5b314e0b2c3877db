"""Anywhere: the lock that a run holds on a file of its run directory, and what others see by it.

The lock ends with the process, however that ends; NFS and Lustre pass it on to other machines.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO, Literal, NamedTuple

from stoker.errors import UsageError

PROCESS_FILE = "process.id"
"""In a run directory: process id, the file's own inode and machine of the process that holds its lock."""
_BOOT, _PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
MACHINE = ""
if _BOOT.exists():
    MACHINE = f"{socket.gethostname()} {_BOOT.read_text().strip()} {_PROCESSES.readlink()}"
"""Containers of one host may have its name, and boot with it, but count processes of their own."""
WAIT_S = 5.0
"""How long to try for the lock: whoever looks at it holds it for a moment."""
_held: dict[Path, IO[str]] = {}


class Holder(NamedTuple):
    state: Literal["running", "ended", "copied", "unlocked", "absent"]
    """copied: the folder is a copy of a run's. unlocked: its disk has no locks. absent: nobody has held one."""
    process: int | None = None
    """Its id, if it is a process of this machine."""
    host: str = ""
    """Where it runs, if not here."""


def hold(run_dir: Path) -> None:
    """Hold the lock until this process ends; a UsageError if another process does."""
    if run_dir in _held:
        return
    file = (run_dir / PROCESS_FILE).open("a+")
    deadline = time.monotonic() + WAIT_S
    with contextlib.suppress(OSError):  # a disk without locks, which readers find out, too
        while not _locked(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise UsageError(f"{run_dir}: another process runs this job; stop it first")
            time.sleep(0.05)
    file.truncate(0)
    file.write(f"{os.getpid()} {os.fstat(file.fileno()).st_ino} {MACHINE}")
    file.flush()
    _held[run_dir] = file


def holder_of(run_dir: Path) -> Holder:
    try:
        with (run_dir / PROCESS_FILE).open() as file:
            number, inode, *machine = [*file.read().split(), "", ""]
            here = " ".join(filter(None, machine)) == MACHINE
            if inode not in ("", str(os.fstat(file.fileno()).st_ino)):
                return Holder("copied")
            if _locked(file, fcntl.LOCK_SH):
                return Holder("ended")
            return Holder("running", int(number) if here else None, "" if here else machine[0])
    except FileNotFoundError:
        return Holder("absent")
    except OSError:
        return Holder("unlocked")


def _locked(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
