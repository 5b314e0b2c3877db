"""Laptop: `stoker.DataLoader` against torch's on this machine, and against the ideal on emulated hosts.

Each loader runs in a separate process, interleaved. Hosts are Ray nodes on which records sleep, which takes
no CPU.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import Measure
from benchmarks.nodes import ray_nodes
from benchmarks.per_core import photos

ROUNDS, IMAGES, BATCH = 3, 1_920, 64
WARM_BATCHES = 6
HOSTS, HOST_CPUS, RECORD_S = 3, 2, 0.05
WARM_S, SECONDS = 12.0, 25.0
"""Sleeping records: warm-up, then measured."""


class Photos(Dataset[Any]):
    """Photos of typical size with the usual decoding and augmentation."""

    def __init__(self) -> None:
        from torchvision import transforms

        self.photos = photos(500, 375)
        self.chain = transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize([0.5] * 3, [0.5] * 3),
            ]
        )

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> Any:
        import io

        from PIL import Image

        photo = Image.open(io.BytesIO(self.photos[index % len(self.photos)])).convert("RGB")
        return self.chain(photo), index % 10


class Sleeping(Dataset[Any]):
    """Records that sleep."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        time.sleep(RECORD_S)
        return index


def loader_of(name: str) -> type[DataLoader[Any]]:
    """The DataLoader of torch or of Stoker."""
    from stoker import DataLoader as Ours

    return Ours if name == "stoker" else DataLoader


def images_per_s(name: str) -> float:
    """In a separate process: the rate after warm-up, to the end of an epoch."""
    batches = iter(loader_of(name)(Photos(), batch_size=BATCH, shuffle=True, num_workers=2))
    for _ in range(WARM_BATCHES):
        next(batches)
    started = time.perf_counter()
    images = sum(len(labels) for _, labels in batches)
    return images / (time.perf_counter() - started)


def records_per_s() -> float:
    """Connected to the hosts: records/s of all hosts in the middle of an epoch."""
    batches = iter(loader_of("stoker")(Sleeping(), batch_size=8))
    next(batches)
    began = time.perf_counter()
    while time.perf_counter() < began + WARM_S:
        next(batches)
    started, records = time.perf_counter(), 0
    while time.perf_counter() < started + SECONDS:
        records += len(next(batches))
    return records / (time.perf_counter() - started)


def alone(what: str) -> float:
    """Run a function of this module in a separate process."""
    code = f"from benchmarks import drop_in; print(drop_in.{what})"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return float(done.stdout.split()[-1])


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    found: dict[str, list[float]] = {"torch": [], "stoker": []}
    for _ in range(ROUNDS):
        for name, rates in found.items():
            rates.append(alone(f"images_per_s({name!r})"))
    ours, theirs = (statistics.median(found[name]) for name in ("stoker", "torch"))
    ratio = statistics.median(a / b for a, b in zip(found["stoker"], found["torch"], strict=True))
    with ray_nodes(HOST_CPUS) as nodes:
        for _ in range(HOSTS - 1):
            nodes.add("cpu", HOST_CPUS)
        slept = records_per_s()
    ideal = HOSTS * HOST_CPUS / RECORD_S
    return [
        Measure(
            "drop-in loader, photos, one machine", ours, theirs, "DataLoader, 2 workers",
            ratio, 0.95, ratio >= 0.95, "images/s",
        ),
        Measure(
            "drop-in loader, sleeping records, 3 hosts of 2 CPUs", slept, ideal, "the ideal",
            slept / ideal, 0.95, slept / ideal >= 0.95, "records/s",
        ),
    ]  # fmt: skip
