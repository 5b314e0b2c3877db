"""Train worker (rank 0): writes checkpoints in the background, one at a time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from stoker.errors import UsageError

WRITE_DEADLINE_S = 900.0
"""How long a write may take before the run fails."""
WORTH_SAYING_S = 0.5
_NICENESS = 10


class Writer:
    """Train worker (rank 0): at most one write in flight; its error is raised by the next call."""

    def __init__(self, tell: Callable[[str], Any]) -> None:
        """Args: tell: receives remarks for the user; called from the training thread."""
        self.tell = tell
        self.failure: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.what = ""
        self._told = False

    def submit(self, what: str, write: Callable[[], None]) -> None:
        """Write in the background, after the previous write, unless that one failed.

        Args:
            what: name of the checkpoint in messages.
            write: does the work.
        """
        self.what = what
        args = (write, self.thread)
        self.thread = threading.Thread(target=self._run, args=args, name="checkpoint", daemon=True)
        self.thread.start()

    def make_room(self) -> None:
        """Wait until no write is in flight; warn once if checkpoints come too fast."""
        self.check()
        if self.thread is not None and self.thread.is_alive():
            started = time.monotonic()
            self.wait()
            waited = time.monotonic() - started
            if not self._told and waited > WORTH_SAYING_S:
                self._told = True
                self.tell(
                    f"training waited {waited:.1f} s for the previous checkpoint to be written; raise"
                    " checkpoint.every_steps to avoid this (logged once)"
                )

    def check(self) -> None:
        """Raise the error of the last write."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def wait(self, deadline_s: float = WRITE_DEADLINE_S) -> None:
        """Wait until no write is in flight.

        Raises:
            OSError: the write failed, or took longer than the deadline.
        """
        if self.thread is not None:
            self.thread.join(deadline_s)
            if self.thread.is_alive():
                raise OSError(f"{self.what}: not written after {deadline_s:.0f} s: the disk is stuck")
            self.thread = None
        self.check()

    def _run(self, write: Callable[[], None], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
            if self.failure is not None:
                return
        with contextlib.suppress(OSError, AttributeError):
            # On Linux this sets the priority of this thread alone: training comes first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            write()
        except (OSError, UsageError) as error:
            self.failure = error
        except BaseException as error:
            self.failure = OSError(f"{self.what}: {type(error).__name__}: {error}")
