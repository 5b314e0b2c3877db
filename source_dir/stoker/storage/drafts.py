"""Train worker: temporary folders for checkpoints under construction, safe with several writers.

Two runs may share a folder, and the writer of a hung attempt may still be active when the next attempt
starts. Each writer therefore locks its drafts, and only unlocked ones are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

PREFIX = ".draft-"
UNLOCKED_S = 60.0
"""A draft still unlocked after this time was left by a killed process."""
UNKNOWN_S = 3600.0
"""The same if the file system has no locks; a write takes 900 s at most."""
_held: dict[Path, int] = {}
"""Drafts of this process and the descriptors that lock them."""
_lock = threading.Lock()


def new(folder: Path) -> Path:
    """Train worker: create an empty folder, locked until it is moved away or this process ends."""
    draft = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
    descriptor = os.open(draft, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    with _lock:
        _held[draft] = descriptor
    return draft


def sweep(folder: Path) -> None:
    """Train worker: remove the drafts in `folder` whose writers are gone."""
    with _lock:
        for draft in [path for path in _held if not path.exists()]:
            os.close(_held.pop(draft))
    for draft in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _abandoned(draft):
                shutil.rmtree(draft, ignore_errors=True)


def _abandoned(draft: Path) -> bool:
    age_s = time.time() - max(path.stat().st_mtime for path in (draft, *draft.iterdir()))
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return age_s > UNKNOWN_S
    finally:
        os.close(descriptor)
    return age_s > UNLOCKED_S
