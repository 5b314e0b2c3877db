"""A LightningModule as its author wrote it, with no word of Stoker in it."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torchmetrics.classification import MulticlassAccuracy


class Counter(pl.Callback):
    """A callback of the module's own."""

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.log("val_callback", float(trainer.current_epoch))


class LitDigits(pl.LightningModule):
    def __init__(self, hidden: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.LazyLinear(hidden) if hidden < 0 else torch.nn.Linear(3 * 32 * 32, hidden),
            torch.nn.BatchNorm1d(hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        scores = self(x)
        self.accuracy(scores, y)
        self.log("val_loss", F.cross_entropy(scores, y), sync_dist=True)
        self.log("val_acc1", self.accuracy)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def configure_callbacks(self) -> list[pl.Callback]:
        return [Counter()]
