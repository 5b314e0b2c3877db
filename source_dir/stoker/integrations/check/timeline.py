"""Anywhere: from the moments at which a script asked for batches to the share of a step that waits. Pure.

asked ──wait── got ──────── compute ──────── asked ──wait── got …
  └──────────────── one step ─────────────────┘
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

LEAST_STEPS = 10
"""Fewer steps are not judged."""
STEPS, MOST_STEPS = 20, 1000
"""Measured at least and at most where no number was asked for."""
SURE = 0.02
"""± share of a step at which the measurement ends by itself."""
LONG_S = 60.0
"""Measuring for longer is not worth it once there are enough steps to judge."""
STARTING = 3
"""First steps of a script: kernels are chosen, memory is allocated, code is compiled."""
BLOCKS = 10
TRAINS, TRAINED = 0.2, 3
"""A loader is for training if batches of it came before this share of the optimizer's steps, and so many."""


@dataclass
class Take:
    """Script's process: one call of a loader's next()."""

    loader: int
    epoch: int
    number: int
    """Of the batch in its epoch, from 0."""
    asked: float
    got: float
    ended: bool = False
    """It brought no batch: the epoch was over."""


@dataclass(frozen=True)
class Step:
    """Anywhere: from one batch being asked for to the next."""

    epoch: int
    number: int
    whole: float
    wait: float


@dataclass
class Loader:
    """Script's process: one loader of the script, as far as its own attributes tell."""

    place: str
    """Where the script iterates it: `train.py:31`."""
    dataset: str
    batch_size: int | None
    num_workers: int
    prefetch: int
    persistent: bool
    length: int | None
    """Batches per epoch; None where it has no length."""
    batches: int = 0
    with_grad: int = 0
    """Batches taken while gradients were enabled."""
    trained: int = 0
    """Steps of an optimizer that one of its batches came before."""
    optimizer_steps: int = 0
    """Steps of all optimizers from the first to the last of these."""
    starts: list[float] = field(default_factory=list)
    """Seconds that iter() took, by epoch."""
    samples: int = 0
    sized_batches: int = 0
    """Batches that `samples` and `batch_bytes` were counted over."""
    batch_bytes: int = 0
    in_thread: bool = False
    """Its next() was called in another thread than the optimizer's step."""

    @property
    def trains(self) -> bool:
        """Whether optimizer steps follow its batches."""
        return self.trained >= max(TRAINED, TRAINS * self.optimizer_steps)

    @property
    def warmup(self) -> int:
        """Steps to leave out at the start: what was prefetched during the slow first steps hides waits."""
        return STARTING + self.num_workers * self.prefetch

    @property
    def lead(self) -> int:
        """Steps to leave out in later epochs: workers that all begin at once deliver all at once."""
        return max(self.num_workers, 1)


@dataclass(frozen=True)
class Share:
    """Anywhere: a share of time with its uncertainty."""

    value: float
    spread: float
    """± of `value`, 95 %; 1 where too little was seen to tell."""


def training(loaders: Sequence[Loader]) -> int | None:
    """Anywhere: which loader feeds the training: optimizer steps, else gradients, else batches decide."""
    seen = [n for n, loader in enumerate(loaders) if loader.batches]
    key = lambda n: (loaders[n].trains, loaders[n].with_grad, loaders[n].batches)  # noqa: E731
    return max(seen, key=key) if seen else None


def steps_of(takes: Sequence[Take], loaders: Sequence[Loader], of: int) -> list[Step]:
    """Anywhere: the steps of a loader's loop.

    Waiting for other loaders that train, as where two are zipped, counts in. A step in which a loader was
    iterated that does not train, or in which an epoch ended, is no step.
    """
    own = [i for i, take in enumerate(takes) if take.loader == of]
    steps = []
    for here, there in itertools.pairwise(own):
        first, last = takes[here], takes[there]
        inside = takes[here:there]
        foreign = any(
            t.loader != of and not (loaders[of].trains and loaders[t.loader].trains) for t in inside
        )
        if first.ended or foreign or first.epoch != last.epoch:
            continue
        wait = sum(take.got - take.asked for take in inside)
        steps.append(Step(first.epoch, first.number, last.asked - first.asked, wait))
    return steps


def steady(steps: Sequence[Step], loader: Loader) -> list[Step]:
    """Anywhere: the steps that say how the loop runs once it runs.

    Workers deliver in turn, late ones all together; so of each epoch only whole rounds of them count.
    """
    found = []
    for epoch, group in itertools.groupby(steps, key=lambda step: step.epoch):
        begin = loader.warmup if epoch == steps[0].epoch else loader.lead
        running = [step for step in group if step.number >= begin]
        found += running[: len(running) - len(running) % loader.lead]
    return found


def judged(steps: Sequence[Step], loader: Loader) -> list[Step]:
    """Anywhere: the steady steps; with epochs too short to have any, all but the script's first.

    These include the first of an epoch, which waits for workers to start, in iter() and in next().
    """
    found = steady(steps, loader)
    if len(found) >= LEAST_STEPS:
        return found
    starts = {(epoch, 0): spent for epoch, spent in enumerate(loader.starts)}
    return [
        replace(step, whole=step.whole + started, wait=step.wait + started)
        for step in steps[STARTING:]
        for started in [starts.get((step.epoch, step.number), 0.0)]
    ]


def waiting(steps: Sequence[Step]) -> Share:
    """Anywhere: the share of the steps' time that waits for data."""
    whole = sum(step.whole for step in steps)
    if len(steps) < LEAST_STEPS or whole <= 0:
        return Share(sum(step.wait for step in steps) / whole if whole > 0 else 0.0, 1.0)
    value = sum(step.wait for step in steps) / whole
    # Steps next to each other are alike, so it is blocks of them that are left out one at a time.
    edges = [round(i * len(steps) / BLOCKS) for i in range(BLOCKS + 1)]
    without = []
    for low, high in itertools.pairwise(edges):
        rest = [*steps[:low], *steps[high:]]
        without.append(sum(step.wait for step in rest) / max(sum(step.whole for step in rest), 1e-12))
    error = statistics.stdev(without) * (BLOCKS - 1) / math.sqrt(BLOCKS)
    return Share(value, 2.26 * error)  # Student's t of 9 degrees of freedom


def enough(steps: Sequence[Step], loader: Loader, wanted: int | None) -> bool:
    """Script's process: whether a loader's steps suffice for a verdict.

    Args:
        steps: its steps so far.
        loader: one that trains.
        wanted: the number asked for; None: until the share is sure.
    """
    found = steady(steps, loader)
    if not found and steps and steps[-1].epoch >= 2:
        found = judged(steps, loader)
    if wanted is not None:
        return len(found) >= wanted
    if len(found) < max(STEPS, 3 * loader.num_workers):
        return len(found) >= LEAST_STEPS and sum(step.whole for step in found) > LONG_S
    long = sum(step.whole for step in found) > LONG_S
    return long or len(found) >= MOST_STEPS or waiting(found).spread <= SURE


def epoch_start(takes: Sequence[Take], loader: Loader, of: int) -> float | None:
    """Anywhere: seconds from the begin of an epoch to its first batch, the usual one; None if unseen."""
    firsts = {take.epoch: take.got - take.asked for take in takes if take.loader == of and take.number == 0}
    found = [first + loader.starts[epoch] for epoch, first in firsts.items() if epoch < len(loader.starts)]
    # The first start of a persistent loader is the only one that starts processes.
    return statistics.median(found[1:] or found) if found else None
