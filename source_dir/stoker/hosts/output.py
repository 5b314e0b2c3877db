"""Every host: what it leaves: lines with their origin, the cause of a failure, copies of a run's files."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, TextIO

from stoker.place import Outcome

FAILURE_CHARACTERS = 1024
FAILURE_S = 10.0
EVERY_S, PAUSE = 30.0, 50
"""Least time between two copies of a file, and in multiples of what one takes: events grow with the run."""
LAST_COPY_S = 600.0
"""Deadline of the copies at the end: a mounted bucket may not answer."""


def prefix_output(group: str, host: str, role: str) -> None:
    prefix = f"[{group} {host} {role}] "
    if isinstance(sys.stdout, PrefixedStream) and isinstance(sys.stderr, PrefixedStream):
        sys.stdout.prefix = sys.stderr.prefix = prefix
        return
    lock = threading.Lock()
    sys.stdout = PrefixedStream(sys.stdout, prefix, lock)
    sys.stderr = PrefixedStream(sys.stderr, prefix, lock)


def say(text: str) -> None:
    print(text, flush=True)


def say_at_once(text: str) -> None:
    """Every host, in a signal handler: write one line, bypassing buffers and locks that may be held."""
    stream = sys.stderr
    prefix = stream.prefix if isinstance(stream, PrefixedStream) else ""
    with contextlib.suppress(OSError, ValueError):
        os.write(stream.fileno(), f"{prefix}{text}\n".encode())


def write_failure(file: Path, cause: str) -> None:
    """Write the reason that the console shows; an earlier cause is not overwritten."""
    from stoker.config.redaction import scrub

    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8", errors="replace") as output:
            output.write(scrub(cause)[:FAILURE_CHARACTERS])


def write_failure_soon(file: Callable[[], Path], cause: str) -> None:
    """Head: the same, without waiting for storage that does not answer."""
    writing = threading.Thread(
        target=lambda: write_failure(file(), cause), name="failure", daemon=True
    )
    writing.start()
    writing.join(FAILURE_S)


class PrefixedStream(io.TextIOBase):
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
            *lines, self._rest = (
                (self._rest + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
            )
            for line in lines:
                if line.strip():
                    self._target.write(f"{self.prefix}{line}\n")
            self._target.flush()
        return len(text)

    def flush(self) -> None:
        """Flush the target; partial lines stay buffered, so that two processes never share a line."""
        self._target.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._target.fileno()


class Copies:
    """Head or notebook: copies of a run's folders to storage that shows a file once it is closed.

    Cloud Storage FUSE uploads a file when it is closed, and a run's logs and events stay open until its end:
    a host that is taken away would leave none of them. A Unity Catalog volume can neither append to a file
    nor change part of it. A folder inside of another original is copied by its own entry only.
    """

    def __init__(self, folders: Mapping[Path, Path], tell: Callable[[str], None] = say) -> None:
        self._folders, self._tell = folders, tell
        self._copied: dict[Path, tuple[tuple[int, int], float]] = {}
        """The state of a file when it was copied, and when it may be copied again."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="copies", daemon=True)

    def during(self, work: Callable[[], Outcome]) -> Outcome:
        """Head: copy meanwhile and once more at the end.

        A success whose files cannot be copied is a failure: they would be lost.
        """
        if not self._folders:
            return work()
        self.start()
        try:
            outcome = work()
        finally:
            if problem := self.finish():
                say(f"error: {problem}")
        return Outcome(1, problem) if problem and outcome.code == 0 else outcome

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def finish(self) -> str:
        """Copy the rest; returns the first problem, in one line."""
        found: list[str] = []

        def work() -> None:
            self.stop()
            found.append(self.copy())

        last = threading.Thread(target=work, name="last copies", daemon=True)
        last.start()
        last.join(LAST_COPY_S)
        where = ", ".join(str(copy) for copy in self._folders.values())
        return found[0] if found else f"{where}: not copied within {LAST_COPY_S:.0f} s"

    def copy(self) -> str:
        """Copy what has changed since the last call; returns the first problem, after trying all files."""
        problem = ""
        for original, copy in self._folders.items():
            others = [folder for folder in self._folders if original in folder.parents]
            try:
                files = sorted(original.rglob("*"))
            except OSError as error:  # a folder was removed meanwhile
                files = []
                problem = problem or f"{original}: cannot be read: {error.strerror or error}"
            for file in files:
                try:
                    if not any(file.is_relative_to(folder) for folder in others):
                        self._copy_file(file, copy / file.relative_to(original))
                except OSError as error:
                    if isinstance(error, FileNotFoundError) and not file.exists():
                        continue  # renamed meanwhile, or replaced by a newer one, which the next round finds
                    problem = problem or f"{copy}: cannot be written: {error.strerror or error}"
        return problem

    def _copy_file(self, file: Path, target: Path) -> None:
        if file.name.startswith(".") or not file.is_file():
            return
        about = file.stat()
        state = about.st_mtime_ns, about.st_size
        (copied, due), began = self._copied.get(file, (None, 0.0)), time.monotonic()
        if copied == state or (began < due and not self._stop.is_set()):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        self._copied[file] = state, began + PAUSE * (time.monotonic() - began) - EVERY_S

    def _follow(self) -> None:
        told = ""
        while not self._stop.wait(EVERY_S):
            problem = self.copy()
            if problem and problem != told:
                self._tell(f"warning: {problem}; trying again every {EVERY_S:g} s")
            told = problem
