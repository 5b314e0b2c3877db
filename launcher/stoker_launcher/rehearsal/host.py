"""Emulated host, as process 1 of its namespaces: set up the container, then execute its program.

Standard library only. The world starts it as `python -m stoker_launcher.rehearsal.host READY_FD`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LINK_TIMEOUT_S = 30.0
SPEC_VARIABLE = "STOKER_EMULATED_HOST"


def main() -> None:
    spec: dict[str, Any] = json.loads(os.environ.pop(SPEC_VARIABLE))
    ready = int(sys.argv[1])
    socket.sethostname(spec["name"])
    os.write(ready, b".")
    os.close(ready)
    _connect(spec)
    _mount(spec)
    os.chdir(spec["folder_in_host"])
    os.execve(spec["command"][0], spec["command"], spec["environment"])  # noqa: S606 - the plan's own command


def _connect(spec: dict[str, Any]) -> None:
    deadline = time.monotonic() + LINK_TIMEOUT_S
    while spec["link"] not in [name for _, name in socket.if_nameindex()]:
        if time.monotonic() > deadline:
            sys.exit(f"{spec['name']}: no network link after {LINK_TIMEOUT_S:.0f} s")
        time.sleep(0.01)
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "set", spec["link"], "name", "eth0")
    _run("ip", "address", "add", f"{spec['address']}/16", "dev", "eth0")
    _run("ip", "link", "set", "eth0", "up")
    if spec["rate"]:
        _run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *spec["rate"])


def _mount(spec: dict[str, Any]) -> None:
    folder = Path(spec["folder"])
    source, at = Path(spec["mount"]["source"]), Path(spec["mount"]["target"])
    for channel in spec["channels"]:
        _bind(
            Path(channel["source"]),
            source / Path(channel["target"]).relative_to(at),
            read_only=True,
        )
    read_only = _mount_service(folder, source, at)
    _run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    shm = f"size={spec['shm_mb']}m,mode=1777"
    _run("mount", "-t", "tmpfs", "-o", shm, "tmpfs", "/dev/shm")  # noqa: S108 - in a mount namespace of its own
    (folder / "tmp").mkdir(exist_ok=True)
    # The host's private /tmp would hide Python environments below /tmp.
    for path in sorted(set(spec["kept"])):
        if path.startswith("/tmp/") and Path(path).is_dir():  # noqa: S108 - in a mount namespace of its own
            target = folder / path.removeprefix("/")
            if not target.exists():  # else it is inside one that is already mounted
                _bind(Path(path), target, read_only=True)
    _run("mount", "--rbind", str(folder / "tmp"), "/tmp")  # noqa: S108 - in a mount namespace of its own
    # Hide the source tree: a job that depends on it instead of the upload would fail on SageMaker.
    for path in spec["masked"]:
        if Path(path).is_dir():
            _run("mount", "-t", "tmpfs", "-o", "ro,size=4k", "tmpfs", path)
    # Files written outside the job's folders would be lost on SageMaker and left behind on this
    # machine, so mount the rest read-only.
    for path in read_only:
        with contextlib.suppress(
            subprocess.CalledProcessError
        ):  # user namespaces may not have permission
            _run("mount", "-o", "remount,bind,ro", path)


def _mount_service(folder: Path, source: Path, at: Path) -> list[str]:
    """Mount the service's folder; if the machine has none, over a copy of its parent made of bind mounts."""
    copied = ["/"]
    if not at.is_dir() and at.parent == Path("/"):
        copied = _change_root(at.name)
    if at.is_dir():
        _bind(source, at)
        return copied
    for entry in at.parent.iterdir():
        _bind(entry, folder / "opt" / entry.name)
    _bind(source, folder / "opt" / at.name)
    _bind(folder / "opt", at.parent)
    return copied


def _bind(source: Path, target: Path, read_only: bool = False) -> None:
    """Show a file or folder at a place that is made for it; read-only, without what is mounted below it."""
    (target if source.is_dir() else target.parent).mkdir(parents=True, exist_ok=True)
    if not source.is_dir():
        target.touch()
    _run("mount", "--bind" if read_only else "--rbind", str(source), str(target))
    if read_only:
        _run("mount", "-o", "remount,bind,ro", str(target))


def _change_root(name: str) -> list[str]:
    """Change to a copy of the root made of bind mounts, with one more folder; returns what it mounted."""
    root = Path("/mnt")
    _run("mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", str(root))
    (root / name).mkdir()
    copied = ["/"]
    for entry in Path("/").iterdir():
        copy = root / entry.name
        if entry.is_symlink():
            copy.symlink_to(entry.readlink())
        elif entry == root:
            copy.mkdir()
        else:
            _bind(entry, copy)
            if entry.name not in ("dev", "proc", "sys", "tmp"):
                copied.append(str(entry))
    os.chroot(root)
    os.chdir("/")
    return copied


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(command)}: {error.stderr.strip()}", flush=True)
        raise


if __name__ == "__main__":
    main()
