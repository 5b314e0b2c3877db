"""Laptop: images/s from JPEG files to a consumer of batches, against loaders that do the same work.

JPEG 500×375 → random crop of 224², antialiased, uint8 → flip. Stoker runs as a real job: launcher, cluster,
coordinator, two chain tasks, feed, and a train worker that inspects each batch and drops it. Peers have two
workers and the same consumer. Loaders run in separate processes, interleaved, for several rounds. The window
is the wall time between 45 % and 95 % of the records, after prefetched data is used up, so it excludes the
start. The time from the command to the first batch is reported separately.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Measure
from benchmarks.jobs import environment, run_job
from benchmarks.loaders.work import BATCH, WORKERS, write_folder

TOTAL = 8_960
ROUNDS = 3
STORE_MB = 400
"""A quarter of it holds ready blocks: 700 images, besides those of the feed."""
TIMEOUT_S = 180
LEVELS = 1.5
"""Allowed difference of mean pixels, as random crops differ."""
GOAL = 1.0
BASE = "DataLoader, Pillow + v2"
PEERS = {
    BASE: ("dataloader", ""),
    "DataLoader, v2 on tensors": ("dataloader_tensors", ""),
    "DataLoader, our decode chain": ("dataloader_ours", ""),
    "Ray Data → TorchTrainer": ("ray_data", ""),
    "Ray Data, float32, preprocessor": ("ray_float32", ""),
    "WebDataset": ("webdataset", "webdataset"),
    "MosaicML Streaming": ("mosaic", "streaming"),
    "DALI on CPUs": ("dali", "nvidia.dali"),
    "SPDL, threads": ("spdl", "spdl.pipeline"),
}
"""Name → loader and the extra module that it needs."""


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    from benchmarks.loaders import shards
    from benchmarks.per_core import photos

    sys.path[:] = list(dict.fromkeys([*sys.path, *environment()["PYTHONPATH"].split(os.pathsep)]))
    peers = {name: loader for name, (loader, module) in PEERS.items() if there(name, module)}
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_folder(folder / "data", photos(500, 375), TOTAL)
        shards.write(folder / "data", mosaic_too="MosaicML Streaming" in peers)
        for number in range(ROUNDS):
            for name in ("Stoker", *list(peers)):
                one = (
                    stoker(folder, TOTAL)
                    if name == "Stoker"
                    else survived(folder, name, peers[name])
                )
                if one is None:
                    peers.pop(name)
                    found.pop(name, None)
                    continue
                found.setdefault(name, []).append(one)
                show(number, name, one)
    check(found)
    return rows(found)


def survived(folder: Path, name: str, loader: str) -> dict[str, Any] | None:
    """One run of a peer; None, with a message, if it fails or is too slow, which costs only its own row."""
    try:
        return peer(folder, loader)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"without {name}: {str(error).splitlines()[0]}", flush=True)
        return None


def show(number: int, name: str, one: dict[str, Any]) -> None:
    """Print one line per run. Halves of the window that differ much show an unsteady run."""
    first, second = one["halves"]
    print(
        f"round {number + 1}: {name:<32} {one['samples_per_s']:7.0f} images/s"
        f" (halves {first:.0f}, {second:.0f}), first batch after {one['start_s']:.1f} s,"
        f" mean pixel {one['mean']:.2f}",
        flush=True,
    )


def there(name: str, module: str) -> bool:
    """Whether a peer is installed; prints one line if not."""
    try:
        if not module or importlib.util.find_spec(module):
            return True
    except ModuleNotFoundError:
        pass
    print(f"skipped: {name} is not installed; `make bench-peers` installs it")
    return False


def stoker(folder: Path, total: int) -> dict[str, Any]:
    """One run of a real job over the images."""
    out = folder / "stoker.json"
    job = {
        "name": "loading",
        "recipe": "images:Images",
        "params": {"data": str(folder / "data"), "out": str(out), "total": total},
        "train": {"epochs": 1, "batch_size": BATCH, "threads": 1},
        # Prefetched data must be used up before the window, so keep its buffers small.
        "cluster": {"cpus": WORKERS, "object_store_mb": STORE_MB},
        "tracking": {"tensorboard": False},
    }
    began = time.time()
    run_dir = run_job(folder, job, timeout_s=TIMEOUT_S)
    return taken(out, began) | {"run": json.loads((run_dir / "summary.json").read_text())}


def peer(folder: Path, loader: str) -> dict[str, Any]:
    """One run of a peer."""
    out = folder / f"{loader}.json"
    command = [sys.executable, "-m", "benchmarks.loaders", loader, str(folder / "data"), str(out)]
    began = time.time()
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder
    )
    if done.returncode:
        raise RuntimeError(
            f"{loader} ended with {done.returncode}:\n{done.stdout}{done.stderr[-3000:]}"
        )
    return taken(out, began)


def taken(out: Path, began: float) -> dict[str, Any]:
    """The result that a run's consumer wrote, and its time to the first batch."""
    seen: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return seen | {"start_s": seen["first_batch_at"] - began}


def check(found: dict[str, list[dict[str, Any]]]) -> None:
    """Check that speed does not come from doing less: every image once, with the same brightness.

    Raises:
        RuntimeError: a loader gave other data.
    """
    means = {name: statistics.median(one["mean"] for one in runs) for name, runs in found.items()}
    for name, runs in found.items():
        for one in runs:
            if one["rows"] != TOTAL or one["sorted_labels"] != runs[0]["sorted_labels"]:
                raise RuntimeError(
                    f"{name}: {one['rows']} of {TOTAL} images, labels {one['sorted_labels']}"
                )
        if one["sorted_labels"] != found["Stoker"][0]["sorted_labels"]:
            raise RuntimeError(f"{name}: other labels: {one['sorted_labels']}")
        if abs(means[name] - means[BASE]) > LEVELS:
            raise RuntimeError(
                f"{name}: mean pixel {means[name]:.2f}, {BASE} has {means[BASE]:.2f}"
            )


def rows(found: dict[str, list[dict[str, Any]]]) -> list[Measure]:
    """Ours against each peer; a ratio is the median over rounds."""
    ours, unit = found["Stoker"], "images/s"

    def median(runs: list[dict[str, Any]], key: str) -> float:
        return statistics.median(one[key] for one in runs)

    measures = []
    for name, runs in found.items():
        if name == "Stoker":
            continue
        ratio = statistics.median(
            a["samples_per_s"] / b["samples_per_s"] for a, b in zip(ours, runs, strict=True)
        )
        goal = GOAL if name == BASE else None
        measures.append(
            Measure(
                f"end to end, {WORKERS} chain workers: {name}",
                median(ours, "samples_per_s"),
                median(runs, "samples_per_s"),
                name,
                ratio,
                goal,
                None if goal is None else ratio >= goal,
                unit,
            )
        )
    for name, runs in found.items():
        start = median(runs, "start_s")
        measures.append(Measure(f"  first batch: {name}", start, None, "–", None, None, None, "s"))
    return measures
