"""A job whose chain and training step sleep, with records of a configurable size."""

from __future__ import annotations

import time
from typing import Any

from stoker.data import read_range
from stoker.recipe import Recipe


class Asleep(Recipe):
    """Each record takes `cpu_s` seconds of a chain task and 1/`gpu_samples_per_s` of training, no CPU."""

    records: int
    cpu_s: float
    bytes_per_sample: int
    gpu_samples_per_s: float = 1e6

    def read(self, split: str) -> Any:
        return read_range(self.records) if split == "train" else None

    def preprocess(self, split: str) -> list[Any]:
        return [("sleep", Sleep(self.cpu_s, self.bytes_per_sample))]

    def model(self) -> Any:
        from torch import nn

        return nn.Linear(1, 1)

    def training_step(self, model: Any, batch: Any) -> Any:
        import torch

        time.sleep(len(batch["payload"]) / self.gpu_samples_per_s)
        return model(torch.ones(1, 1)).sum() ** 2


class Sleep:
    """Chain worker: a stage that sleeps `cpu_s` seconds per record."""

    def __init__(self, cpu_s: float, size: int) -> None:
        self.cpu_s, self.size = cpu_s, size

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        rows = len(columns["index"])
        time.sleep(self.cpu_s * rows)
        return {**columns, "payload": np.zeros((rows, self.size), dtype=np.uint8)}
