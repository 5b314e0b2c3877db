"""Laptop: what two runs that share their blocks (`data.share`) spend on preprocessing, relative to one."""

from __future__ import annotations

import secrets
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.cache import COPIES, EPOCHS, epochs, write
from benchmarks.harness import Measure
from benchmarks.per_core import IMAGES, photos

ROUNDS, LATE_S = 3, 5.0
"""The second run starts so much later."""
GOAL = 1.2
"""CPU time of two runs, relative to one."""


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    from stoker.bootstrap.cluster import set_environment

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
        # Images that training gets for a CPU second; higher is better.
        ours, peer = (
            runs * COPIES * IMAGES * EPOCHS / statistics.median(each)
            for runs, each in ((2, seconds), (1, one[1]))
        )
        goal = None if name == "two" else 2 / GOAL
        rows.append(
            Measure(
                f"preprocessing of {name}: {times:.2f} times that of one", ours, peer, "one run",
                2 / times, goal, None if goal is None else 2 / times >= goal, "images/CPU s",
            )
        )  # fmt: skip
    return rows


def spent(folder: str, runs: int, share: str | None = None, late_s: float = 0.0) -> float:
    """CPU seconds of preprocessing of so many runs at once."""

    def job(number: int) -> float:
        time.sleep(number * late_s)
        return epochs(folder, "none", share=share)[2]

    with ThreadPoolExecutor(runs) as threads:
        return sum(threads.map(job, range(runs)))
