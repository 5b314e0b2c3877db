"""Laptop: records/s where 5 % of the records take 20 times as long, against a DataLoader of as many workers.

Records sleep, which takes no CPU, and training takes batches as fast as they come. A DataLoader hands out
batches in order, so one slow record holds up those that are ready behind it; `order: any` has no such line.
What that costs depends on the batch: small ones (volumes, videos) vary much, large ones hardly, as their
slow records even out.
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
from benchmarks.sleeping import wake_all_slots
from stoker.config import load
from stoker.data import read_range
from stoker.sizing.nodes import ray_nodes
from stoker.sizing.stream import one_pass

WORKERS, ROUNDS = 12, 3
FAST_S, SLOW_S, SLOW_SHARE = 0.02, 0.4, 0.05
TOTAL = 2_400
WINDOW = (0.25, 0.9)
"""Part of the records that is measured: without the start, and without the last ones, which run alone."""
BATCHES = {2: 2.0, 16: None}
"""Batch size → goal: of volumes (nnU-Net) and large images (MMDetection), of smaller ones."""
BLOCK_RECORDS = 8
IN_ORDER, UNORDERED = "DataLoader", "DataLoader, in_order=False"


def seconds_of(index: int) -> float:
    """What a record takes; which ones are slow is drawn by their number, alike for all loaders."""
    return SLOW_S if index * 2_654_435_761 % 2**32 < SLOW_SHARE * 2**32 else FAST_S


MEAN_S = sum(map(seconds_of, range(TOTAL))) / TOTAL


class Uneven(Dataset[Any]):
    """The records, for a DataLoader."""

    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int) -> int:
        time.sleep(seconds_of(index))
        return index


class Sleep:
    """Chain worker: the same records, a block at a time."""

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        time.sleep(sum(map(seconds_of, columns["index"].tolist())))
        return columns


def run() -> list[Measure]:
    """The rows of this benchmark."""
    found: dict[tuple[int, str], list[float]] = {}
    with ray_nodes(WORKERS):
        wake_all_slots(WORKERS, sys.modules[__name__])
        for number in range(ROUNDS):
            for batch in BATCHES:
                for name in ("Stoker", IN_ORDER, UNORDERED):
                    one = stoker(batch) if name == "Stoker" else torch_alone(batch, name == IN_ORDER)
                    found.setdefault((batch, name), []).append(one)
                    print(f"round {number + 1}: {name}, batches of {batch}: {one:.1f} records/s", flush=True)
    return rows(found)


def rows(found: dict[tuple[int, str], list[float]]) -> list[Measure]:
    """Ours against each, and against what the workers can do at most; ratios are medians of the rounds'."""
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
    """Records per second of the real pipeline on the node there is."""
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
    """Take all as fast as it comes; records per second in the window.

    A record counts by what it takes: how many slow ones come within the window is chance.

    Raises:
        RuntimeError: not every record came once.
    """
    indices: list[int] = []
    times: list[tuple[float, float]] = []
    work = 0.0
    for batch in batches:
        indices += batch.tolist()
        work += sum(map(seconds_of, batch.tolist()))
        times.append((time.perf_counter(), work / MEAN_S))
    if sorted(indices) != list(range(TOTAL)):
        raise RuntimeError(f"{len(indices)} records came, {len(set(indices))} different ones, of {TOTAL}")
    return slope(times, TOTAL, WINDOW)


def torch_alone(batch: int, in_order: bool) -> float:
    """`in_torch` in a process of its own: its workers are forked, which one that uses Ray should not do."""
    code = f"from benchmarks import slow_samples; print(slow_samples.in_torch({batch}, {in_order}))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=True, timeout=180
    )
    return float(json.loads(done.stdout.split()[-1]))
