"""Laptop: the emulated hosts of a storm, their processes, and the memory of each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

MEMORY = Path("/sys/fs/cgroup/memory")
CONFIG = "opt/ml/input/config/resourceconfig.json"


@dataclass
class Host:
    """Laptop: a live emulated host."""

    name: str
    init: int
    """Its process 1, in this process's PID namespace."""
    memory: Path | None = None
    """Its memory cgroup."""

    @property
    def root(self) -> Path:
        """Its file system."""
        return Path(f"/proc/{self.init}/root")

    def processes(self) -> list[int]:
        """All its processes."""
        space = _space(self.init)
        return [process for process in _all() if space and _space(process) == space]

    def find(self, *words: str) -> list[int]:
        """Its processes whose command line has one of the words."""
        return [p for p in self.processes() if any(word in command_of(p) for word in words)]

    def used_mb(self) -> dict[int, float]:
        """Anonymous memory of each of its processes."""
        return {process: mb for process in self.processes() if (mb := anonymous_mb(process))}


@dataclass
class Hosts:
    """Laptop: finds hosts as they come and go, and puts each into a memory cgroup of its own."""

    mark: str
    """Beginning of the names of the cgroups."""
    live: dict[str, Host] = field(default_factory=dict)
    _number: int = 0

    def refresh(self) -> dict[str, Host]:
        """Find the hosts that live now."""
        for name, host in list(self.live.items()):
            if not _space(host.init):
                del self.live[name]
                remove(host.memory)
        known = {host.init for host in self.live.values()}
        for process in _all():
            if process in known or not _is_first(process):
                continue
            with contextlib.suppress(OSError, ValueError):
                name = json.loads((Path(f"/proc/{process}/root") / CONFIG).read_text())[
                    "current_host"
                ]
                self.live[name] = Host(name, process, self._limit(name, process))
        return self.live

    def close(self) -> None:
        """Remove the cgroups of hosts that are gone."""
        self.refresh()

    def _limit(self, name: str, process: int) -> Path | None:
        if not (MEMORY / "memory.limit_in_bytes").is_file():
            return None
        self._number += 1
        folder = MEMORY / f"{self.mark}-{self._number}-{name}"
        folder.mkdir()
        for member in Host(name, process).processes():
            with contextlib.suppress(OSError):
                (folder / "cgroup.procs").write_text(str(member))
        return folder


def remove(folder: Path | None) -> None:
    """Laptop: remove a cgroup if nothing runs in it."""
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.rmdir()


def command_of(process: int) -> str:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{process}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
        )
    return ""


def anonymous_mb(process: int) -> float:
    """Laptop: anonymous memory of a process; pages that a fork shares count in both."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) / 1024
    return 0.0


def kill(process: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _space(process: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{process}/ns/pid")  # noqa: PTH115 - the text, not a path
    return ""


def _is_first(process: int) -> bool:
    """Whether it is process 1 of a host: of a namespace below that of the rehearsal."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        numbers = next(line for line in lines if line.startswith("NSpid:")).split()[1:]
        return len(numbers) >= 3 and numbers[-1] == "1"
    return False
