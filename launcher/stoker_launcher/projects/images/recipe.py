"""Image classification with one folder per class: a custom chain on CPU hosts, a timm model on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from stoker.data import Record, RecordTransform
from stoker.image_classification import ImageClassification
from stoker.recipe import Split

FOLDER = Path(".data/signs")
COLOURS = {"go": (40, 190, 60), "stop": (200, 40, 40), "wait": (210, 190, 40)}


def write(folder: Path = FOLDER, records: int = 480) -> None:
    """Laptop: write PNG files to train/<class>/ and val/<class>/ unless the folder exists."""
    from PIL import Image

    if folder.exists():
        return
    rng, draft = np.random.default_rng(5), folder.with_suffix(".draft")
    for split, count in (("train", records), ("val", records // 4)):
        for number in range(count):
            name, colour = list(COLOURS.items())[number % len(COLOURS)]
            pixels = rng.integers(0, 256, (48, 48, 3))
            top, left = rng.integers(0, 24, 2)
            pixels[top : top + 24, left : left + 24] = rng.normal(colour, 25, (24, 24, 3)).clip(
                0, 255
            )
            (draft / split / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(draft / split / name / f"{number:05}.png")
    draft.rename(folder)


class Brighten(RecordTransform):
    """Chain worker: makes an image brighter or darker; `rng` is seeded for each record and epoch."""

    def __init__(self, most: float) -> None:
        self.most = most

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        factor = rng.uniform(1 - self.most, 1 + self.most)
        image = np.clip(record["image"] * factor, 0, 255).astype(np.uint8)
        return {**record, "image": image}


class Images(ImageClassification):
    """Every host: the built-in recipe with an extra stage. Fields are the job's `params`."""

    image_size: int = 32
    brightness: float = Field(
        0.2, ge=0, le=1, description="largest change of an image's brightness"
    )

    def preprocess(self, split: Split) -> list[Any]:
        decode, *crops = super().preprocess(split)
        own = [Brighten(self.brightness)] if split == "train" else []
        return [
            decode,
            *own,
            *crops,
        ]  # torchvision's transforms, the crops, turn NumPy arrays into tensors
