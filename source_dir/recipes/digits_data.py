"""Laptop: writes scikit-learn's handwritten digits as tar shards, Parquet and class folders."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

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
    import numpy as np
    from PIL import Image

    pixels = np.clip(image * 255 / 16, 0, 255).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC).save(content, "JPEG", quality=92)
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
