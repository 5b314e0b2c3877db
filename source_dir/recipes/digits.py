"""Handwritten digits of scikit-learn: the built-in recipe with a custom chain and a small network."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.data import CheckLabel, DecodeImage, Record, RecordTransform
from stoker.image_classification import ImageClassification
from stoker.recipe import Split

if TYPE_CHECKING:
    from torch import nn


FOLDER = Path(".data/digits")
SHARD_RECORDS = 240


def write(folder: Path = FOLDER) -> None:
    """Laptop: write webdataset/, parquet/ and images/, each with train/ and val/, unless they exist.

    The 1,797 digits of 8×8 pixels are enlarged to 32×32 JPEGs; every fifth is for validation.
    """
    if (folder / "complete").is_file():
        return
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RuntimeError("the digits come with scikit-learn: pip install scikit-learn") from None
    digits = load_digits()
    splits: dict[str, list[tuple[str, bytes, int]]] = {"train": [], "val": []}
    for i, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        splits["val" if i % 5 == 0 else "train"].append((f"{i:04d}", _jpeg(image), int(label)))
    for split, rows in splits.items():
        _write_shards(folder / "webdataset" / split, rows)
        _write_parquet(folder / "parquet" / split, rows)
        _write_images(folder / "images" / split, rows)
    (folder / "complete").touch()


def _jpeg(image: Any) -> bytes:
    from PIL import Image

    pixels = np.clip(image * 255 / 16, 0, 255).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC).save(
        content, "JPEG", quality=92
    )
    return content.getvalue()


def _write_shards(folder: Path, rows: list[tuple[str, bytes, int]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(rows), SHARD_RECORDS):
        with tarfile.open(folder / f"shard-{start // SHARD_RECORDS:04d}.tar", "w") as tar:
            for name, content, label in rows[start : start + SHARD_RECORDS]:
                for suffix, data in (("jpg", content), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{name}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def _write_parquet(folder: Path, rows: list[tuple[str, bytes, int]]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": [r[1] for r in rows], "label": [r[2] for r in rows]})
    parquet.write_table(
        table, folder / "digits.parquet", row_group_size=SHARD_RECORDS, write_page_checksum=True
    )


def _write_images(folder: Path, rows: list[tuple[str, bytes, int]]) -> None:
    for name, content, label in rows:
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        (folder / str(label) / f"{name}.jpg").write_bytes(content)


class Jiggle(RecordTransform):
    """Chain worker: rotates, shifts and scales an image slightly, at random per record and epoch.

    Uses OpenCV. torchvision transforms work as well, but then every chain worker imports torch and
    torchvision, which adds seconds to each start.
    """

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        import cv2

        image = record["image"]
        height, width = image.shape[:2]
        angle, scale = rng.uniform(-8, 8), rng.uniform(0.9, 1.1)
        matrix = cv2.getRotationMatrix2D((width / 2, height / 2), angle, scale)
        matrix[:, 2] += rng.uniform(-2, 2, size=2)
        return {**record, "image": cv2.warpAffine(image, matrix, (width, height))[..., None]}


class Digits(ImageClassification):
    """Greyscale 32×32 images of ten digits, from tar shards, Parquet or class folders."""

    num_classes: int | None = 10
    image_size: int = 32
    color: str = "L"  # type: ignore[assignment]

    def preprocess(self, split: Split) -> list[Any]:
        chain: list[Any] = [DecodeImage("L"), CheckLabel(10)]
        return [*chain, Jiggle()] if split == "train" else chain

    def model(self) -> nn.Module:
        from torch import nn

        def block(inputs: int, outputs: int) -> list[nn.Module]:
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

        return nn.Sequential(
            *block(1, 16), *block(16, 32), *block(32, 64), nn.Flatten(), nn.Linear(64 * 16, 10)
        )
