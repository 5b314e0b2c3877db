"""Script's process: available CPUs and their utilisation, within a container's quota."""

from __future__ import annotations

import os
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def cpus(groups: Path = CGROUPS) -> float:
    """Script's process: number of CPUs that it may use."""
    allowed = float(len(os.sched_getaffinity(0)))
    return min(allowed, quota(groups) or allowed)


def cpu_times(groups: Path = CGROUPS) -> tuple[float, float]:
    """Script's process: (busy, total) CPU seconds so far, of its container if that has a quota."""
    limit, used = quota(groups), usage_s(groups)
    if limit is not None and used is not None:
        return used, limit * time.monotonic()
    import psutil

    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return whole - idle, whole


def quota(groups: Path = CGROUPS) -> float | None:
    """Script's process: CPU quota of its container; None without a limit."""
    try:
        if (groups / "cpu.max").is_file():
            most, period = (groups / "cpu.max").read_text().split()
        else:
            most, period = ((groups / f"cpu/cpu.cfs_{n}_us").read_text() for n in ("quota", "period"))
        return int(most) / int(period) if int(most) > 0 else None
    except (OSError, ValueError):
        return None


def usage_s(groups: Path) -> float | None:
    """Script's process: CPU seconds used by its container; None if unknown."""
    try:
        if (groups / "cpu.stat").is_file() and (groups / "cpu.max").is_file():
            lines = dict(line.split() for line in (groups / "cpu.stat").read_text().splitlines())
            return int(lines["usage_usec"]) / 1e6
        return int((groups / "cpuacct/cpuacct.usage").read_text()) / 1e9
    except (OSError, ValueError, KeyError):
        return None
