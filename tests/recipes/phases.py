"""A job by sleeping, whose training is as fast as a file says, so its need for CPUs changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data import Record, RecordTransform, read_range
from stoker.recipe import Recipe


class Sleeps(RecordTransform):
    def __init__(self, ms: float, kb: int) -> None:
        self.ms, self.kb = ms, kb

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        time.sleep(self.ms / 1000)
        return {"key": record["key"], "x": np.full(self.kb * 1024, record["index"] % 7, np.uint8)}


class Phases(Recipe):
    records: int
    ms: float
    """Of a chain worker for a record."""
    kb: int
    """Payload of a record: blocks of large ones are not held ready for long."""
    pace: str
    """A file with the ms of a training step."""

    def read(self, split: str) -> Any:
        return read_range(self.records) if split == "train" else None

    def preprocess(self, split: str) -> list[Any]:
        return [Sleeps(self.ms, self.kb)]

    def model(self) -> Any:
        from torch import nn

        return nn.Linear(1, 1)

    def training_step(self, model: Any, batch: Any) -> Any:
        time.sleep(float(Path(self.pace).read_text()) / 1000)
        return model(batch["x"][:, :1].float()).square().mean()
