"""Chain worker: a record is read again before it counts as bad, for mounts hiccup and connections break."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import TypeVar

from stoker.data.messages import BadRecord

WAITS_S = (0.1, 0.5)
"""Before the second and the third try."""

T = TypeVar("T")


def read_again(key: str, read: Callable[[], T], rewind: Callable[[], None] | None = None) -> T | BadRecord:
    """Chain worker: what `read` gives; where it raises, it is called again, after a moment.

    An OSError of a file system or connection is tried three times and may be worth another host; whatever
    else is raised (a damaged file, a file that is not there, a mistake in the user's code) twice.

    Args:
        key: of the record.
        read: reads it.
        rewind: called before it is read again, as `generators` gives it: what it draws shall not depend on
            how often it was tried.
    """
    for number, wait_s in enumerate((*WAITS_S, 0.0), start=1):
        try:
            return read()
        except Exception as error:
            passing = may_pass(error)
            if number == (len(WAITS_S) + 1 if passing else 2):
                text = " ".join(str(error).split())[:300]
                reason = f"cannot be read, {number} tries: {type(error).__name__}: {text}"
                return BadRecord(key, reason, passing)
            if isinstance(error, OSError):
                time.sleep(wait_s)
            if rewind:
                rewind()
    raise AssertionError("the last try returns")


def generators() -> Callable[[], None]:
    """Chain worker: what puts the global random generators back to where they stand now."""
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
    """Chain worker: whether an error says something about the way to the data rather than about the data."""
    if not isinstance(error, OSError) or isinstance(error, PERMANENT):
        return False
    # Pillow says with an OSError that an image is damaged.
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return error.errno is not None or not (frames and "PIL" in Path(frames[-1]).parts)


REREAD_WAITS_S = (1.0, 4.0, 16.0)
"""Before a shard that could not be read is tried again, elsewhere where that is possible."""


PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""What a second look may still find, as with a file system that is just being mounted, but a third not."""


def reread_wait_s(error: BaseException, tries: int) -> float | None:
    """Head: how long to wait before work that failed is tried again; None: it has failed for good.

    Args:
        error: why.
        tries: how often it has been tried again already.
    """
    most = 1 if isinstance(error, PERMANENT) else len(REREAD_WAITS_S)
    return REREAD_WAITS_S[tries] if tries < most else None
