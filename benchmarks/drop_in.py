"""Laptop: `stoker.DataLoader` against torch's on this machine, and against the ideal on emulated hosts.

Each loader runs in a separate process, interleaved: photos; passes over three records; batches of one record;
a dataset of 1.2 million paths, which torch sends to spawned workers. Hosts are Ray nodes on which records
sleep, which takes no CPU.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import psutil
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import Measure
from benchmarks.nodes import ray_nodes
from benchmarks.per_core import photos

ROUNDS, IMAGES, BATCH = 3, 7_680, 64
WARM_BATCHES = 24
"""More than a loader has ready when the first one comes."""
SHORT, PASSES, SHORT_S = 3, 50, 0.02
"""Records of a short pass, passes, and the goal for one of them."""
SINGLES, PATHS = 20_000, 1_200_000
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


class Numbers(Dataset[Any]):
    """Records that cost nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return index


class Paths(Dataset[Any]):
    """As many paths as ImageNet has."""

    def __init__(self) -> None:
        self.paths = [
            f"/data/imagenet/train/n{i % 1000:08d}/n{i % 1000:08d}_{i}.JPEG" for i in range(PATHS)
        ]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return len(self.paths[index])


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


def short_pass_s(name: str) -> float:
    """In a separate process: the median of passes over a few records, after the first."""
    loader = loader_of(name)(Numbers(SHORT), batch_size=1, num_workers=2, persistent_workers=True)
    times = []
    for _ in range(PASSES + 1):
        started = time.perf_counter()
        if len(list(loader)) != SHORT:
            raise RuntimeError(f"{name}: a pass over {SHORT} records gave another number")
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def singles_per_s(name: str) -> float:
    """In a separate process: batches of one record, after the first."""
    batches = iter(loader_of(name)(Numbers(SINGLES), batch_size=1, num_workers=2))
    next(batches)
    started = time.perf_counter()
    count = sum(1 for _ in batches)
    if count != SINGLES - 1:
        raise RuntimeError(f"{name}: {count + 1} of {SINGLES} batches")
    return count / (time.perf_counter() - started)


def paths_s(name: str) -> float:
    """In a separate process: from `iter()` to the first batch; prints what its workers have of their own."""
    dataset, options = Paths(), {"multiprocessing_context": "spawn"} if name == "torch" else {}
    started = time.perf_counter()
    batches = iter(loader_of(name)(dataset, batch_size=64, shuffle=True, num_workers=2, **options))
    next(batches)
    taken = time.perf_counter() - started
    own = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(word in " ".join(each.cmdline()) for word in ("spawn_main", "ChainWorker")):
                own.append(round(each.memory_full_info().uss / 2**20))
    print(f"{name}: workers' own memory {own} MB", file=sys.stderr)
    return taken


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
    photo, spread = compared("images_per_s")
    short, _ = compared("short_pass_s", lower=True)
    single, _ = compared("singles_per_s")
    paths, _ = compared("paths_s", lower=True)
    with ray_nodes(HOST_CPUS) as nodes:
        for _ in range(HOSTS - 1):
            nodes.add("cpu", HOST_CPUS)
        slept = records_per_s()
    ideal, peer = HOSTS * HOST_CPUS / RECORD_S, "DataLoader, 2 workers"

    def row(name: str, figures: tuple[float, float, float], unit: str, to: str = peer) -> Measure:
        ours, theirs, ratio = figures
        return Measure(f"drop-in loader, {name}", ours, theirs, to, ratio, 1.0, ratio >= 1.0, unit)

    return [
        row("photos, one machine", photo, "images/s"),
        Measure("  largest of its rounds over the smallest", spread, None, "–", None, None, None, ""),
        row("batches of one record", single, "batches/s"),
        row("1.2 million paths, first batch", paths, "s", f"{peer}, spawned"),
        row("a pass over 3 records", (short[0], SHORT_S, SHORT_S / short[0]), "s", "the goal"),
        Measure("  torch's persistent workers", short[1], None, "–", None, None, None, "s"),
        Measure(
            "drop-in loader, sleeping records, 3 hosts of 2 CPUs", slept, ideal, "the ideal",
            slept / ideal, 0.97, slept / ideal >= 0.97, "records/s",
        ),
    ]  # fmt: skip


def compared(what: str, lower: bool = False) -> tuple[tuple[float, float, float], float]:
    """Medians of ours and torch's and of their ratios, and our largest figure over the smallest."""
    found: dict[str, list[float]] = {"torch": [], "stoker": []}
    for _ in range(ROUNDS):
        for name, figures in found.items():
            figures.append(alone(f"{what}({name!r})"))
    ours, theirs = found["stoker"], found["torch"]
    pairs = zip(theirs, ours, strict=True) if lower else zip(ours, theirs, strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    return (statistics.median(ours), statistics.median(theirs), ratio), max(ours) / min(ours)
