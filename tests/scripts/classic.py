"""A classic training script: timm model, real images, AMP, schedule, a validation of its own, checkpoints.

Where `--loader stoker` is given, one import is another; nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
from pathlib import Path

import timm
import torch
from torch import nn
from torchvision import transforms
from torchvision.datasets import ImageFolder

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--loader", choices=["torch", "stoker"], default="torch")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--die-after", type=int, default=-1)
options = parser.parse_args()

if options.loader == "torch":
    from torch.utils.data import DataLoader
else:
    from stoker import DataLoader

torch.manual_seed(0)
random.seed(0)
torch.set_num_threads(1)
chain = transforms.Compose(
    [transforms.Resize(32), transforms.ToTensor(), transforms.Normalize([0.5], [0.5])]
)
train = ImageFolder(options.data / "train", chain)
val = ImageFolder(options.data / "val", chain)
train.samples, val.samples = train.samples[::5], val.samples[::4]  # some of each class
loader = DataLoader(train, batch_size=32, shuffle=True, num_workers=2, drop_last=True)
val_loader = DataLoader(val, batch_size=64, num_workers=2)
model = timm.create_model("test_resnet", num_classes=10)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, options.epochs * len(loader))
losses: list[float] = []
epoch = 0

checkpoint = options.out / "last.pt"
if checkpoint.exists():
    state = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    losses, epoch = state["losses"], state["epoch"]
    loader.load_state_dict(state["loader"])
    torch.set_rng_state(state["rng"])
    random.setstate(state["random"])


def save() -> None:
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "losses": losses,
        "epoch": epoch,
        "loader": loader.state_dict(),
        "rng": torch.get_rng_state(),
        "random": random.getstate(),
    }
    torch.save(state, checkpoint.with_suffix(".new"))
    checkpoint.with_suffix(".new").rename(checkpoint)


while epoch < options.epochs:
    model.train()
    for images, labels in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if len(losses) == options.die_after:
            save()
            os.kill(os.getpid(), signal.SIGKILL)
    model.eval()
    with torch.no_grad():
        right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in val_loader)
    losses += [right / len(val), random.random()]
    epoch += 1

(options.out / "losses.json").write_text(json.dumps(losses))
