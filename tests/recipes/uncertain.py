"""Numbered records whose source does not know how many there are, gives others, or gives one late."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rows import Counting, Numbers


class Uncounted(Numbers):
    def count(self) -> int | None:  # type: ignore[override]
        return None


class Unknown(Counting):
    first_bad: int = 0

    def read(self, split: str) -> Any:
        return (
            Uncounted(self.train_records, tuple(range(self.first_bad)))
            if split == "train"
            else None
        )


class Miscounted(Numbers):
    more: int

    def read(self, shard: Any, order: Any) -> Any:
        found = list(super().read(shard, order))
        if self.n - 1 in shard.items:
            found = found[:-1] if self.more < 0 else [*found, found[-1] | {"key": "uncounted"}]
        yield from found


class Short(Counting):
    more: int = -1

    def read(self, split: str) -> Any:
        if split == "val":
            return super().read(split)
        source = Miscounted(self.train_records, bad=(3,))
        source.more = self.more
        return source


class Late(Numbers):
    """Record 8 comes `pause_s` after a train worker has made its optimizer, shortly before its first step."""

    ready: Path
    pause_s: float

    def read(self, shard: Any, order: Any) -> Any:
        for record in super().read(shard, order):
            if record["key"] == "8":
                for _ in range(6000):
                    if self.ready.exists():
                        break
                    time.sleep(0.1)
                time.sleep(self.pause_s)
            yield record


class FirstLate(Counting):
    """`data` is a folder. Steps last, so that later batches are ready whatever else the machine does."""

    pause_s: float
    step_s: float

    def training_step(self, model: Any, batch: Any) -> Any:
        time.sleep(self.step_s)
        return super().training_step(model, batch)

    def read(self, split: str) -> Any:
        if split == "val":
            return None
        source = Late(self.train_records)
        source.ready, source.pause_s = Path(self.data) / "ready", self.pause_s
        return source

    def optimizer(self, model: Any) -> Any:
        (Path(self.data) / "ready").touch()
