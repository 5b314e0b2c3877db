"""Train worker (rank 0): writes checkpoints beside the training, one at a time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from stoker.errors import UsageError

WRITE_DEADLINE_S = 900.0
"""How long a write may take before the run fails instead of waiting for ever."""
WORTH_SAYING_S = 0.5
_NICENESS = 10


class Writer:
    """Train worker (rank 0): at most one write is in flight; its failure comes up at the next call."""

    def __init__(self, tell: Callable[[str], Any]) -> None:
        """Args: tell: takes what is worth saying; called from the training thread."""
        self.tell = tell
        self.failure: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.what = ""
        self._told = False

    def submit(self, what: str, write: Callable[[], None]) -> None:
        """Write in the background, after the write before has ended, unless that failed.

        Args:
            what: names the checkpoint in messages.
            write: does it.
        """
        self.what = what
        args = (write, self.thread)
        self.thread = threading.Thread(target=self._run, args=args, name="checkpoint", daemon=True)
        self.thread.start()

    def make_room(self) -> None:
        """Wait until nothing is in flight, and say once that checkpoints come too fast."""
        self.check()
        if self.thread is not None and self.thread.is_alive():
            started = time.monotonic()
            self.wait()
            waited = time.monotonic() - started
            if not self._told and waited > WORTH_SAYING_S:
                self._told = True
                self.tell(
                    f"the checkpoint before was still being written; training waited {waited:.1f} s (a"
                    " larger checkpoint.every_steps avoids it; this is said once)"
                )

    def check(self) -> None:
        """Raise what the last write raised."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def wait(self, deadline_s: float = WRITE_DEADLINE_S) -> None:
        """Until nothing is in flight.

        Raises:
            OSError: the write failed, or took longer than the deadline.
        """
        if self.thread is not None:
            self.thread.join(deadline_s)
            if self.thread.is_alive():
                raise OSError(f"{self.what} is not written after {deadline_s:.0f} s: its disk is stuck")
            self.thread = None
        self.check()

    def _run(self, write: Callable[[], None], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
            if self.failure is not None:
                return
        with contextlib.suppress(OSError, AttributeError):
            # On Linux this is the thread's own priority: the training goes first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            write()
        except (OSError, UsageError) as error:
            self.failure = error
        except BaseException as error:
            self.failure = OSError(f"{self.what}: {type(error).__name__}: {error}")
