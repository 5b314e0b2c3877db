"""Laptop: loaders with their own shard formats, written before the measurement."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.loaders.work import BATCH, WORKERS, files_of, pillow

Batches = Iterator[tuple[Any, Any]]
SHARD_RECORDS = 500


def write(folder: Path, mosaic_too: bool) -> None:
    """Write the images of a folder as tar shards (`folder/tars`) and MDS (`folder/mds`)."""
    files = files_of(folder)
    tars = folder / "tars"
    tars.mkdir()
    for first in range(0, len(files), SHARD_RECORDS):
        with tarfile.open(tars / f"{first // SHARD_RECORDS:05d}.tar", "w") as tar:
            for path, label in files[first : first + SHARD_RECORDS]:
                name = Path(path).stem
                for suffix, content in (
                    ("jpg", Path(path).read_bytes()),
                    ("cls", str(label).encode()),
                ):
                    member = tarfile.TarInfo(f"{name}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    if mosaic_too:
        from streaming import MDSWriter

        with MDSWriter(
            out=str(folder / "mds"), columns={"image": "bytes", "label": "int"}
        ) as writer:
            for path, label in files:
                writer.write({"image": Path(path).read_bytes(), "label": label})


def webdataset(folder: Path) -> Batches:
    """WebDataset under PyTorch's DataLoader, Pillow and torchvision v2."""
    import webdataset as wds

    of = pillow()
    tars = sorted(map(str, (folder / "tars").glob("*.tar")))
    data = (
        wds.WebDataset(tars, shardshuffle=len(tars), seed=0)
        .shuffle(256)
        .to_tuple("jpg", "cls")
        .map_tuple(of, int)
        .batched(BATCH)
    )
    return iter(wds.WebLoader(data, batch_size=None, num_workers=WORKERS))


def mosaic(folder: Path) -> Batches:
    """MosaicML Streaming under PyTorch's DataLoader, Pillow and torchvision v2."""
    from streaming import StreamingDataset

    of = pillow()

    class Images(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> tuple[Any, int]:
            record = super().__getitem__(at)
            return of(record["image"]), int(record["label"])

    data = Images(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
    return iter(DataLoader(data, BATCH, num_workers=WORKERS, multiprocessing_context="fork"))
