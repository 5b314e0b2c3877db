"""Small inputs whose epochs end with a batch of one record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from rows import Counting


def images_of(folder: Path, count: int) -> Path:
    draws = np.random.default_rng(0)
    for split, number in (("train", count), ("val", 3)):
        for i in range(number):
            path = folder / split / ("cat" if i % 2 else "dog") / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draws.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)
    return folder


class Normed(Counting):
    norm: str = "batch"
    val_records: int = 5

    def model(self):  # type: ignore[no-untyped-def]
        from torch import nn

        norms = {
            "batch": nn.BatchNorm1d(4),
            "sync": nn.SyncBatchNorm(4),
            "layer": nn.LayerNorm(4),
            "frozen": Frozen(4),
        }
        return nn.Sequential(nn.Linear(2, 4), norms[self.norm], nn.Linear(4, 1))


def Frozen(size: int):  # type: ignore[no-untyped-def]  # noqa: N802 - a layer
    from torch import nn

    class FrozenNorm(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> FrozenNorm:
            return super().train(False)

    return FrozenNorm(size)
