"""Begins the process from which Ray's workers on this host are forked.

Imports the standard library only, so that the launcher of a local run can begin it before all else: PyTorch
is imported while the launcher and the job import their own libraries and check the job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SERVER = Path(__file__).with_name("forks") / "fork_server.py"
POSSIBLE = sys.platform == "linux" and os.environ.get("STOKER_FORK_WORKERS") != "0"
"""Other systems' libraries are not fork-safe; set the variable to 0 if one of yours is not on Linux."""
VARIABLE = "STOKER_EARLY_FORKS"
"""For a local job: the process that its launcher has begun."""
LOCAL = ("numpy", "pandas", "pyarrow.parquet", "PIL.Image", "torch")
"""What a machine that also trains needs and is no part of Ray, which reads its token when it is imported."""
NOT_A_RUN = {"--on", "--dry-run", "--show-config", "--request", "--help", "-h"}


class Begun(NamedTuple):
    pid: int
    instructions: int
    """The writing end of its pipe. If all copies are closed, it ends."""

    def variables(self) -> dict[str, str]:
        return {VARIABLE: f"{self.pid} {self.instructions}"}


_begun: list[Begun] = []


def begin(modules: Sequence[str] = ()) -> Begun:
    """Begin it, with imports that need no instructions; it ends with the calling thread."""
    reading, writing = os.pipe()
    # In a session of its own from its first line on: a terminal's Ctrl-C is not for it.
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, str(SERVER), str(os.getpid()), *modules],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)],
        setsid=True,
    )
    os.close(reading)
    return Begun(pid, writing)


def begin_for(words: list[str]) -> None:
    """Launcher: begin it if this command line is probably a local run."""
    words = words[1:] if words[:1] == ["run"] else words
    job = Path(words[0]) if words else Path()
    options = {word.split("=")[0] for word in words[: words.index("--") if "--" in words else None]}
    is_job = job.suffix in (".yaml", ".yml", ".py") and job.is_file()
    if POSSIBLE and is_job and not options & NOT_A_RUN and not _begun:
        _begun.append(begin(LOCAL))


def begun() -> Begun | None:
    """Launcher: the process that has begun, for the first job that asks; job: that of its launcher."""
    if _begun:
        return _begun.pop()
    pid, _, instructions = os.environ.pop(VARIABLE, "").partition(" ")
    return Begun(int(pid), int(instructions)) if instructions else None
