"""A small model and recipe, and one optimiser step after the other, for tests of the training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stoker.config.schema import Config
from stoker.recipe import Recipe
from stoker.train import strategies
from stoker.train.build import build
from stoker.train.state import Worker
from stoker.train.step import Step, windows

EVERYTHING: dict[str, Any] = {
    "optimizer": "adamw",
    "lr": 0.01,
    "weight_decay": 0.05,
    "scheduler": "cosine",
    "warmup_epochs": 1,
    "epochs": 3,
    "clip_grad_norm": 0.4,
    "label_smoothing": 0.1,
    "ema_decay": 0.8,
    "layer_decay": 0.7,
}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(32, 48, 3, padding=1), nn.GELU(), nn.Conv2d(48, 32, 3, padding=1)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        return {"stem": r"^stem", "blocks": r"^blocks\.(\d+)"}


class Tiny(Recipe):
    num_classes: int = 5
    explode: bool = False

    def model(self) -> Any:
        return Blocks()

    def on_device(self, split: str) -> Any:
        return Explode() if self.explode else None


class Explode(nn.Module):
    """The second batch of rank 1 alone makes gradients that fp16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, batch: Any) -> Any:
        import torch.distributed as dist

        self.calls += 1
        factor = 1e30 if self.calls == 2 and dist.is_initialized() and dist.get_rank() == 1 else 1.0
        return {**batch, "image": batch["image"] * factor}


def make(
    rank: int = 0, world: int = 1, explode: bool = False, recipe: type[Tiny] = Tiny, **train: Any
) -> tuple[Worker, Step]:
    config = Config.model_validate({"seed": 3, "train": train})
    worker = Worker(config, recipe(explode=explode), None, 0, rank, world, torch.device("cpu"))
    build(worker, records=3 * 8)
    return worker, Step(worker)


def records(count: int) -> tuple[Any, Any]:
    source = torch.Generator().manual_seed(5)
    return torch.randn(count, 1, 8, 8, generator=source), torch.randint(
        5, (count,), generator=source
    )


def feed(count: int, batch: int, rank: int = 0, world: int = 1) -> list[Any]:
    """What each rank gets of `count` records: `batch` per step, the rest shared evenly."""
    image, label = records(count)
    batches = []
    for first in range(0, count, batch * world):
        each = min(batch, (count - first) // world)
        own = slice(first + rank * each, first + (rank + 1) * each)
        batches.append({"image": image[own], "label": label[own]})
    return batches


def run(worker: Worker, step: Step, batches: list[Any], epochs: int = 2) -> dict[str, Any]:
    import torch.distributed as dist

    losses, norms, rates = [], [], []
    for epoch in range(epochs):
        if epoch:
            worker.schedule.begin(epoch, 0, worker.step)
        for window in windows(batches, worker.config.train.accumulate_steps):
            for batch in window:
                step.accumulate(batch)
            step.update()
            loss = step.loss.clone()
            if worker.world_size > 1:
                dist.all_reduce(loss)
            losses.append(float(loss) / worker.world_size)
            norms.append(None if step.grad_norm is None else float(step.grad_norm))
            rates.append([group["lr"] for group in worker.optimizer.param_groups])
    averaged = (
        strategies.Copier().copy(strategies.full_state(worker.ema.module, None))[0]
        if worker.ema
        else {}
    )
    return {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "weights": strategies.Copier().copy(strategies.full_state(worker.model, None))[0],
        "ema": averaged,
        "steps": (worker.step, worker.feed_step),
    }


def assert_same(found: Any, expected: Any, tolerance: float) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["norms"] == pytest.approx(expected["norms"], rel=10 * tolerance)
    assert found["rates"] == expected["rates"]
    for kind in ("weights", "ema"):
        assert found[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            torch.testing.assert_close(found[kind][name], value, rtol=tolerance, atol=tolerance)
