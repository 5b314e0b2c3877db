"""Your training script: plain PyTorch, with batches prepared on every CPU of the cluster.

python train.py                            on this machine
torchrun --nproc-per-node 2 train.py       on two of its GPUs
stoker job.yaml --on sagemaker …           on a cluster, one process per GPU
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

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
    """Returns: the last epoch's mean loss, of this process's batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    device = next(model.parameters()).device
    step, mean = 0, float("nan")
    for epoch in range(epochs):
        losses = []
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)  # another order in each epoch
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
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
    data, rank = Curve(given.records), int(os.environ.get("RANK", 0))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else "cpu"
    model: nn.Module = network().to(device)
    whole = model
    sampler: DistributedSampler[Any] | None = None
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # each process trains its share of the data
        distributed.init_process_group("nccl" if cuda else "gloo")
        model, sampler = DistributedDataParallel(model), DistributedSampler(data)
    loader = stoker.DataLoader(
        data, batch_size=64, shuffle=sampler is None, sampler=sampler, num_workers=2
    )
    train(loader, model, given.epochs, given.lr)
    if rank == 0:
        torch.save(whole.state_dict(), stoker.checkpoint_dir() / "model.pt")
    if sampler is not None:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
