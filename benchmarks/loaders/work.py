"""Laptop: the work common to all loaders: data, transform, consumer and its statistics."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

SIDE, BATCH, WORKERS = 224, 64, 2
STRIDE = 16
"""The consumer samples every 16th pixel in both directions."""
WINDOW = (0.45, 0.95)
"""The measured part of the records, after data prefetched during start-up is used up."""
MIDDLE = sum(WINDOW) / 2


@dataclass(frozen=True)
class Seen:
    """The statistics of a loader's consumer."""

    first_batch_at: float
    """`time.time()` of the first batch."""
    rows: int
    mean: float
    """Mean of the sampled pixels, 0 to 255."""
    samples_per_s: float
    """Wall-clock rate in the window."""
    halves: tuple[float, float]
    """The same for the two halves of the window."""
    window_at: tuple[float, float]
    """`time.perf_counter()` of the window's ends: one clock for all processes of a machine."""
    sorted_labels: str
    """Record count by label."""


class Consumer:
    """Consumes batches as fast as they arrive and samples part of each.

    Args:
        total: number of records in the run.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.times: list[tuple[float, int]] = []
        self.first_at = 0.0
        self.rows = 0
        self.sums = 0.0
        self.labels: dict[int, int] = {}

    def take(self, images: Any, labels: Any) -> None:
        """Consume a batch.

        Args:
            images: tensor, records × 3 × 224 × 224 (any memory order), uint8, or float32 normalised by mean
                and deviation 0.5.
            labels: records.
        """
        import torch

        assert images.dtype in (torch.uint8, torch.float32), images.dtype
        assert tuple(images.shape[1:]) == (3, SIDE, SIDE), images.shape
        assert len(images) == len(labels)
        self.first_at = self.first_at or time.time()
        self.rows += len(images)
        mean = float(images[:, :, ::STRIDE, ::STRIDE].float().mean())
        self.sums += len(images) * (
            mean if images.dtype == torch.uint8 else 255 * (0.5 * mean + 0.5)
        )
        for label in labels.tolist():
            self.labels[label] = self.labels.get(label, 0) + 1
        self.times.append((time.perf_counter(), self.rows))

    def seen(self) -> Seen:
        """The statistics after the last batch."""
        first, second = (WINDOW[0], MIDDLE), (MIDDLE, WINDOW[1])
        (began, _), (ended, _) = ends(self.times, self.total, WINDOW)
        return Seen(
            self.first_at,
            self.rows,
            self.sums / max(self.rows, 1),
            rate(self.times, self.total),
            (rate(self.times, self.total, first), rate(self.times, self.total, second)),
            (began, ended),
            json.dumps(dict(sorted(self.labels.items()))),
        )

    def write(self, path: Path) -> None:
        """Write the statistics atomically as JSON."""
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self.seen())))
        draft.replace(path)


def rate(times: list[tuple[float, int]], total: int, window: tuple[float, float] = WINDOW) -> float:
    """Records/s within a window.

    Args:
        times: (clock in s, records so far) after each batch.
        total: number of records in the run.
        window: start and end as fractions of the records.
    """
    (began, before), (ended, after) = ends(times, total, window)
    return (after - before) / (ended - began)


def ends(
    times: list[tuple[float, int]], total: int, window: tuple[float, float]
) -> list[tuple[float, int]]:
    """(clock, records so far) at the ends of a window."""
    return [next(each for each in times if each[1] >= part * total) for part in window]


def slope(times: list[tuple[float, float]], total: int, window: tuple[float, float]) -> float:
    """Like `rate`, for bursty batches: the slope of a line fitted to the window."""
    import numpy as np

    inside = [(at, records) for at, records in times if window[0] <= records / total <= window[1]]
    return float(np.polyfit(*zip(*inside, strict=True), 1)[0])


def longest_gap(times: list[tuple[float, int]]) -> float:
    """The longest time between two batches, s."""
    return max(b[0] - a[0] for a, b in pairwise(times))


def write_folder(folder: Path, images: list[bytes], total: int, classes: int = 4) -> None:
    """Write `folder/train/<class>/<number>.jpg`, repeating the images as links to exclude the disk."""
    kept = folder / "kept"
    kept.mkdir(parents=True)
    for number, content in enumerate(images):
        (kept / f"{number}.jpg").write_bytes(content)
    for label in range(classes):
        (folder / "train" / f"class{label}").mkdir(parents=True)
    for number in range(total):
        target = folder / "train" / f"class{number % classes}" / f"{number:06d}.jpg"
        os.link(kept / f"{number % len(images)}.jpg", target)


def files_of(folder: Path) -> list[tuple[str, int]]:
    """All images and labels, in order."""
    classes = sorted(path.name for path in (folder / "train").iterdir())
    found = [
        (str(p), classes.index(p.parent.name)) for p in sorted((folder / "train").glob("*/*.jpg"))
    ]
    return sorted(found, key=lambda pair: Path(pair[0]).name)


def transforms() -> list[Any]:
    """The common transform: a random crop to 224², antialiased, and a flip."""
    from torchvision.transforms import v2

    return [v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()]


def pillow(on_tensors: bool = False) -> Any:
    """bytes → uint8 tensor by Pillow and torchvision v2.

    Args:
        on_tensors: convert to a tensor first and use v2's kernels, which is faster; otherwise transform
            Pillow images, the default of torchvision's training scripts.
    """
    from PIL import Image
    from torchvision.transforms import v2

    to_tensor = v2.PILToTensor()
    transform = v2.Compose([to_tensor, *transforms()] if on_tensors else [*transforms(), to_tensor])
    return lambda content: transform(Image.open(io.BytesIO(content)).convert("RGB"))


def consume(batches: Iterable[tuple[Any, Any]], total: int, out: Path) -> None:
    """Consume all batches and write the statistics."""
    consumer = Consumer(total)
    for images, labels in batches:
        consumer.take(images, labels)
    consumer.write(out)
