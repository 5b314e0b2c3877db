"""Laptop: loaders of one host that read the image files themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.loaders.work import BATCH, SIDE, WORKERS, files_of, pillow, transforms

Batches = Iterator[tuple[Any, Any]]


class Pillow(Dataset[Any]):
    """The common way: Pillow and torchvision, image by image."""

    def __init__(self, files: list[tuple[str, int]], on_tensors: bool) -> None:
        self.files, self.of = files, pillow(on_tensors)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.files[index]
        return self.of(Path(path).read_bytes()), label


def dataloader(folder: Path, on_tensors: bool = False) -> Batches:
    """PyTorch's DataLoader, Pillow and torchvision v2."""
    return iter(
        DataLoader(Pillow(files_of(folder), on_tensors), BATCH, shuffle=True, num_workers=WORKERS)
    )


class Ours(Dataset[Any]):
    """Stoker's chain in a DataLoader, batch by batch, which isolates the data path."""

    def __init__(self, files: list[tuple[str, int]]) -> None:
        from stoker.chain.chain import Chain
        from stoker.chain.entries import as_stages
        from stoker.chain.transforms import DecodeImage

        self.files = files
        self.chain = Chain(as_stages([DecodeImage(), *transforms()]), seed=0)

    def __len__(self) -> int:
        return len(self.files)

    def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
        records = []
        for index in indices:
            path, label = self.files[index]
            records.append({"key": path, "image": Path(path).read_bytes(), "label": label})
        columns, _ = self.chain.run(records, epoch=0)
        images = torch.from_numpy(np.ascontiguousarray(columns["image__hwc"])).permute(0, 3, 1, 2)
        return images, torch.from_numpy(np.asarray(columns["label"]))


def dataloader_ours(folder: Path) -> Batches:
    """PyTorch's DataLoader with Stoker's decode chain."""
    data = Ours(files_of(folder))
    return iter(
        DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=lambda batch: batch)
    )


def spdl(folder: Path) -> Batches:
    """SPDL's pipeline: threads of this process instead of worker processes; Pillow and torchvision v2.

    Its own decoders need the system's FFmpeg, and crop no random part of an image.
    """
    from spdl.pipeline import PipelineBuilder

    data = Pillow(files_of(folder), on_tensors=True)
    order = torch.randperm(len(data)).tolist()
    builder = PipelineBuilder().add_source(order).pipe(data.__getitem__, concurrency=WORKERS)
    pipeline = (
        builder.aggregate(BATCH).pipe(default_collate).add_sink(2).build(num_threads=WORKERS + 1)
    )
    with pipeline.auto_stop():
        yield from pipeline


def dali(folder: Path) -> Batches:
    """NVIDIA DALI on CPUs: fused decode and crop, resize, and flip in its own threads."""
    from nvidia.dali import fn, pipeline_def, types

    files = files_of(folder)

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None, prefetch_queue_depth=2)
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(
            files=[path for path, _ in files],
            labels=[label for _, label in files],
            random_shuffle=True,
            name="files",
            pad_last_batch=False,
        )
        images = fn.decoders.image_random_crop(
            encoded, device="cpu", random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        images = fn.resize(
            images,
            size=[SIDE, SIDE],
            interp_type=types.DALIInterpType.INTERP_LINEAR,
            antialias=True,
        )
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    built = pipeline()
    built.build()
    left = len(files)
    while left > 0:
        images, labels = built.run()
        count = min(left, len(labels))
        left -= count
        tensor = torch.from_numpy(np.array(images.as_array()[:count])).permute(0, 3, 1, 2)
        yield tensor, torch.from_numpy(np.array(labels.as_array()[:count, 0]))
