"""Data on disk as users write it, and ways of spoiling it."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from damage import tar_of
from PIL import Image
from pyarrow import parquet

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
Make = Callable[[Path], Any]
"""Writes data below a folder; may return another address than the folder's."""


def encoded(form: str = "JPEG", image: Image.Image = PHOTO, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, form, **options)
    return content.getvalue()


def of(pixels: Any, form: str = "TIFF") -> bytes:
    return encoded(form, Image.fromarray(pixels))


JPG, PNG = encoded(), encoded("PNG")
HEIC = b"\0\0\0\x18ftypheic" + bytes(20)
FLAT = np.full((30, 40), 3)


def images(
    *files: tuple[str, bytes] | str, splits: str = "train", classes: str = "cat dog"
) -> Make:
    def make(root: Path) -> None:
        photos = [
            (f"{s}/{c}/{i}.jpg", JPG) for s in splits.split() for c in classes.split() for i in "01"
        ]
        for name, content in (*photos, *((f, JPG) if isinstance(f, str) else f for f in files)):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)

    return make


def and_then(first: Make, then: Callable[[Path], object]) -> Make:
    def make(root: Path) -> Any:
        first(root)
        found = then(root)
        return found if isinstance(found, str) else None

    return make


def linked(name: str, target: str) -> Make:
    return and_then(images(), lambda root: (root / name).symlink_to(target))


def latin(name: bytes) -> Make:
    """Images, and an empty file or folder whose name is not UTF-8."""

    def spoil(root: Path) -> None:
        path = Path(os.fsdecode(os.fsencode(root) + b"/" + name))
        path.mkdir() if name.endswith(b"/") else path.touch()

    return and_then(images(), spoil)


def at(name: str, make: Make) -> Make:
    """The data's address is a file or folder inside."""
    return and_then(make, lambda root: f"{root}/{name}")


def one(content: bytes) -> Make:
    return images(("train/dog/x.jpg", content))


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]


def bomb() -> bytes:
    """A PNG whose header announces 40,000 × 40,000 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    return (
        PNG[:8] + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + PNG[33:]
    )


def table(name: str = "train-0.parquet", change: Any = bytes, **columns: Any) -> Make:
    def make(root: Path) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        cells = {"image": [JPG] * 3, "label": [0, 1, 2], **columns}
        parquet.write_table(
            pa.table({k: v for k, v in cells.items() if v is not None}),
            path,
            row_group_size=2,
        )
        path.write_bytes(change(path.read_bytes()))

    return make


def both(*makes: Make) -> Make:
    def make(root: Path) -> None:
        for each in makes:
            each(root)

    return make


def written(name: str, content: bytes = b"") -> Make:
    def make(root: Path) -> None:
        (root / name).mkdir() if name.endswith("/") else (root / name).write_bytes(content)

    return make


def tensors(array: Any) -> Any:
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))


def column_twice(root: Path) -> None:
    arrays = [pa.array([JPG] * 3), pa.array([0, 1, 2]), pa.array([2, 1, 0])]
    parquet.write_table(
        pa.table(arrays, names=["image", "label", "label"]), root / "train-0.parquet"
    )


PAIR = [("0.jpg", JPG), ("0.cls", b"1"), ("1.jpg", JPG), ("1.cls", b"0\n")]


def shard(*members: tuple[str, bytes], name: str = "train-0.tar", change: Any = bytes) -> Make:
    return written(name, change(tar_of([*PAIR, *members])))
