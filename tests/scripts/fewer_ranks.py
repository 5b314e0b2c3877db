"""A rank under torchrun that continues a pass: how FOLDER STEPS, where rank 0 saves and all ranks load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DistributedSampler, IterableDataset

from stoker import DataLoader


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from range(100)


def loader_of(how: str) -> Any:
    if how == "sampler":
        dist.init_process_group("gloo")
        return DataLoader(range(100), batch_size=3, sampler=DistributedSampler(range(100)))  # type: ignore[arg-type]
    dispatches = how == "dispatch"
    given: Any = Stream() if dispatches else range(100)
    config = DataLoaderConfiguration(
        dispatch_batches=dispatches, use_seedable_sampler=True, data_seed=1
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    return accelerator.prepare(DataLoader(given, batch_size=3, shuffle=not dispatches))


if __name__ == "__main__":
    how, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    loader, found = loader_of(how), []
    if (folder / "state.pt").exists():
        loader.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    for step, batch in enumerate(loader, 1):
        found += batch.tolist()
        if step == steps:
            break
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(loader.state_dict(), folder / "state.pt")
    number = len(list(folder.glob("*.json")))
    dist.barrier()
    (folder / f"{number}-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
