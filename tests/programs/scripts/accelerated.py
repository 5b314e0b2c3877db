"""A loop with Accelerate: accelerated.py map|shard|dispatch, the last two over an iterable dataset."""

import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


def point(number):
    return torch.randn(8, generator=torch.Generator().manual_seed(number)), number % 3


class Points(Dataset):
    def __len__(self):
        return 90

    def __getitem__(self, index):
        return point(index)


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from map(point, range(first, 90, step))


mode = sys.argv[1]
accelerator = Accelerator(
    cpu=True,
    dataloader_config=DataLoaderConfiguration(dispatch_batches=mode == "dispatch"),
)
torch.manual_seed(0)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
dataset = Points() if mode == "map" else Stream()
loader = DataLoader(dataset, batch_size=8, shuffle=mode == "map", num_workers=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _epoch in range(2):
    for points, labels in loader:
        loss = nn.functional.cross_entropy(model(points), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
accelerator.end_training()
