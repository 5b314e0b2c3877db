"""Every host: what it tells its users: output lines with group, host and role, and the cause of a failure."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

FAILURE_CHARACTERS = 1024
FAILURE_S = 10.0


def prefix_output(group: str, host: str, role: str) -> None:
    """Every host: from now on, prefix every line that this process prints with its origin."""
    prefix = f"[{group} {host} {role}] "
    if isinstance(sys.stdout, PrefixedStream) and isinstance(sys.stderr, PrefixedStream):
        sys.stdout.prefix = sys.stderr.prefix = prefix
        return
    lock = threading.Lock()
    sys.stdout = PrefixedStream(sys.stdout, prefix, lock)
    sys.stderr = PrefixedStream(sys.stderr, prefix, lock)


def say(text: str) -> None:
    """Every host: print one line of progress and flush it."""
    print(text, flush=True)


def say_at_once(text: str) -> None:
    """Every host, in a signal handler: write one line, bypassing buffers and locks that may be held."""
    stream = sys.stderr
    prefix = stream.prefix if isinstance(stream, PrefixedStream) else ""
    with contextlib.suppress(OSError, ValueError):
        os.write(stream.fileno(), f"{prefix}{text}\n".encode())


def write_failure(file: Path, cause: str) -> None:
    """Every host: write the reason that the console shows; an earlier cause is not overwritten."""
    from stoker.config.redaction import scrub

    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8", errors="replace") as output:
            output.write(scrub(cause)[:FAILURE_CHARACTERS])


def write_failure_soon(file: Callable[[], Path], cause: str) -> None:
    """Head: the same, without waiting for storage that does not answer."""
    writing = threading.Thread(target=lambda: write_failure(file(), cause), name="failure", daemon=True)
    writing.start()
    writing.join(FAILURE_S)


class PrefixedStream(io.TextIOBase):
    """Every host: a text stream that forwards whole lines, each with a prefix."""

    def __init__(self, target: TextIO, prefix: str, lock: threading.Lock | None = None) -> None:
        self._target = target
        self.prefix = prefix
        self._lock = lock or threading.Lock()
        self._rest = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._target.encoding

    @property
    def buffer(self) -> BinaryIO:
        return self._target.buffer

    def write(self, text: str) -> int:
        with self._lock:
            # A progress bar that rewrites its line would otherwise become one endless line.
            *lines, self._rest = (self._rest + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
            for line in lines:
                if line.strip():
                    self._target.write(f"{self.prefix}{line}\n")
            self._target.flush()
        return len(text)

    def flush(self) -> None:
        """Flush the target; partial lines stay buffered, so that two processes never share a line."""
        self._target.flush()

    def finish(self) -> None:
        """Print the last line if it has no newline."""
        if self._rest:
            self.write("\n")

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._target.fileno()
