"""A script of your own: plain PyTorch; one import differs from what it was."""

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import datasets, transforms

import stoker
from stoker import DataLoader  # was: from torch.utils.data import DataLoader

stages = [transforms.RandomAffine(10, (0.1, 0.1)), transforms.Resize(32), transforms.ToTensor()]
train = datasets.ImageFolder(".data/digits/images/train", transforms.Compose(stages))
loader = DataLoader(train, batch_size=32, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for _epoch in range(4):
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stoker.log({"loss": loss})
torch.save(model.state_dict(), stoker.checkpoint_dir() / "last.pt")
