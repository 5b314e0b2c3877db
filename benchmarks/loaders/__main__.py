"""Laptop: runs a loader in this process: `python -m benchmarks.loaders NAME FOLDER OUT`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

from benchmarks.loaders import local, ray_data, shards
from benchmarks.loaders.work import consume, files_of

LOADERS = {
    "dataloader": local.dataloader,
    "dataloader_tensors": partial(local.dataloader, on_tensors=True),
    "dataloader_ours": local.dataloader_ours,
    "dali": local.dali,
    "spdl": local.spdl,
    "webdataset": shards.webdataset,
    "mosaic": shards.mosaic,
    "ray_data": ray_data.stock,
    "ray_float32": ray_data.float32,
}

if __name__ == "__main__":
    name, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    loader = LOADERS[name]
    if name.startswith("ray"):
        loader(folder, out)
    else:
        files = files_of(folder)
        consume(loader(folder), len(files), out)
