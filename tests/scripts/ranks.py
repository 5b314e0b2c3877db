"""Ranks under torchrun, each with its share of the records."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler

from stoker import DataLoader


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


dist.init_process_group("gloo")
sampler: DistributedSampler[Any] = DistributedSampler(Numbers())
loader = DataLoader(Numbers(), batch_size=7, sampler=sampler, num_workers=2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    found = torch.cat(list(loader))
    if found.tolist() != list(sampler):
        raise SystemExit(f"rank {dist.get_rank()}: {found}")
    everywhere = [torch.zeros_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, found)
    if set(torch.cat(everywhere).tolist()) != set(range(101)):
        raise SystemExit("not every record")
dist.destroy_process_group()
