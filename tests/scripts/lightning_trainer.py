"""A Trainer of Lightning's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import Dataset

if sys.argv[1] == "torch":
    from torch.utils.data import DataLoader
else:
    from stoker import DataLoader


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 3


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.losses.append(nn.functional.cross_entropy(self.layer(batch[0]), batch[1]).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


torch.manual_seed(0)
model = Model()
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
loader = DataLoader(Points(), batch_size=8, shuffle=True, num_workers=2)
trainer.fit(model, loader, DataLoader(Points(), batch_size=32, num_workers=2))
used = type(trainer.train_dataloader).__module__
Path(sys.argv[2]).write_text(json.dumps({"losses": model.losses, "loader": used}))
