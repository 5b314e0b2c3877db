"""Loops of Accelerate, Lightning and Hugging Face, with torch's loaders and with ours, in one process.

    python frameworks.py FOLDER

writes FOLDER/losses.json: framework → loader → losses of each step, and whose loader the framework used.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import stoker

Found = dict[str, Any]


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 3


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return {
            "input_ids": torch.randint(0, 50, (12,), generator=generator),
            "labels": torch.tensor(index % 2),
        }


def accelerate(loaders: type[DataLoader[Any]]) -> Found:
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Linear(8, 3)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, loaders(Points(), batch_size=8, shuffle=True, num_workers=2)
    )
    losses = []
    for _ in range(2):
        for points, labels in loader:
            loss = nn.functional.cross_entropy(model(points), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "loader": type(loader.base_dataloader).__module__}


class Lit(lightning.LightningModule):
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


def lightnings(loaders: type[DataLoader[Any]]) -> Found:
    model = Lit()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, **quiet)
    loader = loaders(Points(), batch_size=8, shuffle=True, num_workers=2)
    trainer.fit(model, loader, loaders(Points(), batch_size=32, num_workers=2))
    return {"losses": model.losses, "loader": type(trainer.train_dataloader).__module__}


def huggingface(loaders: type[DataLoader[Any]]) -> Found:
    """Its Trainer makes its loaders itself, so ours comes in by replacing torch's."""
    if loaders is stoker.DataLoader:
        stoker.replace_torch_loader()
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    trainer = Trainer(
        model=BertForSequenceClassification(BertConfig(vocab_size=50, **shape)),
        args=TrainingArguments(
            output_dir=f"{sys.argv[1]}/trainer",
            num_train_epochs=2,
            per_device_train_batch_size=8,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            dataloader_num_workers=2,
        ),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    used: Any = trainer.callback_handler.train_dataloader
    return {"losses": losses, "loader": type(used.base_dataloader).__module__}


if __name__ == "__main__":
    found: dict[str, Found] = {}
    for train in (accelerate, lightnings, huggingface):  # the last one replaces torch's loader
        found[train.__name__] = {}
        for name, loaders in (("torch", DataLoader), ("stoker", stoker.DataLoader)):
            torch.manual_seed(0)
            found[train.__name__][name] = train(loaders)
    (Path(sys.argv[1]) / "losses.json").write_text(json.dumps(found))
