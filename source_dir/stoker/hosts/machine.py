"""Every host: the CPUs and the memory that this process may use: affinity, cgroup limits, allotment.

Whatever is sized asks here, because the machine may be shared.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
NO_DEVICE = ("-1", "NoDevFiles")
"""In CUDA_VISIBLE_DEVICES: neither this nor what follows is used."""
HOST_CPUS_VARIABLE, HOST_GPUS_VARIABLE = "STOKER_HOST_CPUS", "STOKER_HOST_GPUS"
"""CPUs of this host that the job may use, from whoever starts it."""


@dataclass(frozen=True, order=True)
class Quota:
    cpus: float
    folder: Path
    usage: Path

    def used_s(self) -> float:
        text = self.usage.read_text()
        return int(text.split()[1]) / 1e6 if self.usage.name == "cpu.stat" else int(text) / 1e9


def cores() -> int:
    declared = os.environ.get(HOST_CPUS_VARIABLE)
    return max(1, int(declared) if declared else int(cpus()))


def cpus(top: Path = CGROUPS) -> float:
    limit = quota(top)
    return min(float(len(os.sched_getaffinity(0))), limit.cpus if limit else float("inf"))


def quota(top: Path = CGROUPS) -> Quota | None:
    """The smallest one that holds for this process."""
    found = []
    for folder in _cgroups("cpu", top):
        with contextlib.suppress(OSError, ValueError):
            if (folder / "cpu.max").is_file():
                most, period = (folder / "cpu.max").read_text().split()
                usage = folder / "cpu.stat"
            else:
                most, period = (
                    (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
                )
                usage = top / "cpuacct" / folder.relative_to(top / "cpu") / "cpuacct.usage"
            if int(most) > 0:  # otherwise "max" or -1
                found.append(Quota(int(most) / int(period), folder, usage))
    return min(found, default=None)


def gpu_use() -> list[float]:
    """Utilization in percent of each NVIDIA GPU that this process may use; [] if that is not measured."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", *NO_DEVICE):
        return []
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    command += [f"--id={visible}"] if visible else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return [float(line) for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def cpu_times(top: Path = CGROUPS) -> tuple[float, float]:
    """(busy, total) seconds so far of the CPUs that this process may use."""
    if limit := quota(top):
        with contextlib.suppress(OSError, ValueError):
            return limit.used_s(), min(limit.cpus, len(os.sched_getaffinity(0))) * time.monotonic()
    import psutil

    each, allowed = psutil.cpu_times(percpu=True), os.sched_getaffinity(0)
    busy = total = 0.0
    for times in [times for number, times in enumerate(each) if number in allowed] or each:
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        total += whole
        busy += whole - times.idle - getattr(times, "iowait", 0.0)
    return busy, total


def memory(top: Path = CGROUPS) -> tuple[int, int]:
    """Total and available memory in bytes that this process may use."""
    import psutil

    whole = psutil.virtual_memory()
    total, available = int(whole.total), int(whole.available)
    for folder in _cgroups("memory", top):
        for limit_file, used_file, idle in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError, KeyError):
                limit = int((folder / limit_file).read_text())
                stat = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
                # The page cache of files read once counts as used, but is reclaimed under memory pressure.
                used = int((folder / used_file).read_text()) - int(stat[idle])
                total, available = min(total, limit), min(available, max(limit - used, 0))
    return total, available


def _cgroups(controller: str, top: Path) -> Iterator[Path]:
    """The folders of this process's cgroups that may limit it: its own ones, and those around them."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    found: dict[Path, None] = {}
    # A container may see its own group as the root.
    for line in [*lines, "0::/", f"0:{controller}:/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = top / controller if controllers else top
            own = root / path.lstrip("/")
            found |= dict.fromkeys(
                each for each in (own, *own.parents) if each.is_relative_to(root)
            )
    yield from found


def runs(process: int) -> bool:
    """Whether it has not ended; orphans stay zombies until somebody reaps them."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    return False
