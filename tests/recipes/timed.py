"""Numbered records that take their time, to see where and when they are preprocessed."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from stoker.data import Record, RecordTransform, read_range
from stoker.recipe import Recipe


class Takes(RecordTransform):
    """Sleeps for each record, longer for one of them, and gives it `kb` of payload."""

    def __init__(self, ms: float, slow: int, slow_s: float, kb: int, random: bool) -> None:
        self.ms, self.slow, self.slow_s, self.kb, self.random = ms, slow, slow_s, kb, random

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        time.sleep(self.slow_s if record["index"] == self.slow else self.ms / 1000)
        return {**record, "x": np.full(self.kb * 1024, record["index"] % 251, np.uint8)}


class Timed(Recipe):
    records: int
    ms: float = 0.0
    slow: int = -1
    slow_s: float = 0.0
    kb: int = 0
    random: bool = True

    def read(self, split: str) -> Any:
        return read_range(self.records) if split == "train" else None

    def preprocess(self, split: str) -> list[Any]:
        return [Takes(self.ms, self.slow, self.slow_s, self.kb, self.random)]
