"""Your Lightning script, with batches prepared on every CPU of the cluster; it resumes within an epoch.

python train.py                       on this machine
stoker job.yaml --on sagemaker …      the same, on a cluster
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
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


class Network(lightning.LightningModule):  # type: ignore[misc]
    """Replace with your LightningModule."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if self.trainer.is_global_zero and self.global_step % 10 == 0:
            stoker.log(
                {"train/loss": loss.item(), "epoch": self.current_epoch + 1}, self.global_step
            )
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(loader: Any, folder: Path, steps: int, every: int = 20) -> Network:
    """Train from the last checkpoint in the folder, which includes the loader's position, if there is one."""
    model, last = Network(), folder / "last.ckpt"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # one rank per GPU, as under torchrun
    trainer = lightning.Trainer(
        max_epochs=-1,
        max_steps=steps,
        devices=local,
        num_nodes=int(os.environ.get("WORLD_SIZE", 1)) // local,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=every, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, loader, ckpt_path=str(last) if last.exists() else None)
    return model


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--records", type=int, default=2048)
    given = parser.parse_args(words)
    lightning.seed_everything(0)
    loader = stoker.DataLoader(Curve(given.records), batch_size=64, shuffle=True, num_workers=2)
    train(loader, stoker.checkpoint_dir(), given.steps)


if __name__ == "__main__":
    main()
