"""A Trainer of Hugging Face's, with a tiny model made from a configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

if sys.argv[1] == "stoker":
    import stoker

    stoker.replace_torch_loader()


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return {
            "input_ids": torch.randint(0, 50, (12,), generator=generator),
            "labels": torch.tensor(index % 2),
        }


torch.manual_seed(0)
shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
trainer = Trainer(
    model=BertForSequenceClassification(BertConfig(vocab_size=50, **shape)),
    args=TrainingArguments(
        output_dir=sys.argv[2] + ".trainer",
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
used = "stoker" if "stoker.loader.service" in sys.modules else "torch"
Path(sys.argv[2]).write_text(json.dumps({"losses": losses, "loader": used}))
