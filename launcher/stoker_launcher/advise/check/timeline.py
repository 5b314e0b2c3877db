"""Computes the waiting share of a step from the times of batch requests. Pure.

asked ──wait── got ──────── compute ──────── asked ──wait── got …
  └──────────────── one step ─────────────────┘
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEAST_STEPS = 10
STEPS, MOST_STEPS = 20, 1000
"""Minimum and maximum number of steps without --steps."""
SURE = 0.02
"""Stop measuring at this uncertainty, ± share of a step."""
LONG_S = 60.0
"""Stop measuring after this time if there are enough steps."""
STARTING = 3
"""Warm-up steps, in which kernels are selected, memory is allocated and code is compiled."""
BLOCKS = 10
TRAINED = 3
"""A loader trains if its batches precede this many optimizer steps."""


@dataclass
class Take:
    loader: int
    epoch: int
    number: int
    """Index of the batch in its epoch, from 0."""
    asked: float
    got: float
    ended: bool = False
    """Whether it returned no batch because the epoch ended."""


class TimedStep(NamedTuple):
    """The time from one batch request to the next."""

    epoch: int
    number: int
    whole: float
    wait: float


@dataclass
class Loader:
    place: str
    """Where the script iterates over it: `train.py:31`."""
    dataset: str
    batch_size: int | None
    num_workers: int
    prefetch: int
    ours: bool = False
    epochs: int = 0
    batches: int = 0
    trained: int = 0
    """Optimizer steps preceded by one of its batches, taken in the same thread."""
    samples: int = 0
    """Of its first batch, as `batch_bytes`; 0: none has come."""
    batch_bytes: int = 0

    @property
    def trains(self) -> bool:
        return self.trained >= TRAINED

    @property
    def warmup(self) -> int:
        """Steps to skip at the start, because batches prefetched during slow first steps hide waiting."""
        return STARTING + self.num_workers * self.prefetch

    @property
    def lead(self) -> int:
        """Steps to skip in later epochs, because workers that start together deliver together."""
        return max(self.num_workers, 1)


def training(loaders: Sequence[Loader]) -> int | None:
    """The index of the loader with the most batches, of those that train if there are any."""
    seen = [n for n, loader in enumerate(loaders) if loader.batches]
    return max(seen, key=lambda n: (loaders[n].trains, loaders[n].batches), default=None)


def steps_of(takes: Sequence[Take], loaders: Sequence[Loader], of: int) -> list[TimedStep]:
    """The steps of a loader's loop.

    Includes waiting for other training loaders, as with two zipped ones. Skips steps in which a loader that
    does not train was iterated or an epoch ended.
    """
    along = [n == of or (loader.trains and loaders[of].trains) for n, loader in enumerate(loaders)]
    steps = []
    for here, there in itertools.pairwise(i for i, take in enumerate(takes) if take.loader == of):
        first, last, inside = takes[here], takes[there], takes[here:there]
        if (
            not first.ended
            and first.epoch == last.epoch
            and all(along[take.loader] for take in inside)
        ):
            wait = sum(take.got - take.asked for take in inside)
            steps.append(TimedStep(first.epoch, first.number, last.asked - first.asked, wait))
    return steps


def steady(steps: Sequence[TimedStep], loader: Loader) -> list[TimedStep]:
    """Only whole rounds of workers in each epoch count: they deliver in turn, and late ones together."""
    found = []
    for epoch, group in itertools.groupby(steps, key=lambda step: step.epoch):
        begin = loader.warmup if epoch == steps[0].epoch else loader.lead
        running = [step for step in group if step.number >= begin]
        found += running[: len(running) - len(running) % loader.lead]
    return found


def wait_share(steps: Sequence[TimedStep]) -> tuple[float, float]:
    """The share, and its ± at 95 %; 1 if there is too little data."""
    if len(steps) < LEAST_STEPS:
        return _share(steps), 1.0
    # Block jackknife, because neighbouring steps are correlated.
    edges = [round(i * len(steps) / BLOCKS) for i in range(BLOCKS + 1)]
    without = [_share([*steps[:low], *steps[high:]]) for low, high in itertools.pairwise(edges)]
    error = statistics.stdev(without) * (BLOCKS - 1) / math.sqrt(BLOCKS)
    return _share(steps), 2.26 * error  # Student's t of 9 degrees of freedom


def _share(steps: Sequence[TimedStep]) -> float:
    return sum(step.wait for step in steps) / max(sum(step.whole for step in steps), 1e-12)


def enough(steps: Sequence[TimedStep], loader: Loader, wanted: int | None) -> bool:
    """Whether the steps so far are enough: `wanted` ones, or None: until the share is certain."""
    found = steady(steps, loader)
    if wanted is not None:
        return len(found) >= wanted
    long = sum(step.whole for step in found) > LONG_S
    if len(found) < max(STEPS, 3 * loader.num_workers):
        return len(found) >= LEAST_STEPS and long
    return long or len(found) >= MOST_STEPS or wait_share(found)[1] <= SURE
