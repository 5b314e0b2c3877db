"""Laptop with a GPU: the speed of the real training step when data is never late.

A few preprocessed rows are copied to the device once and trained on repeatedly by the loop of
`training/loop.py` itself, so precision, accumulation, compilation and the rest are the job's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from stoker.config.schema import Config
from stoker.recipe import Batch, Recipe
from stoker.train.feed import Feed

WARM_UP_STEPS = 5
"""The first steps choose kernels, allocate memory, and compile if configured."""
CACHED_BATCHES = 2


@dataclass(frozen=True)
class GpuProfile:
    """Laptop: the measurement of one GPU."""

    samples_per_s: float
    spread: float
    """Half the range of the middle half of the windows, as a share of the median."""
    name: str
    """As the driver reports it: NVIDIA A10G."""


@dataclass(kw_only=True)
class ReplayedFeed(Feed):
    """Train worker: a feed that repeats a few cached batches."""

    batches: list[Batch]
    size: int
    """Rows per batch."""
    seconds: float
    wait: Callable[[], object]
    """Waits for the device."""
    stop: str = "measured"
    """The loop does not reconcile a stopped pass."""
    marks: list[tuple[float, int]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Batch]:
        ends, steps = float("inf"), 0
        every = 1
        while time.perf_counter() < ends:
            yield dict(self.batches[steps % len(self.batches)])
            steps += 1
            self.rows += self.size
            if steps < WARM_UP_STEPS or (steps - WARM_UP_STEPS) % every:
                continue
            self.wait()
            now = time.perf_counter()
            if not self.marks:
                ends = now + self.seconds
            elif len(self.marks) == 1:
                # About 20 windows, so that synchronising costs little.
                each = (now - self.marks[0][0]) / every
                every = max(1, round(self.seconds / 20 / max(each, 1e-6)))
            self.marks.append((now, self.rows))


def measure_gpu(config: Config, recipe: Recipe, columns: dict[str, Any], seconds: float) -> GpuProfile:
    """Laptop: train on cached batches for `seconds` on the first GPU, or on the CPU without one.

    Args:
        config: the job.
        recipe: its recipe.
        columns: preprocessed rows from a ChainProfile.
        seconds: after the warm-up.
    """
    import torch

    from stoker.train import loop
    from stoker.train.build import build
    from stoker.train.state import Progress, Worker

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda:0" if on_gpu else "cpu")
    worker = Worker(config, recipe, _Nobody(), attempt=0, rank=0, world_size=1, device=device)
    build(worker, records=1000 * config.train.batch_size)
    size = config.train.batch_size
    batches = [_batch(columns, size, number, device) for number in range(CACHED_BATCHES)]
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    cached = ReplayedFeed(batches=batches, size=size, seconds=seconds, wait=wait)
    loop.train_epoch(worker, None, Progress(0, feed=cached))
    rates = [
        (rows - before) / (at - since)
        for (since, before), (at, rows) in zip(cached.marks[1:], cached.marks[2:], strict=False)
    ]
    rates = rates or [(cached.marks[-1][1] - cached.marks[0][1]) / (cached.marks[-1][0] - cached.marks[0][0])]
    low, middle, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else rates * 3
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    return GpuProfile(middle, max((high - low) / 2 / middle, 0.02), name)


def _batch(columns: dict[str, Any], rows: int, number: int, device: Any) -> Batch:
    """`rows` rows from those available, with a different start for each batch; images as CHW views."""
    import numpy as np
    import torch

    from stoker.chain.transforms import is_hwc

    batch: Batch = {}
    for name, column in columns.items():
        rolled = np.roll(column, number, axis=0)
        values = np.resize(rolled, (rows, *column.shape[1:]))
        if values.dtype == object:
            batch[name] = list(values)
            continue
        tensor = torch.from_numpy(values).to(device)
        batch[name] = tensor.permute(0, 3, 1, 2) if name == "image" and is_hwc(values.shape[1:]) else tensor
    return batch


class _Nobody:
    """Replaces the coordinator; ignores the events of a measurement."""

    class _Log:
        @staticmethod
        def remote(event: str, values: dict[str, Any], after: Any) -> None: ...

    log = _Log
