"""Squares that move: CPU hosts decode clips of video files, a small network tells which way they go."""

from __future__ import annotations

import io
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from stoker.data import DecodeVideo, read_webdataset
from stoker.recipe import Batch, Recipe, Split

if TYPE_CHECKING:
    from torch import Tensor, nn

FOLDER = Path(".data/motion")
SHARD_RECORDS = 100
DIRECTIONS = [(0, 1), (0, -1), (1, 0), (-1, 0)]
"""Right, left, down, up, as rows and columns; a single frame does not tell."""


def write(folder: Path = FOLDER, records: int = 600) -> None:
    """Laptop: make `folder` with tar shards of MP4 files, 48 × 64, 12 to 25 frames/s, of four kinds."""
    rng = np.random.default_rng(17)
    for split, count in (("train", records), ("val", records // 4)):
        (folder / split).mkdir(parents=True, exist_ok=True)
        for first in range(0, count, SHARD_RECORDS):
            with tarfile.open(folder / split / f"{first:05}.tar", "w") as tar:
                for i in range(first, min(first + SHARD_RECORDS, count)):
                    label, rate = int(rng.integers(4)), int(rng.choice([12, 15, 24, 25]))
                    content = movie(rng, DIRECTIONS[label], rate)
                    for suffix, data in (("mp4", content), ("cls", str(label).encode())):
                        member = tarfile.TarInfo(f"{i:05}.{suffix}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))


def movie(rng: np.random.Generator, direction: tuple[int, int], rate: int) -> bytes:
    """Laptop: an MP4 file of 1 to 1.6 s: a square on rough ground that moves 30 to 60 pixels a second."""
    import av

    rough = rng.integers(0, 100, 3) + rng.normal(0, 10, (48, 64, 3))
    ground = np.clip(rough, 0, 255).astype(np.uint8)
    place, size = rng.integers(0, (48, 64)), int(rng.integers(8, 16))
    colour = rng.integers(150, 256, 3)
    speed, content = np.array(direction) * rng.uniform(30, 60) / rate, io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate, options={"g": "12"})
        stream.height, stream.width, stream.bit_rate = 48, 64, 400_000
        stream.codec_context.thread_count = 1
        for i in range(int(rng.uniform(1, 1.6) * rate)):
            pixels, (row, column) = ground.copy(), (place + i * speed).astype(int)
            rows, columns = (row + np.arange(size)) % 48, (column + np.arange(size)) % 64
            pixels[rows[:, None], columns] = colour
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return content.getvalue()


class Motion(Recipe):
    """Every host: MP4 files and labels from tar shards → convolutions over time and space."""

    data: str
    classes: int = Field(4, ge=2, description="kinds of motion")
    frames: int = Field(8, ge=2, description="frames of a clip")
    rate: float = Field(
        10.0, gt=0, description="frames per second of a clip, whatever the file's rate"
    )
    size: int = Field(32, ge=16, description="height and width of the frames, pixels")
    width: int = Field(16, ge=4, description="channels of the first layer")

    def read(self, split: Split) -> Any:
        return read_webdataset(self.data, split, columns=["mp4", "label"])

    def preprocess(self, split: Split) -> list[Any]:
        start: Literal["random", "centre"] = "random" if split == "train" else "centre"
        return [DecodeVideo(self.frames, self.rate, start, (self.size, self.size))]

    def model(self) -> nn.Module:
        from torch import nn

        layers: list[nn.Module] = []
        widths = 3, self.width, 2 * self.width, 2 * self.width
        for inputs, outputs in pairwise(widths):
            layers += [
                nn.Conv3d(inputs, outputs, 3, stride=(1, 2, 2), padding=1),
                nn.BatchNorm3d(outputs),
            ]
            layers += [nn.ReLU()]
        layers += [nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2 * self.width, self.classes)]
        return nn.Sequential(*layers)

    def training_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        import torch.nn.functional as F

        preds = model(batch["video"].permute(0, 4, 1, 2, 3).float() / 128 - 1)
        return {
            "loss": F.cross_entropy(preds, batch["label"]),
            "preds": preds,
            "target": batch["label"],
        }
