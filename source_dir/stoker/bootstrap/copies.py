"""Head: copies the run's files to where its users find them, for storage that shows a file once it is closed.

Cloud Storage FUSE uploads a file when it is closed, and a run's logs and events stay open until its end: a
host that is taken away would leave none of them.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from stoker.bootstrap.logs import say
from stoker.place import Outcome

COPY_EVERY_S = 30.0
LAST_COPY_S = 600.0
"""Deadline of the copies at the end: a mounted bucket may not answer."""


class Copies:
    """Head: copies of folders that follow their originals.

    Args:
        folders: original → copy. A folder inside of another original is copied by its own entry only.
    """

    def __init__(self, folders: Mapping[Path, Path]) -> None:
        self._folders = folders
        self._copied: dict[Path, tuple[int, int]] = {}
        self._stop = threading.Event()

    def during(self, work: Callable[[], Outcome], every_s: float = COPY_EVERY_S) -> Outcome:
        """Head: do the work and copy every `every_s`; at its end copy all that has changed since.

        Returns:
            The outcome of the work. A success whose files cannot be copied is a failure: they would be lost.
        """
        thread = threading.Thread(target=self._follow, args=(every_s,), name="copies", daemon=True)
        if self._folders:
            thread.start()
        problem = ""
        try:
            outcome = work()
        finally:
            self._stop.set()
            problem = self._finish(thread) if self._folders else ""
            if problem:
                say(f"error: {problem}")
        return Outcome(1, problem) if problem and outcome.code == 0 else outcome

    def _finish(self, following: threading.Thread) -> str:
        """Copy the rest; returns what could not be copied, in one line."""
        found: list[str] = []

        def work() -> None:
            following.join()
            found.append(self.copy())

        last = threading.Thread(target=work, name="last copies", daemon=True)
        last.start()
        last.join(LAST_COPY_S)
        where = ", ".join(str(copy) for copy in self._folders.values())
        return found[0] if found else f"{where}: not copied within {LAST_COPY_S:.0f} s"

    def copy(self) -> str:
        """Head: copy what has changed since the last time; returns what could not be copied, in one line."""
        problem = ""
        for original, copy in self._folders.items():
            for file in sorted(original.rglob("*")):
                if file.name.startswith(".") or self._elsewhere(file, original) or not file.is_file():
                    continue
                try:
                    self._copy_file(file, copy / file.relative_to(original))
                except FileNotFoundError as error:
                    if file.exists():  # else it was replaced by a newer one, which the next round finds
                        problem = problem or f"{copy}: {error.strerror}"
                except OSError as error:
                    problem = problem or f"{copy}: cannot be written: {error.strerror or error}"
        return problem

    def _copy_file(self, file: Path, target: Path) -> None:
        about = file.stat()
        state = about.st_mtime_ns, about.st_size
        if self._copied.get(file) == state:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        self._copied[file] = state

    def _elsewhere(self, file: Path, original: Path) -> bool:
        inner = [folder for folder in self._folders if folder != original and folder.is_relative_to(original)]
        return any(file.is_relative_to(folder) for folder in inner)

    def _follow(self, every_s: float) -> None:
        told = ""
        while not self._stop.wait(every_s):
            problem = ""
            with contextlib.suppress(OSError):
                problem = self.copy()
            if problem and problem != told:
                told = problem
                say(f"warning: {problem}; trying again every {every_s:g} s")
