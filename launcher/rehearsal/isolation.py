"""Laptop: find out how this machine can create namespaces, and set the CPU quotas of hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from launcher.rehearsal.world import NAMESPACES
from stoker.errors import UsageError

TOOLS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
}
PERIOD_US = 100_000
REMOVAL_S = 5.0


def unshare_command() -> list[str]:
    """The command prefix that runs a program in private namespaces."""
    instead = "; `--on local` runs the same job without emulated hosts"
    if not sys.platform.startswith("linux"):
        raise UsageError(f"--on rehearsal needs Linux namespaces, but this is {sys.platform}{instead}")
    absent = [f"{tool} (package {package})" for tool, package in TOOLS.items() if not shutil.which(tool)]
    if absent:
        raise UsageError(f"--on rehearsal needs {', '.join(absent)}{instead}")
    reason = ""
    as_user = ["unshare", "--user", "--map-root-user", *NAMESPACES]
    as_root = ["unshare", *NAMESPACES]
    for command in [as_root, as_user] if os.geteuid() == 0 else [as_user]:
        test = "ip link add v0 type veth peer name v1 && mount -t tmpfs none /mnt"
        done = subprocess.run(
            [*command, "sh", "-c", test], capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode == 0:
            return command
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise UsageError(f"--on rehearsal: cannot create namespaces on this machine ({reason}){instead}")


def make_cgroups(name: str, quota: float | None) -> list[str]:
    """Create a CPU cgroup limited to `quota` cores; returns the files for joining it."""
    if quota is None:
        return []
    try:
        v1 = Path("/sys/fs/cgroup/cpu")
        if (v1 / "cpu.cfs_quota_us").is_file() or (v1 / "tasks").is_file():
            folder = v1 / name
            folder.mkdir()
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(int(quota * PERIOD_US)))
        else:
            root = Path("/sys/fs/cgroup")
            with contextlib.suppress(OSError):
                (root / "cgroup.subtree_control").write_text("+cpu")
            folder = root / name
            folder.mkdir()
            (folder / "cpu.max").write_text(f"{int(quota * PERIOD_US)} {PERIOD_US}")
    except OSError as error:
        raise UsageError(
            f"rehearsal.cpu_quota: cannot create a CPU cgroup ({error}); run as root or unset it"
        ) from None
    return [str(folder / "cgroup.procs")]


def remove_cgroups(files: list[str]) -> None:
    """Remove cgroups, retrying until the kernel has removed the last process."""
    deadline = time.monotonic() + REMOVAL_S
    for file in files:
        folder = Path(file).parent
        while folder.exists():
            try:
                folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
