"""Laptop: records/s when 5 % of the records take 20 times as long, against an equally large DataLoader.

Records sleep, which takes no CPU, and training consumes batches as fast as they arrive. A DataLoader delivers
batches in order, so a slow record blocks ready batches behind it; `order: any` does not. The cost depends on
the batch size: small batches (volumes, videos) vary a lot, in large ones slow records average out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import Measure
from benchmarks.jobs import ROOT, environment
from benchmarks.loaders.work import slope
from benchmarks.nodes import ray_nodes
from benchmarks.sleeping import wake_all_slots
from benchmarks.stream import one_pass
from stoker.config.loading import load
from stoker.data import read_range

WORKERS, ROUNDS = 12, 3
FAST_S, SLOW_S, SLOW_SHARE = 0.02, 0.4, 0.05
TOTAL = 2_400
WINDOW = (0.25, 0.9)
"""The measured part of the records, without the start and the last ones, which run alone."""
BATCHES = {2: 2.0, 16: None}
"""Batch size → goal: for volumes (nnU-Net) and large images (MMDetection), for smaller images."""
BLOCK_RECORDS = 8
IN_ORDER, UNORDERED = "DataLoader", "DataLoader, in_order=False"


def seconds_of(index: int) -> float:
    """The time of a record; slow ones are drawn by index, the same for all loaders."""
    return SLOW_S if index * 2_654_435_761 % 2**32 < SLOW_SHARE * 2**32 else FAST_S


MEAN_S = sum(map(seconds_of, range(TOTAL))) / TOTAL


class Uneven(Dataset[Any]):
    """The records as a dataset for a DataLoader."""

    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int) -> int:
        time.sleep(seconds_of(index))
        return index


class Sleep:
    """Chain worker: the same records, block by block."""

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        time.sleep(sum(map(seconds_of, columns["index"].tolist())))
        return columns


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    found: dict[tuple[int, str], list[float]] = {}
    with ray_nodes(WORKERS):
        wake_all_slots(WORKERS, sys.modules[__name__])
        for number in range(ROUNDS):
            for batch in BATCHES:
                for name in ("Stoker", IN_ORDER, UNORDERED):
                    one = (
                        stoker(batch) if name == "Stoker" else torch_alone(batch, name == IN_ORDER)
                    )
                    found.setdefault((batch, name), []).append(one)
                    print(
                        f"round {number + 1}: {name}, batches of {batch}: {one:.1f} records/s",
                        flush=True,
                    )
    return rows(found)


def rows(found: dict[tuple[int, str], list[float]]) -> list[Measure]:
    """Ours against each peer and against the workers' limit; ratios are medians over rounds."""
    measures = []
    for batch, goal in BATCHES.items():
        ours = found[batch, "Stoker"]
        peers = {name: found[batch, name] for name in (IN_ORDER, UNORDERED)} | {
            "the ideal": [WORKERS / MEAN_S] * len(ours)
        }
        for name, theirs in peers.items():
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            asked = goal if name == IN_ORDER else None
            measures.append(
                Measure(
                    f"slow samples, batches of {batch}: {name}",
                    statistics.median(ours), statistics.median(theirs), name,
                    ratio, asked, None if asked is None else ratio >= asked, "records/s",
                )
            )  # fmt: skip
    return measures


def stoker(batch: int) -> float:
    """Records/s of the real pipeline on the current node."""
    config = load(
        None,
        ["data.order=any", f"data.block_records={BLOCK_RECORDS}", f"train.batch_size={batch}"],
    ).config
    with one_pass(config, read_range(TOTAL), [("sleep", Sleep())], torch.device("cpu")) as stream:
        return taken(each["index"] for each in stream)


def in_torch(batch: int, in_order: bool) -> float:
    """Records per second of a DataLoader."""
    return taken(DataLoader(Uneven(), batch, shuffle=True, num_workers=WORKERS, in_order=in_order))


def taken(batches: Any) -> float:
    """Consume everything as fast as it arrives; return records/s in the window.

    Records are weighted by their time, as the number of slow ones in the window is random.

    Raises:
        RuntimeError: records are missing or repeated.
    """
    indices: list[int] = []
    times: list[tuple[float, float]] = []
    work = 0.0
    for batch in batches:
        indices += batch.tolist()
        work += sum(map(seconds_of, batch.tolist()))
        times.append((time.perf_counter(), work / MEAN_S))
    if sorted(indices) != list(range(TOTAL)):
        raise RuntimeError(
            f"{len(indices)} of {TOTAL} records, {len(set(indices))} of them distinct"
        )
    return slope(times, TOTAL, WINDOW)


def torch_alone(batch: int, in_order: bool) -> float:
    """Run `in_torch` in a separate process: it forks workers, which a process with Ray must not do."""
    code = f"from benchmarks import slow_samples; print(slow_samples.in_torch({batch}, {in_order}))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=180,
    )
    return float(json.loads(done.stdout.split()[-1]))
