"""Head or notebook: copies a run's files to storage that shows a file once it is closed.

Cloud Storage FUSE uploads a file when it is closed, and a run's logs and events stay open until its end: a
host that is taken away would leave none of them. A Unity Catalog volume can neither append to a file nor
change part of it.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from stoker.hosts.output import say
from stoker.place import Outcome

EVERY_S = 30.0
LAST_COPY_S = 600.0
"""Deadline of the copies at the end: a mounted bucket may not answer."""


class Copies:
    """Head or notebook: copies of folders that follow their originals.

    Args:
        folders: original → copy. A folder inside of another original is copied by its own entry only.
        tell: receives a line when files cannot be copied for now.
    """

    def __init__(self, folders: Mapping[Path, Path], tell: Callable[[str], None] = say) -> None:
        self._folders, self._tell = folders, tell
        self._copied: dict[Path, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="copies", daemon=True)

    def during(self, work: Callable[[], Outcome]) -> Outcome:
        """Head: copy while the work is being done, and once more at its end.

        Returns:
            The outcome of the work. A success whose files cannot be copied is a failure: they would be lost.
        """
        if not self._folders:
            return work()
        self.start()
        try:
            outcome = work()
        finally:
            problem = self.finish()
            if problem:
                say(f"error: {problem}")
        return Outcome(1, problem) if problem and outcome.code == 0 else outcome

    def start(self) -> None:
        """Head or notebook: copy what has changed every `EVERY_S`."""
        self._thread.start()

    def stop(self) -> None:
        """Head or notebook: copy nothing more."""
        self._stop.set()
        self._thread.join()

    def finish(self) -> str:
        """Head or notebook: copy the rest; returns what could not be copied, in one line."""
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
        """Head or notebook: copy what has changed since the last call.

        Returns:
            The first problem, in one line; it does not keep the other files from being copied.
        """
        problem = ""
        for original, copy in self._folders.items():
            try:
                files = sorted(original.rglob("*"))
            except OSError as error:  # a folder was removed meanwhile
                files, problem = [], problem or f"{original}: cannot be read: {error.strerror or error}"
            for file in files:
                try:
                    if not self._elsewhere(file, original):
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
        if self._copied.get(file) == state:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        self._copied[file] = state

    def _elsewhere(self, file: Path, original: Path) -> bool:
        inner = [folder for folder in self._folders if folder != original and folder.is_relative_to(original)]
        return any(file.is_relative_to(folder) for folder in inner)

    def _follow(self) -> None:
        told = ""
        while not self._stop.wait(EVERY_S):
            problem = self.copy()
            if problem and problem != told:
                self._tell(f"warning: {problem}; trying again every {EVERY_S:g} s")
            told = problem
