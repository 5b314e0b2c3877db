"""A `ray.data.Dataset` and a chain that take known CPU time for each record."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from stoker.data import Record, RecordTransform
from stoker.recipe import Recipe


def work(ms: float) -> None:
    ends = time.process_time() + ms / 1000
    while time.process_time() < ends:
        pass


class Busy:
    def __init__(self, ms: float) -> None:
        self.ms = ms

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        work(self.ms)
        return row


class BusyStage(RecordTransform):
    random = False

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        work(self.ms)
        return {**record, "x": np.zeros(1024, np.uint8)}


class Worked(Recipe):
    records: int
    dataset_ms: float
    chain_ms: float

    def read(self, split: str) -> Any:
        import ray

        if split == "val":
            return None
        return ray.data.range(self.records, override_num_blocks=self.records // 20).map(
            Busy(self.dataset_ms)
        )

    def preprocess(self, split: str) -> list[Any]:
        return [BusyStage(self.chain_ms)]

    def model(self) -> Any:
        from torch import nn

        return nn.Linear(1, 1)

    def training_step(self, model: Any, batch: Any) -> Any:
        import torch

        return model(torch.ones(1, 1)).sum() ** 2
