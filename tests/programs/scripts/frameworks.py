"""Lightning's and Hugging Face's trainers: one rebuilds its loaders, the other makes them itself."""

import lightning
import torch
from torch import nn
from torch.utils import data
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Points(data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 3


class Sentences(data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        words = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": torch.tensor(index % 2)}


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        print("loss", loss.item())
        return loss

    def validation_step(self, batch, index):
        self.training_step(batch, index)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


torch.manual_seed(0)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, **quiet).fit(
    Lit(),
    data.DataLoader(Points(), batch_size=8, shuffle=True, num_workers=2),
    data.DataLoader(Points(), batch_size=32, num_workers=2),
)
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
trainer = Trainer(
    model=BertForSequenceClassification(BertConfig(vocab_size=50, intermediate_size=16, **sizes)),
    args=TrainingArguments(
        output_dir="trainer",
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
for entry in trainer.state.log_history:
    if "loss" in entry:
        print("loss", entry["loss"])
print("loss", trainer.evaluate()["eval_loss"])
