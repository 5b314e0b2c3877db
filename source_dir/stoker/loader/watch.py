"""Script: measures the input wait and reports it to the job."""

from __future__ import annotations

import itertools
import os
import time
from typing import NamedTuple

from stoker import session

EVERY_S = 5.0


class Progress(NamedTuple):
    """Script → head: training on a pass so far, from its first batch on."""

    batches: int = 0
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    """Of these, waiting for batches."""


_numbers = itertools.count()


class Watch:
    """Script: the batches and the input wait of one pass; its times run from the first batch on.

    The time until the first batch is start-up.

    Args:
        samples: records per full batch.
    """

    def __init__(self, samples: int) -> None:
        self.samples, self.number = samples, next(_numbers)
        self.batches = 0
        self.wait_s = 0.0
        self.trains = False
        self._first = self._latest = self._last = 0.0
        """When the first and the latest batch came, and when they were last told."""
        self._told = 0

    def took(self, asked: float) -> None:
        """Count a batch that the script received.

        Args:
            asked: `time.perf_counter()` when the script asked for it.
        """
        import torch

        now = time.perf_counter()
        if not self._first:
            self._first = self._last = now
            self.trains = torch.is_grad_enabled()
        else:
            self.wait_s += now - asked
        self.batches, self._latest = self.batches + 1, now
        if now - self._last > EVERY_S:
            self.tell(now)

    @property
    def progress(self) -> Progress:
        """Of training; validation counts nothing."""
        if not self.trains or self.batches < 2:
            return Progress()
        return Progress(self.batches - 1, self._latest - self._first, self.wait_s)

    def tell(self, now: float | None = None) -> None:
        """Report to the run; does nothing outside a job."""
        now = time.perf_counter() if now is None else now
        self._last = now
        if self.trains and self.batches > self._told:
            self._told = self.batches
            session.tell(
                "loader",
                rank=int(os.environ.get("RANK") or 0),
                loader=self.number,
                steps=self.batches,
                samples=self.batches * self.samples,
                wait_s=round(self.wait_s, 4),
                # What the script does after the last batch may have nothing to do with it.
                elapsed_s=round(self._latest - self._first, 4),
            )
