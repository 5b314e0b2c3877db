"""Tones of varying length: CPU hosts compute spectrograms, a small network classifies the pitch."""

from __future__ import annotations

import io
import tarfile
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from stoker.data import Record, RecordTransform, read_webdataset
from stoker.recipe import Batch, Recipe, Split

if TYPE_CHECKING:
    from torch import Tensor, nn

FOLDER = Path(".data/tones")
RATE = 8000


def write(folder: Path = FOLDER, records: int = 800) -> None:
    """Laptop: write tar shards of WAV files, 0.1 to 0.5 s each, with low, middle and high tones."""
    rng = np.random.default_rng(13)
    for split, count in (("train", records), ("val", records // 4)):
        (folder / split).mkdir(parents=True, exist_ok=True)
        with tarfile.open(folder / split / "0.tar", "w") as tar:
            for i in range(count):
                label = int(rng.integers(3))
                time = np.arange(rng.integers(RATE // 10, RATE // 2)) / RATE
                pitch = (500, 1000, 2000)[label] * rng.uniform(0.75, 1.3)
                sound = 0.3 * np.sin(2 * np.pi * pitch * time) + rng.normal(0, 0.05, len(time))
                content = io.BytesIO()
                with wave.open(content, "wb") as file:
                    file.setparams((1, 2, RATE, 0, "NONE", ""))
                    file.writeframes((sound * 32767).astype("<i2").tobytes())
                for suffix, data in (("wav", content.getvalue()), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{i:05}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


class Spectrogram(RecordTransform):
    """Chain worker: a 16-bit WAV file → `frames`, its log power spectrogram, frames × bands."""

    random = False
    uses_random = False

    def __init__(self, bands: int) -> None:
        self.bands = bands

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        with wave.open(io.BytesIO(record["wav"])) as file:
            if (file.getsampwidth(), file.getnchannels(), file.getframerate()) != (2, 1, RATE):
                raise ValueError(f"not a 16-bit mono file at {RATE} Hz")
            count, size = file.getnframes(), 2 * self.bands
            content = file.readframes(count)
        samples = len(content) // 2
        if samples < count < 2**29:  # a stream has a higher number
            raise ValueError(f"truncated: {samples} of {count} samples are there")
        if samples < size:
            raise ValueError(f"too short: {samples} samples by its header, a window has {size}")
        sound = np.frombuffer(content, "<i2", samples).astype(np.float32) / 32768
        windows = np.lib.stride_tricks.sliding_window_view(sound, size)[:: size // 2] * np.hanning(
            size
        )
        power = np.abs(np.fft.rfft(windows)[:, 1:]) ** 2
        return {
            "key": record["key"],
            "frames": np.log10(power + 1e-6, dtype=np.float32),
            "label": record["label"],
        }


class Tones(Recipe):
    """Every host: trains convolutions over time on WAV files and labels from tar shards."""

    data: str
    bands: int = Field(64, ge=8, description="frequency bands of the spectrogram")
    classes: int = Field(3, ge=2, description="number of tone classes")

    pad = {"frames": 0.0}  # noqa: RUF012 - as recipes declare it

    def read(self, split: Split) -> Any:
        return read_webdataset(self.data, split, columns=["wav", "label"])

    def preprocess(self, split: Split) -> list[Any]:
        return [Spectrogram(self.bands)]

    def model(self) -> nn.Module:
        from torch import nn

        first, second = nn.Conv1d(self.bands, 64, 5, padding=2), nn.Conv1d(64, 64, 5, padding=2)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Conv1d(64, self.classes, 1))

    def training_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        import torch
        import torch.nn.functional as F

        every = model(batch["frames"].mT)
        there = torch.arange(every.shape[-1], device=every.device) < batch["frames_length"][:, None]
        preds = (every * there[:, None]).sum(-1) / batch["frames_length"][:, None]
        return {
            "loss": F.cross_entropy(preds, batch["label"]),
            "preds": preds,
            "target": batch["label"],
        }
