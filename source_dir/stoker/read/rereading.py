"""Chain worker: retries reads, because mounts and connections fail briefly."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import TypeVar

from stoker.messages import BadRecord

WAITS_S = (0.1, 0.5)
"""Delays before the second and the third try."""

T = TypeVar("T")


def read_again(
    key: str, read: Callable[[], T], rewind: Callable[[], None] | None = None, far: bool = False
) -> T | BadRecord:
    """Chain worker: call `read`; if it raises, retry after a moment.

    An OSError of a file system or connection is tried three times and may then be retried on another host;
    a file that is missing or may not be read once, unless it is far; anything else (a damaged file, an error
    in the user's code) twice.

    Args:
        key: of the record.
        read: reads it.
        rewind: called before a retry, from `generators`: draws must not depend on the number of tries.
        far: whether it reads through a network.
    """
    for number, wait_s in enumerate((*WAITS_S, 0.0), start=1):
        try:
            return read()
        except Exception as error:
            passing = may_pass(error)
            most = len(WAITS_S) + 1 if passing else 1 if isinstance(error, PERMANENT) and not far else 2
            if number == most:
                text = " ".join(str(error).split())[:300]
                tries = f", {number} tries" if number > 1 else ""
                return BadRecord(key, f"cannot be read{tries}: {type(error).__name__}: {text}", passing)
            if isinstance(error, OSError):
                time.sleep(wait_s)
            if rewind:
                rewind()
    raise AssertionError("the last try returns")


def generators() -> Callable[[], None]:
    """Chain worker: a function that resets the global random generators to their current state."""
    import numpy as np

    python, numpy, torch = random.getstate(), np.random.get_state(), sys.modules.get("torch")
    of_torch = torch.get_rng_state() if torch else None

    def rewind() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch:
            torch.set_rng_state(of_torch)

    return rewind


def may_pass(error: BaseException) -> bool:
    """Chain worker: whether an error concerns access to the data rather than the data."""
    if not isinstance(error, OSError) or isinstance(error, PERMANENT):
        return False
    # Pillow reports a damaged image as an OSError.
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return error.errno is not None or not (frames and "PIL" in Path(frames[-1]).parts)


REREAD_WAITS_S = (1.0, 4.0, 16.0)
"""Delays before retrying a shard that could not be read, on another host if possible."""


PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors of a shard worth one retry (the file system may still be mounting), but not more."""


def reread_wait_s(error: BaseException, tries: int) -> float | None:
    """Head: how long to wait before retrying failed work; None: it has failed for good.

    Args:
        error: the cause.
        tries: number of retries so far.
    """
    most = 1 if isinstance(error, PERMANENT) else len(REREAD_WAITS_S)
    return REREAD_WAITS_S[tries] if tries < most else None
