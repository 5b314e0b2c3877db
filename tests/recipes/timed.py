"""Numbered records that take their time, to see where and when they are preprocessed."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data import Record, RecordTransform, Shard, Source, cut_indices, read_range
from stoker.recipe import Recipe


class Takes(RecordTransform):
    """Sleeps for each record and gives it `kb` of payload and a tail of 0 to 4 numbers.

    One of them is as slow as many others together.
    """

    def __init__(
        self, ms: float, slow: int, slow_until: int, count: str, kb: int, random: bool, meet: str
    ) -> None:
        self.ms, self.slow, self.slow_until, self.count = ms, slow, slow_until, count
        self.kb, self.random, self.meet = kb, random, meet

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        if self.meet:
            wait_for_all_hosts(Path(self.meet))
            self.meet = ""
        time.sleep(self.ms / 1000)
        if record["index"] == self.slow:
            while Path(self.count).stat().st_size < self.slow_until:
                time.sleep(0.05)
        elif self.count:
            with Path(self.count).open("ab") as file:
                file.write(b".")
        index = record["index"]
        return {
            **record,
            "x": np.full(self.kb * 1024, index % 251, np.uint8),
            "tail": np.full(index % 5, index),
        }


def wait_for_all_hosts(folder: Path) -> None:
    import ray

    own = folder / ray.get_runtime_context().get_node_id()
    if own.exists():  # not where only the first records are tried
        (own / "begun").touch()
        while not all((host / "begun").exists() for host in folder.iterdir()):
            time.sleep(0.05)


class Timed(Recipe):
    records: int
    ms: float = 0.0
    slow: int = -1
    slow_until: int = 0
    """The slow one takes until so many others are done."""
    count: str = ""
    """A file that counts them."""
    kb: int = 0
    random: bool = True
    meet: str = ""
    """A folder with one for each of some nodes; no record is made there before all of them have begun."""

    pad = {"tail": -1}  # noqa: RUF012 - as recipes declare it

    def read(self, split: str) -> Any:
        return read_range(self.records) if split == "train" else None

    def preprocess(self, split: str) -> list[Any]:
        return [
            Takes(self.ms, self.slow, self.slow_until, self.count, self.kb, self.random, self.meet)
        ]


class Range(Source):
    """Numbered records in shards of so many; from some moment on each shard cannot be read once."""

    random = False

    def __init__(self, records: int, shard: int, failed: str) -> None:
        self.records, self.shard, self.failed = records, shard, failed

    def count(self) -> int:
        return self.records

    def shards(self, records: int, order: Any) -> list[Shard]:
        return cut_indices(self.records, self.shard, order)

    def read(self, shard: Shard, order: Any) -> Any:
        failed = Path(self.failed) / str(shard.items[0])
        if self.failed and failed.parent.exists() and not failed.exists():
            failed.touch()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        for index in shard.items:
            yield {"key": str(index), "index": index}


class Long(Timed):
    shard: int
    """Records of a shard, which may be several blocks."""
    failed: str = ""
    """A folder; once it exists, each shard cannot be read once."""

    def read(self, split: str) -> Any:
        return Range(self.records, self.shard, self.failed) if split == "train" else None
