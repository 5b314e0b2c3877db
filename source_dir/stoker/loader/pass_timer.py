"""Script: measures the input wait and reports it to the job."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import NamedTuple, TypeVar

from stoker import session
from stoker.events import kinds

EVERY_S = 5.0
Batch = TypeVar("Batch")


class PassProgress(NamedTuple):
    """Script → head: training on a pass so far, from its first batch on."""

    batches: int = 0
    elapsed_s: float = 0.0
    wait_s: float = 0.0


_numbers = itertools.count(secrets.randbits(32) << 20)
"""Of passes; others than those of an earlier start of the script, whose figures stay."""
_optimizer_steps: list[int] = []
"""How many steps all optimizers have made; empty until the first batch."""


def _count_optimizer_steps() -> None:
    if _optimizer_steps:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(*_: object) -> None:
        _optimizer_steps[0] += 1

    _optimizer_steps.append(0)
    register_optimizer_step_post_hook(stepped)


class PassTimer:
    """The batches and the input wait of one pass; its times run from the first batch on.

    The time until the first batch is start-up. A pass trains if an optimizer makes steps between its batches.
    In a script whose optimizers are not torch's, and until the first step, it does if gradients are on.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.batches = self.samples = 0
        self.wait_s = self.longest_wait_s = 0.0
        self.trains = self._with_grad = False
        self._steps_before = 0
        self._first = self._latest = self._last = 0.0
        """When the first and the latest batch came, and when they were last told."""
        self._told = 0

    def took(self, asked: float, samples: int) -> None:
        """Count a batch that the script received; `asked`: by `time.perf_counter()`."""
        import torch

        now = time.perf_counter()
        if not self._first:
            _count_optimizer_steps()
            self._first = self._last = now
            self._with_grad, self._steps_before = torch.is_grad_enabled(), _optimizer_steps[0]
        else:
            self.wait_s += now - asked
            self.longest_wait_s = max(self.longest_wait_s, now - asked)
        self._look()
        self.batches, self.samples, self._latest = self.batches + 1, self.samples + samples, now
        if now - self._last > EVERY_S:
            self.tell(now)

    def _look(self) -> None:
        made = _optimizer_steps[0]
        self.trains = made > self._steps_before if made else self._with_grad

    def ended(self) -> None:
        if self._first:
            self._look()
            self.tell()

    @property
    def progress(self) -> PassProgress:
        if not self.trains or self.batches < 2:
            return PassProgress()
        return PassProgress(self.batches - 1, self._latest - self._first, self.wait_s)

    def tell(self, now: float | None = None) -> None:
        now = time.perf_counter() if now is None else now
        self._last = now
        if self.trains and self.batches > self._told:
            self._told = self.batches
            event = kinds.LoaderProgress(
                rank=int(os.environ.get("RANK") or 0),
                loader=self.number,
                steps=self.batches,
                samples=self.samples,
                wait_s=round(self.wait_s, 4),
                longest_wait_s=round(self.longest_wait_s, 4),
                # What the script does after the last batch may have nothing to do with it.
                elapsed_s=round(self._latest - self._first, 4),
            )
            session.tell(event.event, **event.values())


def timed(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Your train loop: yield the batches, and report to the run how long the loop waited for each.

        for batch in stoker.timed(shard.iter_torch_batches(batch_size=32)):

    The rows of a batch are those of its first column, for a mapping, else its length.
    """
    session.join()
    timer, source = PassTimer(), iter(batches)
    try:
        while True:
            asked = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            column = next(iter(batch.values()), ()) if isinstance(batch, Mapping) else batch
            timer.took(asked, len(column) if isinstance(column, Sized) else 1)
            yield batch
    finally:
        timer.ended()
