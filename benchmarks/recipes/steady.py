"""A training job of equal steps that records wall and CPU time at each step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from stoker.data import read_range
from stoker.recipe import Recipe

IMAGES = 8


class Steady(Recipe):
    """A ResNet-18 (11.7 million weights and as many momenta: 94 MB per checkpoint) on repeated images."""

    clock: str
    """Output file for `step wall_s cpu_s` at the start of each step."""
    steps: int
    side: int = 96

    def read(self, split: str) -> Any:
        return read_range(self.steps * IMAGES) if split == "train" else None

    def model(self) -> Any:
        import timm

        return timm.create_model("resnet18", num_classes=10)

    def training_step(self, model: Any, batch: Any) -> Any:
        import torch
        import torch.nn.functional as F

        with Path(self.clock).open("a") as file:
            file.write(f"{time.perf_counter()} {time.process_time()}\n")
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(IMAGES, 3, self.side, self.side, generator=generator)
        return F.cross_entropy(model(images), torch.arange(IMAGES) % 10)
