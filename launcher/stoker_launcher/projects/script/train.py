"""Your training script: plain PyTorch, with batches prepared on every CPU of the cluster.

python train.py                       on this machine
stoker job.yaml --on sagemaker …      the same, on a cluster
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import stoker


class Curve(Dataset[tuple[Tensor, Tensor]]):
    """Replace with any map-style dataset; this one samples a noisy sine."""

    def __init__(self, records: int) -> None:
        self.records = records

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = 6 * torch.rand(1, generator=generator) - 3
        return x, torch.sin(x) + 0.05 * torch.randn(1, generator=generator)


def train(loader: Any, model: nn.Module, epochs: int, lr: float) -> float:
    """Returns: the last epoch's mean loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    step, mean = 0, float("nan")
    for epoch in range(epochs):
        losses = []
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            step += 1
        mean = sum(losses) / len(losses)
        stoker.log({"train/loss": mean, "epoch": epoch + 1}, step)
    return mean


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--records", type=int, default=2048)
    given = parser.parse_args(words)
    torch.manual_seed(0)
    model = network()
    loader = stoker.DataLoader(Curve(given.records), batch_size=64, shuffle=True, num_workers=2)
    train(loader, model, given.epochs, given.lr)
    torch.save(model.state_dict(), stoker.checkpoint_dir() / "model.pt")


if __name__ == "__main__":
    main()
