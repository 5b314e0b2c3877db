"""Images beyond `data.max_pixels` are quarantined by their header: nothing of them is decoded."""

from __future__ import annotations

import io
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import v2

from stoker.chain.chain import Chain
from stoker.chain.decode import MOST_PIXELS, limit_pixels
from stoker.chain.entries import as_stages
from stoker.chain.picture import Picture
from stoker.chain.stages import RecordTransform
from stoker.chain.transforms import DecodeImage
from stoker.config.loading import load
from stoker.data import read_torch
from stoker.protocol import Record
from stoker.serve.opening import open_data

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _limit_as_before() -> Iterator[None]:
    yield
    limit_pixels(MOST_PIXELS)


def bomb(side: int = 13_000) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        whole = kind + content
        return len(content).to_bytes(4) + whole + zlib.crc32(whole).to_bytes(4)

    packer = zlib.compressobj(9)
    row = bytes(side + 1)
    packed = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = side.to_bytes(4) + side.to_bytes(4) + bytes([8, 0, 0, 0, 0])
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def encoded(width: int, height: int, form: str, **options: Any) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (width, height)).convert(options.pop("mode", "RGB")).save(
        content, form, **options
    )
    return content.getvalue()


class ByPillow(RecordTransform):
    def __call__(self, record: Record, rng: Any) -> Record:
        return {**record, "image": np.array(Image.open(io.BytesIO(record["image"])).convert("RGB"))}


class ByTorchvision(RecordTransform):
    """Another one, of a column that Stoker does not decode."""

    def __call__(self, record: Record, rng: Any) -> Record:
        import torch
        from torchvision.io import decode_image

        mask = decode_image(torch.frombuffer(bytearray(record["mask"]), dtype=torch.uint8))
        return {"key": record["key"], "image": mask}


class ByOpenCV(RecordTransform):
    """One that decodes bytes that it fetched itself."""

    def __call__(self, record: Record, rng: Any) -> Record:
        import cv2

        image = cv2.imdecode(np.frombuffer(memoryview(record["image"]), np.uint8), cv2.IMREAD_COLOR)
        return {**record, "image": image}


def test_a_bomb_of_a_few_kilobytes_is_quarantined_in_little_memory(tmp_path: Path) -> None:
    """In a process of its own, whose memory is that of the one chain."""
    content = bomb()
    assert len(content) < 200_000
    for name in ("a/bomb.png", "a/good.png", "b/good.png"):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        whole = content if "bomb" in name else encoded(40, 40, "PNG")
        (tmp_path / "train" / name).write_bytes(whole)
    code = (
        "import pickle, resource, sys\n"
        "from stoker.chain.chain import Chain\n"
        "from stoker.data import read_any\n"
        "from stoker.data import DecodeImage\n"
        "from stoker.chain.entries import as_stages\n"
        "source = read_any(sys.argv[1], 'train')\n"
        "chain = pickle.loads(pickle.dumps(Chain(as_stages([DecodeImage()]), 0)))\n"
        "[shard] = source.shards(100, None)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "columns, report = chain.run(source.read(shard, None), 0)\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print(report.rows, [bad.key for bad in report.bad], report.bad[0].reason)\n"
        "assert grown < 100_000, f'{grown} kB more'\n"
        # What a user's code fetches and decodes by itself.
        "import cv2, numpy\n"
        "content = (source.folder + '/a/bomb.png')\n"
        "try: cv2.imread(content)\n"
        "except cv2.error as error: print('OpenCV refuses')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ['a/bomb.png'] DecodeImage")
    assert done.stdout.endswith("OpenCV refuses\n")
    assert (
        "Image size (169000000 pixels): more than data.max_pixels allows (100,000,000)"
        in done.stdout
    )


SMALL = 1000
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "jpeg": ("JPEG", {}),
    "progressive jpeg": ("JPEG", {"progressive": True}),
    "cmyk jpeg": ("JPEG", {"mode": "CMYK"}),
    "png": ("PNG", {}),
    "gif": ("GIF", {"mode": "P"}),
    "bmp": ("BMP", {}),
    "webp": ("WEBP", {}),
    "tiff": ("TIFF", {}),
}
DECODERS = {
    "Stoker's": lambda: [DecodeImage()],
    "Stoker's, with a crop": lambda: [DecodeImage(), v2.CenterCrop(8)],
    "Pillow": lambda: [ByPillow()],
    "OpenCV": lambda: [ByOpenCV()],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_every_format_and_decoder_obeys_the_limit(form: str, decoder: str) -> None:
    kind, options = FORMS[form]
    rows = [
        {"key": "large", "image": encoded(26, 40, kind, **options)},
        {"key": "allowed", "image": encoded(25, 40, kind, **options)},
    ]
    if (decoder, kind) == ("OpenCV", "GIF"):
        rows.pop()
    _, report = Chain(as_stages(DECODERS[decoder]()), seed=0, max_pixels=SMALL).run(rows, 0)
    assert [bad.key for bad in report.bad] == ["large"]
    assert "more than data.max_pixels allows (1,000)" in report.bad[0].reason


def test_a_column_that_the_users_own_transform_decodes_is_looked_at() -> None:
    rows = [{"key": "a", "image": encoded(4, 4, "PNG"), "mask": encoded(26, 40, "PNG")}]
    chain = Chain(as_stages([DecodeImage(), ByTorchvision()]), seed=0, max_pixels=SMALL)
    _, report = chain.run(rows, 0)
    assert [bad.key for bad in report.bad] == ["a"]
    assert report.bad[0].reason.startswith(
        "column mask: 26 × 40 = 1,040 pixels: more than data.max_pixels"
    )


def test_pillow_obeys_it_in_a_dataset_of_the_users_own() -> None:
    class Photos:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> tuple[Any, int]:
            image = Image.open(io.BytesIO(encoded(25 + i, 40, "PNG"))).convert("RGB")
            return np.array(image), i

    source = read_torch(Photos())
    [shard] = source.shards(10, None)
    _, report = Chain(as_stages([]), seed=0, max_pixels=SMALL).run(source.read(shard, None), 0)
    assert [bad.key for bad in report.bad] == ["1"]
    assert "DecompressionBombError" in report.bad[0].reason


def test_the_limit_is_a_key_of_the_configuration(tmp_path: Path, digits: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        f"params: {{data: {digits / 'parquet'}, num_classes: 10, image_size: 32}}"
    )

    def bad(*overrides: str) -> int:
        data = open_data(load(tmp_path / "job.yaml", overrides).config)
        shard = data.sources["val"].shards(10, None)[0]
        return len(data.chains["val"].run(data.sources["val"].read(shard, None), 0)[1].bad)

    assert bad() == bad("data.max_pixels=1024") == 0
    assert bad("data.max_pixels=1023") > 100


def test_a_wrong_checksum_anywhere_in_a_png_quarantines_it() -> None:
    whole = encoded(20, 20, "PNG")
    end = whole.index(b"IEND") + 8
    for at in range(8, end):
        damaged = whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :]
        with pytest.raises(ValueError, match=r"cannot be decoded|not an image"):
            Picture(damaged).pixels()


def test_corrupt_jpeg_data_is_no_image_where_pillow_would_give_one() -> None:
    rng = np.random.default_rng(0)
    content = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(content, "JPEG")
    whole = content.getvalue()
    damaged = whole[:-2] + bytes(40) + whole[-2:]  # the decoder takes two of them for its last bits
    Image.open(io.BytesIO(damaged)).load()
    with pytest.raises(
        ValueError, match="cannot be decoded: Corrupt JPEG data: 38 extraneous bytes"
    ):
        Picture(damaged).pixels()
