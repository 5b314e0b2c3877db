"""Hugging Face's Trainer with dropout, over a dataset of `datasets`: trainer.py map|stream."""

import sys

import datasets
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def tokenised(rows):
    return {
        "input_ids": [[ord(letter) % 50 for letter in text] for text in rows["text"]],
        "labels": rows["label"],
    }


table = datasets.Dataset.from_dict(
    {
        "text": [f"{number:08d} a sentence" for number in range(72)],
        "label": [number % 2 for number in range(72)],
    }
)
if sys.argv[1] == "map":
    training = table.with_transform(tokenised)
else:
    stream = table.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=16)
    training = stream.map(tokenised, batched=True, remove_columns=["text", "label"])
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
trainer = Trainer(
    model=BertForSequenceClassification(BertConfig(vocab_size=50, intermediate_size=16, **sizes)),
    args=TrainingArguments(
        output_dir="trained",
        max_steps=12,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
        dataloader_num_workers=2,
    ),
    train_dataset=training,
    eval_dataset=table.select(range(20)).with_transform(tokenised),
)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print("loss", entry["loss"], entry["grad_norm"])
print("loss", trainer.evaluate()["eval_loss"])
