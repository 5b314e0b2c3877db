"""A loop of Hugging Face Accelerate's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
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


torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model: Any = nn.Linear(8, 3)
optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(Points(), batch_size=8, shuffle=True, num_workers=2)
)
losses = []
for _ in range(2):
    for points, labels in loader:
        loss = nn.functional.cross_entropy(model(points), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
used = f"{type(loader.base_dataloader).__module__}"
Path(sys.argv[2]).write_text(json.dumps({"losses": losses, "loader": used}))
