"""Recipes whose data does what flaky hosts and damaged records do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from rows import Counting, Numbers

from stoker.data import Record, RecordTransform


class Mischief(RecordTransform):
    """Kills its process at some records, always; hangs at one record, once."""

    random = False

    def __init__(self, kills: tuple[int, ...], hangs: int, folder: str) -> None:
        self.kills, self.hangs, self.folder = kills, hangs, folder

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        number = int(record["key"])
        if number in self.kills:
            with Path(self.folder, "deaths").open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.hangs and once(self.folder, "hung"):
            time.sleep(3600)
        return record


class FlakyNumbers(Numbers):
    def __init__(self, n: int, shard: int, flaky: int, folder: str) -> None:
        super().__init__(n, shard=shard)
        self.flaky, self.folder = flaky, folder

    def read(self, shard: Any, order: Any) -> Any:
        for record in super().read(shard, order):
            if record["key"] == str(self.flaky) and once(self.folder, "hiccup"):
                raise OSError(5, "Input/output error")
            yield record


class Faulty(Counting):
    folder: str
    kills: tuple[int, ...] = ()
    hangs: int = -1
    flaky: int = -1

    def read(self, split: str) -> Any:
        if split == "val":
            return Numbers(self.val_records)
        return FlakyNumbers(self.train_records, self.shard, self.flaky, self.folder)

    def preprocess(self, split: str) -> list[Any]:
        return [Mischief(self.kills, self.hangs, self.folder)] if split == "train" else []


def once(folder: str, what: str) -> bool:
    try:
        Path(folder, what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
