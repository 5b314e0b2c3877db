"""A training job that consumes batches as fast as they arrive, at almost no cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.loaders.work import Consumer, transforms
from stoker.data import DecodeImage, read_images
from stoker.recipe import Recipe


class Images(Recipe):
    """The same transform and consumer as the other loaders."""

    data: str
    out: str
    """Output file for the consumer's statistics."""
    total: int

    def read(self, split: str) -> Any:
        return read_images(self.data, "train") if split == "train" else None

    def preprocess(self, split: str) -> list[Any]:
        return [DecodeImage(), *transforms()]

    def model(self) -> Any:
        import torch

        model = torch.nn.Linear(1, 1)
        model.consumer = Consumer(self.total)
        return model

    def training_step(self, model: Any, batch: Any) -> Any:
        import torch

        consumer = model.consumer
        consumer.take(batch["image"], batch["label"])
        if consumer.rows == self.total:
            consumer.write(Path(self.out))
        return model(torch.ones(1, 1)).sum()
