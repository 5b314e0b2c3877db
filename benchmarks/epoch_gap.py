"""Laptop: the wait for the first batch of an epoch, and a train worker's memory over 20 epochs.

A real job on JPEGs, with validation and checkpoints between epochs and steps as long as on a GPU: data is
produced faster than it is consumed. The wait is the loop's, from requesting an epoch's first batch to
receiving it. Memory is the train worker's own at the end of each epoch (anonymous pages: no files and no
pages of the object store, whose size is bounded), without the batches prefetched for `data.prefetch_s`. The
same process also measures the overhead of the step timers.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import Measure
from benchmarks.jobs import events, run_job
from benchmarks.loaders.work import BATCH, SIDE, WORKERS, write_folder

EPOCHS, RECORDS, VAL_RECORDS = 20, 1_280, 128
STEP_S = 0.1
PREFETCH_S = 1.0
GAP_GOAL_S, MEMORY_GOAL, ACCOUNTING_GOAL = 0.3, 0.02, 0.01
WARM = 3
"""Warm-up epochs, in which imports, checkpoints and buffers still allocate memory."""
SHORT_STEP_MS = 10.0
"""A short step of a fast GPU, the reference for accounting."""
LOG_EVERY = 10


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    from benchmarks.per_core import photos

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        images = photos(500, 375)
        write_folder(folder / "data", images, RECORDS)
        write_folder(folder / "more", images, VAL_RECORDS)
        (folder / "more" / "train").rename(folder / "data" / "val")
        out = folder / "notes"
        job = {
            "name": "epochs",
            "recipe": "epochs:Epochs",
            "params": {
                "data": str(folder / "data"),
                "out": str(out),
                "total": RECORDS,
                "epochs": EPOCHS,
                "step_s": STEP_S,
            },
            "data": {"prefetch_s": PREFETCH_S},
            "train": {"epochs": EPOCHS, "batch_size": BATCH, "threads": 1},
            "cluster": {"cpus": WORKERS},
            "tracking": {"log_every_steps": LOG_EVERY},
        }
        run_dir = run_job(folder, job)
        passes = [event for event in events(run_dir, "pass") if event["split"] == "train"]
        shared = [
            round((note["uss"] - note["anonymous"]) / 2**20)
            for note in map(json.loads, out.read_text().splitlines())
        ]
        print("pages of the object store touched by this process only, MB by epoch:", *shared)
        notes = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(passes) == len(notes) == EPOCHS, (len(passes), len(notes))
    return [*gaps(passes), *memory([note["anonymous"] for note in notes]), accounting(notes[-1])]


def gaps(passes: list[dict[str, dict[str, float]]]) -> list[Measure]:
    """The waits for the first batches, except the run's first."""
    waits = [one["times"]["first_wait_s"] for one in passes[1:]]
    worst, name = max(waits), "input wait at an epoch boundary"
    ratio = GAP_GOAL_S / max(worst, 1e-6)
    rows = [
        Measure(
            f"{name}: worst", worst, GAP_GOAL_S, "the goal", ratio, 1.0, worst <= GAP_GOAL_S, "s"
        )
    ]
    rows.append(
        Measure(f"  {name}: median", statistics.median(waits), None, "–", None, None, None, "s")
    )
    return rows


def memory(own: list[int]) -> list[Measure]:
    """Memory beyond prefetched batches: last epochs against first ones, and the largest deviation."""
    ready = round(PREFETCH_S / STEP_S) * BATCH * SIDE * SIDE * 3
    beyond = [(value - ready) / 2**20 for value in own[WARM:]]
    first, last = statistics.median(beyond[:5]), statistics.median(beyond[-5:])
    growth = last / first
    strays = max(abs(value / first - 1) for value in beyond)
    print("own memory beyond prefetch, MB by epoch:", " ".join(f"{value:.0f}" for value in beyond))
    name = f"train worker's memory over {EPOCHS} epochs"
    flat = strays <= MEMORY_GOAL
    rows = [
        Measure(f"{name}: last 5 against first 5", last, first, "first 5", growth, None, None, "MB")
    ]
    ratio, unit = MEMORY_GOAL / max(strays, 1e-9), "of the first"
    rows.append(
        Measure(
            f"{name}: strays by at most", strays, MEMORY_GOAL, "the goal", ratio, 1.0, flat, unit
        )
    )
    return rows


def accounting(note: dict[str, float]) -> Measure:
    """The timers of a step and its share of a logged step, relative to a short step."""
    us = note["per_step_us"] + note["per_log_us"] / LOG_EVERY
    most = 1000 * SHORT_STEP_MS * ACCOUNTING_GOAL
    name = f"accounting, of a {SHORT_STEP_MS:.0f} ms step"
    return Measure(name, us, most, "1 % of it", most / us, 1.0, us <= most, "µs/step")
