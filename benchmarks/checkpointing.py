"""Laptop: the cost of a checkpoint every 50 steps.

A real job writes a checkpoint every 100 steps. Of each 100 steps, the first 50 include a checkpoint (a copy
in memory, then an asynchronous write) and the next 50 do not, so both cases alternate in one process and
drift affects both equally. Training uses one thread, as on a GPU host, where the writer has a core to spare.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import Measure
from benchmarks.jobs import events, run_job

EVERY, PAIRS = 50, 6
GOAL = 0.98
"""Throughput with checkpoints over throughput without."""


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    steps = 2 * EVERY * (PAIRS + 1) + 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clock = folder / "clock"
        job = {
            "name": "checkpointing",
            "recipe": "steady:Steady",
            "params": {"clock": str(clock), "steps": steps},
            "train": {"epochs": 1, "batch_size": 8, "threads": 1, "lr": 1e-3},
            "checkpoint": {"every_steps": 2 * EVERY},
            "tracking": {"tensorboard": False},
        }
        written = events(run_job(folder, job, timeout_s=900), "checkpoint")
        times = [tuple(map(float, line.split())) for line in clock.read_text().splitlines()]
    taken = [event for event in written if event["step"] % (2 * EVERY) == 0][:PAIRS]
    wall, cpu = ([b[i] - a[i] for a, b in itertools.pairwise(times)] for i in (0, 1))
    rows = [
        ratio("checkpoint every 50 steps: samples/s", wall),
        ratio("  CPU time of the process", cpu),
    ]
    for key, what in (
        ("paused_s", "training waits for the copy"),
        ("seconds", "writing beside the training"),
    ):
        value = 1000 * statistics.median(event[key] for event in taken)
        rows.append(Measure(f"  {what}", value, None, "–", None, None, None, "ms/checkpoint"))
    return rows


def ratio(name: str, seconds: list[float]) -> Measure:
    """Ratio of steps per second with a checkpoint in 50 steps to those without, median over pairs.

    Args:
        name: the name of the row.
        seconds: the time of each step, from the run's first step.
    """
    # The copy of step n counts into step n's time, the write into the steps after it.
    windows = [seconds[at - 1 : at - 1 + EVERY] for at in range(2 * EVERY, len(seconds), EVERY)]
    with_, without = windows[: 2 * PAIRS : 2], windows[1 : 2 * PAIRS : 2]
    pairs = [sum(b) / sum(a) for a, b in zip(with_, without, strict=True)]
    ours, peer = (statistics.median(EVERY / sum(w) for w in ws) for ws in (with_, without))
    found = statistics.median(pairs)
    return Measure(name, ours, peer, "without", found, GOAL, found >= GOAL, "steps/s")
