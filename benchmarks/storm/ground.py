"""Laptop: the ground of a storm: namespaces of its own, a small disk, and what may not be left at the end.

The storm is process 1 of its namespaces, so nothing of it outlives it, and whatever else is there at the end
has been left behind by the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.jobs import ROOT

INSIDE = "STOKER_STORM_INSIDE"
SPACES = ("--mount", "--pid", "--ipc", "--net", "--fork", "--kill-child", "--mount-proc")
DISK_MB = 48
PRIVATE = ("/tmp", "/dev/shm")  # noqa: S108
SETTLE_S = 15.0
BLKIO = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")


def enter(arguments: list[str]) -> Path:
    """Laptop: run this program again as process 1 of its own namespaces; returns only inside them.

    Returns:
        The folder of the storm, which is removed when the namespaces have ended.
    """
    if folder := os.environ.get(INSIDE):
        run("ip", "link", "set", "lo", "up")
        return Path(folder)
    if os.geteuid() != 0:
        sys.exit("the storm mounts a disk and limits memory: run it as root")
    for path in PRIVATE:
        if inside := [str(used) for used in (ROOT, sys.prefix) if Path(used).is_relative_to(path)]:
            # Files of other programs there would look as if the job had left them behind.
            sys.exit(
                f"the storm replaces {path} by an empty folder, but {inside[0]} is in it: move it elsewhere"
            )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Hosts have their own /tmp and do not see the source.
    with tempfile.TemporaryDirectory(prefix="stoker-storm-", dir="/var/tmp") as made:
        command = [
            "unshare",
            *SPACES,
            "--propagation",
            "private",
            sys.executable,
            "-m",
            "benchmarks.storm",
        ]
        inside = subprocess.Popen(
            [*command, *arguments], env={**os.environ, INSIDE: made, "RAY_worker_niceness": "0"}
        )
        try:
            code = inside.wait()
        finally:
            inside.kill()  # and with it all that is in the namespaces
            inside.wait()
            _remove_cgroups(mark_of(Path(made)))
    sys.exit(code)


def _remove_cgroups(mark: str) -> None:
    """Remove them as soon as the kernel has ended the processes in them."""
    deadline = time.monotonic() + SETTLE_S
    while left := list(Path("/sys/fs/cgroup/memory").glob(f"{mark}*")):
        for group in left:
            with contextlib.suppress(OSError):
                group.rmdir()
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)


def mark_of(folder: Path) -> str:
    """Laptop: how the names of a storm's cgroups begin."""
    return f"storm-{folder.name[-8:]}"


@dataclass
class Ground:
    """Laptop: the folders of a storm."""

    folder: Path

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    @property
    def device(self) -> str:
        """Major and minor number of the disk's loop device."""
        number = self.disk.stat().st_dev
        return f"{os.major(number)}:{os.minor(number)}"


def prepare(folder: Path) -> Ground:
    """Laptop: mount a small disk, a folder for traces, and private `/tmp` and `/dev/shm`."""
    ground = Ground(folder)
    for name in ("disk", "trace", "reference"):
        (folder / name).mkdir()
    for path in PRIVATE:
        run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", path)
    image = folder / "disk.img"
    with image.open("wb") as file:
        file.truncate(DISK_MB * 2**20)
    run("mkfs.ext4", "-q", "-m", "0", str(image))
    run("mount", "-o", "loop", str(image), str(ground.disk))
    # The root of a host is read-only; mounts below it are not.
    run("mount", "-t", "tmpfs", "tmpfs", str(folder / "trace"))
    run("mount", "-t", "tmpfs", "tmpfs", str(folder / "reference"))
    return ground


@dataclass(frozen=True)
class Findings:
    """Laptop: everything of these namespaces that could be left behind."""

    processes: frozenset[str]
    mounts: frozenset[str]
    links: frozenset[str]
    files: frozenset[str]
    shared: frozenset[str]
    cgroups: frozenset[str]

    def beyond(self, earlier: Findings) -> list[str]:
        """One line per thing that was not there earlier."""
        return [
            f"{kind}: {name}"
            for kind, names in vars(self).items()
            for name in sorted(names - getattr(earlier, kind))
        ]


def look(marks: tuple[str, ...]) -> Findings:
    """Laptop: look around.

    Args:
        marks: beginnings of the names of this storm's cgroups.
    """
    reap()
    shared = {
        f"{kind}: {line}"
        for kind in ("shm", "sem", "msg")
        for line in Path("/proc/sysvipc", kind).read_text().splitlines()[1:]
    }
    return Findings(
        processes=frozenset(filter(None, map(describe, processes() - {os.getpid()}))),
        mounts=frozenset(
            line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ),
        links=frozenset(Path("/proc/self/net/dev").read_text().split("\n", 2)[2].split()[0::17]),
        files=frozenset(str(path) for folder in PRIVATE for path in Path(folder).iterdir()),
        shared=frozenset(shared),
        cgroups=frozenset(
            str(path)
            for path in Path("/sys/fs/cgroup").glob("*/*")
            if path.is_dir() and path.name.startswith(marks)
        ),
    )


def left(before: Findings, marks: tuple[str, ...]) -> list[str]:
    """Laptop: what is left behind, after some seconds for the kernel to take namespaces apart."""
    deadline = time.monotonic() + SETTLE_S
    while found := look(marks).beyond(before):
        if time.monotonic() > deadline:
            return found
        time.sleep(0.5)
    return []


def processes() -> set[int]:
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}


def describe(process: int) -> str:
    with contextlib.suppress(OSError):
        command = (
            Path(f"/proc/{process}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
        )
        return f"{process} {command[:150]}".strip()
    return ""


def reap() -> None:
    """Process 1 inherits orphans; unless it waits for them, they stay as zombies."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run(*command: str, check: bool = True) -> str:
    """Laptop: run a system program; returns what it wrote.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
