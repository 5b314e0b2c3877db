"""Pixels of every kind of file and object: as numpy computes them, or refused; beyond the limit undecoded."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from damage import chained, opened_job, preprocessed, read_all
from encoders import png, smooth, tiff
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo
from spoilt import encoded, images, of
from torchvision.io import decode_image
from torchvision.transforms import v2
from typer.testing import CliRunner

from stoker.data import DecodeImage, Pad, Record, RecordTransform, read_any, read_images, read_torch
from stoker.errors import SchemaError, UsageError
from stoker_launcher.command_line import app


def decoded(image: Any, mode: Any = "RGB", bits: int | None = None) -> Any:
    return DecodeImage(mode, bits)({"key": "a", "image": image}, np.random.default_rng(0))[
        "image"
    ].astype(int)


def same(found: Any, expected: Any, within: int = 0) -> None:
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= within


U16 = (smooth(4) * 65535).astype(np.uint16)
U8 = (U16 >> 8).astype(np.uint8)
TIFFS: dict[str, tuple[bytes, Any]] = {
    f"{name} {way}": (tiff(pixels, **kind, **way), expected)
    for way in [
        {"order": order, "packed": packed, "tile": tile}
        for order in "<>"
        for packed in (False, True)
        for tile in (0, 16)
    ]
    for name, pixels, kind, expected in (
        ("RGB of 16 bits", U16[..., :3], {}, U8[..., :3]),
        ("RGB of 8 bits", U8[..., :3], {}, U8[..., :3]),
        ("RGBA of 16 bits", U16, {"extra": (2,)}, U8[..., :3]),
        ("RGB and a band of 16 bits", U16, {"extra": (0,)}, U8[..., :3]),
        ("grey of 16 bits", U16[..., :1], {}, U8[..., [0, 0, 0]]),
        ("grey of 8 bits", U8[..., :1], {}, U8[..., [0, 0, 0]]),
        ("grey with alpha", U8[..., :2], {"extra": (2,)}, U8[..., [0, 0, 0]]),
    )
}


@pytest.mark.parametrize("case", TIFFS)
def test_a_tiff_of_8_or_16_bits_keeps_the_upper_8_bits_of_each_pixel(case: str) -> None:
    content, expected = TIFFS[case]
    same(decoded(content), expected)


def test_grey_multiplied_by_its_alpha_is_the_grey_that_it_covers() -> None:
    grey, cover = U8[..., :1], np.full((37, 29, 1), 128, np.uint8)
    stored = (grey.astype(int) * 128 // 255).astype(np.uint8)
    same(decoded(tiff(np.dstack([stored, cover]), extra=(1,)), "L"), grey, within=3)


SHADES = (smooth(1) * 16).astype(np.uint8)
COLOURS = np.arange(48).reshape(16, 3) * 999
FITS = {"SIMPLE": "T", "BITPIX": 16, "NAXIS": 2, "NAXIS1": 9, "NAXIS2": 9}
FITS_LINES = "".join(f"{name:8}= {value:>20}".ljust(80) for name, value in FITS.items()) + "END"
FIVE, THREE = U16[..., [0, 1, 2, 3, 0]], U16[..., :3]
UNREADABLE = "TIFF that Pillow cannot read"
REFUSED: dict[str, tuple[bytes, str]] = {
    "five bands": (tiff(FIVE, photometric=1, extra=(0,) * 4), UNREADABLE),
    "three bands": (tiff(THREE, photometric=1, extra=(0, 0)), UNREADABLE),
    "five channels": (tiff(FIVE, extra=(0, 0)), "TIFF"),
    "three floats": (tiff(smooth().astype(np.float32), kind=3), "TIFF"),
    "a FITS file": (FITS_LINES.encode().ljust(2880) + bytes(2880), "FITS pixels, whose range only"),
    "a PFM": (b"Pf\n29 37\n-1.0\n" + smooth(1).astype("<f4").tobytes(), "32-bit pixels, whose"),
}
FORMS_OF_TIFF: dict[str, tuple[bytes, str]] = {
    "two bands": (tiff(U8[..., :2], extra=(0,)), "2 × 8"),
    "planes of 8 bits": (tiff(U8[..., :3], planes=True), "3 × 8"),
    "planes of 16 bits": (tiff(THREE, planes=True, packed=True), "3 × 16"),
    "white is zero": (tiff(U8[..., :1], photometric=0), "1 × 8"),
    "white is zero, 16 bits": (tiff(U16[..., :1], photometric=0), "1 × 16"),
    **{f"{n} bits": (tiff(SHADES % 2**n, bits=n), f"1 × {n}") for n in (1, 2, 4)},
    "12 bits": (tiff(SHADES.astype(np.uint16), bits=12), "1 × 12"),
    "signed bytes": (tiff(smooth(1).astype(np.int8), kind=2), "1 × 8"),
    "signed 16 bits": (tiff(smooth(1).astype(np.int16), kind=2), "1 × 16"),
    "32 bits": (tiff((smooth(1) * 2**32).astype(np.uint32)), "1 × 32"),
    "floats": (tiff(smooth(1).astype(np.float32), kind=3), "1 × 32"),
    "a palette": (tiff(SHADES, photometric=3, bits=4, palette=COLOURS), "1 × 4"),
}
REFUSED |= {
    case: (content, f"a TIFF of {bits} bits in another form; write it as grey")
    for case, (content, bits) in FORMS_OF_TIFF.items()
}


@pytest.mark.parametrize("case", REFUSED)
def test_pixels_without_a_known_meaning_are_refused_with_what_they_are(case: str) -> None:
    content, expected = REFUSED[case]
    with pytest.raises(ValueError, match=expected):
        decoded(content)


PALETTE = np.random.default_rng(0).integers(0, 256, (16, 3))
INDEX = (smooth(1) * 16).astype(np.uint8)
ALPHA = np.where(smooth(1) > 0.5, 65535, 0).astype(np.uint16)
PLTE = b"PLTE", PALETTE.astype(np.uint8).tobytes()
CLEAR = b"tRNS", struct.pack(">HHH", *U16[0, 0, :3])
DEEP_GREY = U16[..., :1]
GREYS, RGB = U8[..., [0, 0, 0]], U8[..., :3]
PNGS: dict[str, tuple[bytes, Any]] = {
    "grey of 16 bits": (png(DEEP_GREY, 0, 16), GREYS),
    "grey of 4 bits": (png(INDEX, 0, 4), INDEX[..., [0, 0, 0]].astype(int) * 17),
    "RGB of 16 bits": (png(U16[..., :3], 2, 16), RGB),
    "RGBA of 16 bits": (png(np.dstack([U16[..., :3], ALPHA]), 6, 16), RGB),
    "grey and alpha of 16 bits": (png(np.dstack([DEEP_GREY, ALPHA]), 4, 16), GREYS),
    "a transparent colour": (png(U16[..., :3], 2, 16, CLEAR), RGB),
    **{
        f"a palette, transparent: {len(clear)}": (
            png(INDEX, 3, 4, PLTE, *([(b"tRNS", clear)] if clear else [])),
            PALETTE[INDEX[..., 0]],
        )
        for clear in (b"", b"\0", bytes(range(1, 9)))
    },
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", PNGS)
def test_a_png_gives_its_colours_whatever_its_depth_and_alpha(case: str) -> None:
    content, expected = PNGS[case]
    same(decoded(content), expected)


@pytest.mark.parametrize("highest", [15, 255, 1023, 4095, 65535])
def test_a_pgm_is_scaled_by_its_highest_value(highest: int) -> None:
    values = (smooth(1) * highest).astype(np.uint16 if highest > 255 else np.uint8)
    content = b"P5 29 37 %d\n" % highest + values.astype(values.dtype.newbyteorder(">")).tobytes()
    same(decoded(content, "L"), values.astype(float) * 255 / highest, within=1)


@pytest.mark.parametrize("way", [lambda v: png(v, 0, 16), tiff, lambda v: tiff(v, order=">")])
def test_bits_keep_the_contrast_of_12_bits_in_16(way: Any) -> None:
    values = (smooth(1) * 4095).astype(np.uint16)
    same(decoded(way(values), "L", 12), values >> 4)
    with pytest.raises(ValueError, match=r"a value of \d+ has more than 10 bits"):
        decoded(way(values), "L", 10)


def test_bits_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ValueError, match="bits is for grey images only"):
        decoded(png(U16[..., :3] >> 4, 2, 16), bits=12)
    with pytest.raises(UsageError, match="must be 9 to 16"):
        DecodeImage(bits=8)
    same(decoded(of(RGB, "PNG"), bits=12), RGB)


def text_of(size: int) -> bytes:
    info = PngInfo()
    info.add_text("raw", "x" * size)
    info.add_text("packed", "x" * size, zip=True)
    info.add_itxt("international", "x" * size, zip=True)
    return encoded("PNG", Image.fromarray(RGB), pnginfo=info)


def profile_of(size: int) -> bytes:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return encoded("PNG", Image.fromarray(RGB), icc_profile=profile + bytes(size))


@pytest.mark.long
@pytest.mark.parametrize("made", [text_of, profile_of])
def test_a_png_with_megabytes_of_text_or_profile_is_decoded_and_a_bomb_is_not(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.PngImagePlugin.MAX_TEXT_CHUNK", 2**20)
    same(decoded(made(10**6 + 10**5)), RGB)
    sizes = (10**6, 3 * 10**6, 40 * 2**20)
    rows = [{"key": str(size), "image": made(size)} for size in sizes]
    columns, report = chained(rows, DecodeImage())
    assert [bad.key for bad in report.bad] == [str(sizes[-1])]
    for found in columns["image__hwc"]:
        same(found, RGB)


@pytest.mark.long
def test_peek_names_bits_and_pages_that_decoding_leaves_out(tmp_path: Path) -> None:
    def job(suffix: str, content: bytes, **params: Any) -> Path:
        folder = tmp_path / suffix
        files = itertools.product(("train", "val"), ("cat", "dog"), "01")
        made = [(f"{split}/{name}/{i}.{suffix}", content) for split, name, i in files]
        images(*made, classes="")(folder)
        params = {"data": str(folder), "model": "test_resnet", "image_size": 32, **params}
        (folder.parent / "job.yaml").write_text(yaml.safe_dump({"params": params}))
        return folder.parent / "job.yaml"

    def said(suffix: str, content: bytes) -> str:
        words = ["peek", str(job(suffix, content)), "train.batch_size=2"]
        result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "page.html")])
        assert result.exit_code == 0, result.output
        return result.output

    deep = png((smooth(1) * 4095).astype(np.uint16), 0, 16)
    assert "4 of 4 have more than 8 bits per channel; decoding keeps 8" in said("png", deep)
    _, data = opened_job(job("png", deep, bits=12))
    assert data.notes() == []
    [(columns, _)] = preprocessed(data)
    assert (columns["image__hwc"].max((1, 2, 3)) > 200).all()
    pages = [Image.fromarray(U8[..., c]) for c in range(3)]
    for form in ("GIF", "TIFF", "WEBP", "PNG"):
        content = encoded(form, pages[0], save_all=True, append_images=pages[1:])
        shutil.rmtree(tmp_path / form.lower(), ignore_errors=True)
        assert "4 of 4 hold several pictures or pages" in said(form.lower(), content)


GREY = RGB[..., 0]
LAB = Image.fromarray(RGB).convert("LAB")
FORMS: dict[str, tuple[Any, Any]] = {
    "a picture": (Image.fromarray(RGB), RGB),
    "an opened file": (Image.open(io.BytesIO(of(RGB, "PNG"))), RGB),
    "grey": (Image.fromarray(GREY), GREY),
    "black and white": (Image.fromarray(GREY > 128), (GREY > 128) * 255),
    "16 bits": (Image.fromarray(U16[..., 0]), GREY),
    "with alpha": (Image.fromarray(np.dstack([RGB, GREY])), RGB),
    "grey with alpha": (Image.fromarray(np.dstack([GREY, GREY])), GREY),
    "a palette picture": (
        Image.open(io.BytesIO(PNGS["a palette, transparent: 8"][0])),
        PALETTE[INDEX[..., 0]],
    ),
    "CMYK": (Image.fromarray(RGB).convert("CMYK"), RGB),
    "LAB": (LAB, np.asarray(LAB.convert("RGB"))),
    "a LAB file": (Image.open(io.BytesIO(encoded("TIFF", LAB))), np.asarray(LAB.convert("RGB"))),
    "rows and columns": (GREY, GREY),
    "one channel last": (GREY[..., None], GREY),
    "two channels last": (np.dstack([GREY, GREY]), GREY),
    "three channels last": (RGB, RGB),
    "four channels last": (np.dstack([RGB, GREY]), RGB),
    "a tensor without channels": (torch.from_numpy(GREY.copy()), GREY),
    "a tensor of one channel": (torch.from_numpy(GREY.copy())[None], GREY),
    "a tensor of three channels": (torch.from_numpy(RGB.copy()).permute(2, 0, 1), RGB),
    "a tensor of four channels": (torch.from_numpy(np.dstack([RGB, GREY])).permute(2, 0, 1), RGB),
    "v2.ToImage": (v2.ToImage()(Image.fromarray(RGB)), RGB),
}


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("case", FORMS)
@pytest.mark.parametrize("fused", [False, True])
def test_what_a_dataset_returns_gets_the_channels_of_the_mode(
    case: str, mode: Any, fused: bool
) -> None:
    image, expected = FORMS[case]
    if mode == "L" and expected.ndim == 3:
        expected = np.asarray(Image.fromarray(expected.astype(np.uint8)).convert("L"))
    elif mode == "RGB" and expected.ndim == 2:
        expected = np.repeat(expected[..., None], 3, axis=2)
    chain = [DecodeImage(mode), *([v2.CenterCrop((37, 29))] if fused else [])]
    columns, report = chained([{"key": "a", "image": image}], *chain)
    assert not report.bad
    same(columns["image__hwc"][0], expected.reshape(37, 29, -1), within=1)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (np.zeros((3, 30, 40), np.uint8), r"\(3, 30, 40\); arrays are height × width"),
        (torch.zeros((30, 40, 3), dtype=torch.uint8), r"tensors channels × height × width"),
        (np.zeros((30, 40, 5), np.uint8), r"\(30, 40, 5\); arrays are"),
        (np.zeros((2, 3, 30, 40), np.uint8), "arrays are height × width"),
        (np.zeros((30, 40, 3), np.float32), "float32, neither an encoded image nor a uint8 array"),
        (np.zeros((30, 40), bool), "bool, neither"),
        (Image.fromarray(smooth(1)[..., 0].astype(np.float32)), "32-bit pixels"),
        (Image.open(io.BytesIO(tiff(U16[..., :3], planes=True))), "in another form"),
        ([[1, 2], [3, 4]], "a list, neither"),
        ({"bytes": b"", "path": ""}, "a dict, neither"),
    ],
)
def test_a_form_that_could_be_misread_is_refused(image: Any, expected: str) -> None:
    with pytest.raises((ValueError, TypeError), match=expected):
        decoded(image)


@pytest.mark.parametrize(
    "mode", ["L", "RGB", "1", "LA", "P", "PA", "RGBA", "CMYK", "HSV", "I;16", "I", "F"]
)
@pytest.mark.parametrize("entry", [v2.ToImage(), v2.Compose([v2.CenterCrop(4), v2.ToImage()])])
def test_torchvision_gets_pillow_images_of_modes_l_and_rgb_alone(mode: str, entry: Any) -> None:
    red = Image.fromarray(np.full((8, 9, 3), (200, 10, 20), np.uint8))
    image = (
        red.quantize(4).convert(mode)
        if mode[0] == "P"
        else red.convert("L" if mode == "I;16" else mode)
    )
    image = image.convert("I;16") if mode == "I;16" else image
    columns, report = chained([{"key": "a", "image": image}], entry)
    if mode in ("L", "RGB"):
        assert not report.bad and columns["image"][0, 0].max() == (200 if mode == "RGB" else 68)
    else:
        assert f"a PIL image of mode {mode}; put DecodeImage() before" in report.bad[0].reason


def pixels(number: int) -> Any:
    y, x, c = np.mgrid[0:16, 0:16, 0:3]
    return (5 * y + 7 * x + 20 * c + 3 * number).astype(np.uint8)


def left(*entries: Any, array: bool = False, mode: str = "L", **options: Any) -> Any:
    """What a chain makes of pictures, every second one of another mode."""
    rows = [Image.fromarray(pixels(n)).convert(mode if n % 2 else "RGB") for n in range(8)]
    images = [np.asarray(row) if array else row for row in rows]
    records = read_all(read_torch([{"image": image} for image in images]))  # type: ignore[arg-type]
    return chained(records, *entries, **options)


LIKE = "differs in shape .*DecodeImage"
UNBATCHED: list[tuple[list[Any], dict[str, Any], str]] = [
    ([], {"mode": "RGB"}, r"is still a PIL image \(record 0\); add DecodeImage\(\) or v2\.ToImage"),
    ([v2.ToImage()], {}, LIKE + r"\(\) gives all the same channels"),
    ([v2.ToImage()], {"pads": {"image": Pad(0)}}, "pad would add black channels"),
    ([], {"array": True}, LIKE),
]


@pytest.mark.parametrize(("entries", "options", "expected"), UNBATCHED)
def test_pictures_that_no_batch_holds_are_refused_with_the_stage_to_add(
    entries: list[Any], options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(SchemaError, match=expected) as refused:
        left(*entries, **options)
    assert "pad =" not in str(refused.value)


def test_undecoded_images_of_hugging_face_are_their_bytes() -> None:
    content = of(pixels(1), "PNG")
    row = {"image": {"bytes": content, "path": "a.png"}, "label": 1}
    columns, report = chained(read_all(read_torch([row])), DecodeImage())  # type: ignore[arg-type]
    assert not report.bad
    assert np.array_equal(columns["image__hwc"][0], pixels(1))


PAGE = Path(__file__).resolve().parents[2] / "docs/tutorials/own-images.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def photos(folder: Path) -> None:
    for name in ("circle", "square"):
        (folder / name).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (40, 50), (20 * i, 0, 0)).save(folder / name / f"{i}.jpg")
    (folder / "circle/notes.txt").write_text("from the garden")


def test_images_without_a_split_are_copied_into_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "my_images")
    before = sorted(p for p in (tmp_path / "my_images").rglob("*"))
    with pytest.raises(
        UsageError, match=r"found: circle, square\); split it into train/ and val/ first, see"
    ):
        read_any("my_images", "train")
    exec(blocks("python")[0], {})  # noqa: S102 - as a reader does
    assert sorted(p for p in (tmp_path / "my_images").rglob("*")) == before
    train, val = read_images("my_flowers", "train"), read_images("my_flowers", "val")
    assert train and val and (train.count(), val.count()) == (16, 4)
    assert not list((tmp_path / "my_flowers").rglob("*.txt"))
    (tmp_path / "my_flowers/train").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"has no folder train/ \(found: val\)$"):
        read_any("my_flowers", "train")


@pytest.mark.long
def test_the_exported_model_is_used_at_its_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert yaml.safe_load(blocks("yaml")[0])["export"] == ["torch_export"]
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/latest/model"
    folder.mkdir(parents=True)
    example = torch.zeros(2, 3, 24, 24, dtype=torch.uint8)

    class Brightest(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image.float().reshape(-1, 3, 24 * 24).mean(2)

    batch = ({0: torch.export.Dim("batch")},)
    model = torch.export.export(Brightest(), (example,), dynamic_shapes=batch)
    torch.export.save(model, folder / "model.pt2")
    inputs = [{"name": "image", "dtype": "uint8", "shape": ["batch", 3, 24, 24]}]
    about = {"classes": ["red", "green", "blue"], "inputs": inputs}
    (folder / "model.json").write_text(json.dumps(about))
    Image.fromarray(np.full((70, 50, 3), (0, 200, 0), np.uint8)).save("new.jpg")
    exec(blocks("python")[-1], {})  # noqa: S102 - as a reader does
    assert capsys.readouterr().out == "green\n"


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


@pytest.mark.long
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


LIMITED: dict[str, tuple[str, dict[str, Any]]] = {
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


@pytest.mark.long
@pytest.mark.parametrize("form", LIMITED)
@pytest.mark.parametrize("decoder", DECODERS)
def test_every_format_and_decoder_obeys_the_limit(form: str, decoder: str) -> None:
    kind, options = LIMITED[form]
    rows = [
        {"key": key, "image": blank(width, 40, kind, **options)}
        for key, width in (("large", 26), ("allowed", 25))
        if (decoder, key, kind) != ("OpenCV", "allowed", "GIF")
    ]
    _, report = chained(rows, *DECODERS[decoder], max_pixels=1000)
    assert [bad.key for bad in report.bad] == ["large"]
    assert "more than data.max_pixels allows (1,000)" in report.bad[0].reason


@pytest.mark.long
def test_a_column_that_the_users_own_transform_decodes_is_looked_at() -> None:
    row = {"key": "a", "image": blank(4, 4, "PNG"), "mask": blank(26, 40, "PNG")}
    _, report = chained([row], DecodeImage(), ByTorchvision(), max_pixels=1000)
    [bad] = report.bad
    assert bad.reason.startswith("column mask: 26 × 40 = 1,040 pixels: more than data.max_pixels")


@pytest.mark.long
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


@pytest.mark.long
def test_the_limit_is_a_key_of_the_configuration(digits: Path) -> None:
    params = {"data": str(digits / "parquet"), "num_classes": 10, "image_size": 32}

    def bad(*overrides: str) -> int:
        _, data = opened_job({"params": params}, *overrides)
        return sum(len(report.bad) for _, report in preprocessed(data, "val"))

    assert bad() == bad("data.max_pixels=1024") == 0
    assert bad("data.max_pixels=1023") > 100


@pytest.mark.long
def test_a_wrong_checksum_anywhere_in_a_png_quarantines_it() -> None:
    whole = blank(20, 20, "PNG")
    places = range(8, whole.index(b"IEND") + 8)
    damaged = [whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :] for at in places]
    rows = [{"key": str(at), "image": content} for at, content in enumerate(damaged)]
    _, report = chained(rows, DecodeImage())
    assert len(report.bad) == len(rows)
    assert all("cannot be" in bad.reason or "not an image" in bad.reason for bad in report.bad)
