"""Images beyond `data.max_pixels` are quarantined by their header: nothing of them is decoded."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import chained, opened_job, preprocessed, read_all
from encoders import png
from PIL import Image
from spoilt import encoded
from torchvision.io import decode_image
from torchvision.transforms import v2

from stoker.data import DecodeImage, Record, RecordTransform, read_torch

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _limit_as_before() -> Iterator[None]:
    yield
    chained([])  # the limit is the process's


def blank(width: int, height: int, form: str, mode: str = "RGB", **options: Any) -> bytes:
    return encoded(form, Image.new("RGB", (width, height)).convert(mode), **options)


class ByPillow(RecordTransform):
    def __call__(self, record: Record, rng: Any) -> Record:
        return {**record, "image": np.array(Image.open(io.BytesIO(record["image"])).convert("RGB"))}


class ByTorchvision(RecordTransform):
    """Another one, of a column that Stoker does not decode."""

    def __call__(self, record: Record, rng: Any) -> Record:
        content = torch.frombuffer(bytearray(record["mask"]), dtype=torch.uint8)
        return {"key": record["key"], "image": decode_image(content)}


class ByOpenCV(RecordTransform):
    """One that decodes bytes that it fetched itself."""

    def __call__(self, record: Record, rng: Any) -> Record:
        import cv2

        image = cv2.imdecode(np.frombuffer(memoryview(record["image"]), np.uint8), cv2.IMREAD_COLOR)
        return {**record, "image": image}


IN_LITTLE_MEMORY = """
import pickle, resource, sys
from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.data import DecodeImage, read_any
source = read_any(sys.argv[1], 'train')
chain = pickle.loads(pickle.dumps(Chain(as_stages([DecodeImage()]), 0)))
[shard] = source.shards(100, None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
columns, report = chain.run(source.read(shard, None), 0)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(report.rows, [bad.key for bad in report.bad], report.bad[0].reason)
assert grown < 100_000, f'{grown} kB more'
# What a user's code fetches and decodes by itself.
import cv2
try: cv2.imread(source.folder + '/a/bomb.png')
except cv2.error: print('OpenCV refuses')
"""


def test_a_bomb_of_a_few_kilobytes_is_quarantined_in_little_memory(tmp_path: Path) -> None:
    """In a process of its own, whose memory is that of the one chain."""
    bomb = png(np.zeros((13_000, 13_000, 1), np.uint8), 0, 8)
    assert len(bomb) < 200_000
    for name in ("a/bomb.png", "a/good.png", "b/good.png"):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).write_bytes(bomb if "bomb" in name else blank(40, 40, "PNG"))
    command = [sys.executable, "-c", IN_LITTLE_MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ['a/bomb.png'] DecodeImage")
    assert "(169000000 pixels): more than data.max_pixels allows (100,000,000)" in done.stdout
    assert done.stdout.endswith("OpenCV refuses\n")


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "progressive JPEG": ("JPEG", {"progressive": True}),
    "CMYK JPEG": ("JPEG", {"mode": "CMYK"}),
    "GIF": ("GIF", {"mode": "P"}),
    **{form: (form, {}) for form in ("JPEG", "PNG", "BMP", "WEBP", "TIFF")},
}
DECODERS: dict[str, list[Any]] = {
    "Stoker's": [DecodeImage()],
    "Stoker's, with a crop": [DecodeImage(), v2.CenterCrop(8)],
    "Pillow": [ByPillow()],
    "OpenCV": [ByOpenCV()],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_every_format_and_decoder_obeys_the_limit(form: str, decoder: str) -> None:
    kind, options = FORMS[form]
    rows = [
        {"key": key, "image": blank(width, 40, kind, **options)}
        for key, width in (("large", 26), ("allowed", 25))
        if (decoder, key, kind) != ("OpenCV", "allowed", "GIF")
    ]
    _, report = chained(rows, *DECODERS[decoder], max_pixels=1000)
    assert [bad.key for bad in report.bad] == ["large"]
    assert "more than data.max_pixels allows (1,000)" in report.bad[0].reason


def test_a_column_that_the_users_own_transform_decodes_is_looked_at() -> None:
    row = {"key": "a", "image": blank(4, 4, "PNG"), "mask": blank(26, 40, "PNG")}
    _, report = chained([row], DecodeImage(), ByTorchvision(), max_pixels=1000)
    [bad] = report.bad
    assert bad.reason.startswith("column mask: 26 × 40 = 1,040 pixels: more than data.max_pixels")


def test_pillow_obeys_it_in_a_dataset_of_the_users_own() -> None:
    class Photos:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> tuple[Any, int]:
            image = Image.open(io.BytesIO(blank(25 + i, 40, "PNG"))).convert("RGB")
            return np.array(image), i

    chained([], max_pixels=1000)
    [_, bad] = read_all(read_torch(Photos()))
    assert "DecompressionBombError" in bad.reason


def test_the_limit_is_a_key_of_the_configuration(digits: Path) -> None:
    params = {"data": str(digits / "parquet"), "num_classes": 10, "image_size": 32}

    def bad(*overrides: str) -> int:
        _, data = opened_job({"params": params}, *overrides)
        return sum(len(report.bad) for _, report in preprocessed(data, "val"))

    assert bad() == bad("data.max_pixels=1024") == 0
    assert bad("data.max_pixels=1023") > 100


def test_a_wrong_checksum_anywhere_in_a_png_quarantines_it() -> None:
    whole = blank(20, 20, "PNG")
    places = range(8, whole.index(b"IEND") + 8)
    damaged = [whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :] for at in places]
    rows = [{"key": str(at), "image": content} for at, content in enumerate(damaged)]
    _, report = chained(rows, DecodeImage())
    assert len(report.bad) == len(rows)
    assert all("cannot be" in bad.reason or "not an image" in bad.reason for bad in report.bad)
