"""Laptop: what two runs that share their blocks (`data.share`) spend on preprocessing, relative to one."""

from __future__ import annotations

import secrets
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.cache import COPIES, epochs, write
from benchmarks.harness import Measure
from benchmarks.per_core import photos

ROUNDS, EPOCHS, LATE_S = 3, 30, 5.0
"""The second run starts so much later."""
GOAL = 1.2
"""CPU time of two runs, relative to one."""


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    from stoker.hosts.cluster import set_environment

    set_environment(secrets.token_hex(32))
    import ray

    found: dict[str, list[float]] = {"one": [], "two": [], "two that share": [], "one of them late": []}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), photos(500, 375) * COPIES)
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            for number in range(ROUNDS):
                found["one"].append(spent(folder, 1))
                found["two"].append(spent(folder, 2))
                found["two that share"].append(spent(folder, 2, f"round-{number}"))
                found["one of them late"].append(spent(folder, 2, f"late-{number}", LATE_S))
        finally:
            ray.shutdown()
    one, *others = found.items()
    rows = []
    for name, seconds in others:
        times = statistics.median(a / b for a, b in zip(seconds, one[1], strict=True))
        # Images that training gets for a CPU second, so that higher is better.
        ours, peer = 2 / statistics.median(seconds), 1 / statistics.median(one[1])
        goal = 2 / GOAL if name == "two that share" else None
        rows.append(
            Measure(
                f"preprocessing of {name}: {times:.2f} times that of one", ours, peer, "one run",
                2 / times, goal, None if goal is None else 2 / times >= goal, "images/CPU s",
            )
        )  # fmt: skip
    return rows


def spent(folder: str, runs: int, share: str | None = None, late_s: float = 0.0) -> float:
    """CPU seconds of preprocessing an image for each of so many runs at once, after their first epoch."""

    def job(number: int) -> float:
        time.sleep(number * late_s)
        return epochs(folder, "none", EPOCHS, share=share)[2]

    with ThreadPoolExecutor(runs) as threads:
        return sum(threads.map(job, range(runs)))
