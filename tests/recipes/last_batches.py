"""A small model with a normalisation of its outputs."""

from __future__ import annotations

from rows import Counting


class Normed(Counting):
    norm: str = "batch"

    def model(self):  # type: ignore[no-untyped-def]
        from torch import nn

        norm = nn.BatchNorm1d(4) if self.norm == "batch" else nn.LayerNorm(4)
        return nn.Sequential(nn.Linear(2, 4), norm, nn.Linear(4, 1))
