"""Pixels of every kind of file and object: as numpy computes them, or refused, or named with the scaling."""

from __future__ import annotations

import io
import itertools
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from damage import chained, opened_job, preprocessed
from encoders import png, smooth, tiff
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo
from spoilt import encoded, images, of
from torchvision.transforms import v2
from typer.testing import CliRunner

from stoker.data import DecodeImage
from stoker.errors import UsageError
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
    "two bands": (tiff(U8[..., :2], extra=(0,)), "2 × 8 bits, unsigned, grey"),
    "five channels": (tiff(FIVE, extra=(0, 0)), "TIFF"),
    "planes of 8 bits": (tiff(U8[..., :3], planes=True), "RGB, in separate planes"),
    "planes of 16 bits": (tiff(THREE, planes=True, packed=True), "RGB, in separate planes"),
    "white is zero": (tiff(U8[..., :1], photometric=0), "white is zero"),
    "white is zero, 16 bits": (tiff(U16[..., :1], photometric=0), "white is zero"),
    **{f"{n} bits": (tiff(SHADES % 2**n, bits=n), f"1 × {n} bits") for n in (1, 2, 4)},
    "12 bits": (tiff(SHADES.astype(np.uint16), bits=12), "1 × 12 bits"),
    "signed bytes": (tiff(smooth(1).astype(np.int8), kind=2), "8 bits, signed"),
    "signed 16 bits": (tiff(smooth(1).astype(np.int16), kind=2), "16 bits, signed"),
    "32 bits": (tiff((smooth(1) * 2**32).astype(np.uint32)), "1 × 32 bits, unsigned"),
    "floats": (tiff(smooth(1).astype(np.float32), kind=3), "32 bits, floating-point"),
    "three floats": (tiff(smooth().astype(np.float32), kind=3), "TIFF"),
    "a palette": (tiff(SHADES, photometric=3, bits=4, palette=COLOURS), "a palette"),
    "a FITS file": (FITS_LINES.encode().ljust(2880) + bytes(2880), "FITS pixels, whose range only"),
    "a PFM": (b"Pf\n29 37\n-1.0\n" + smooth(1).astype("<f4").tobytes(), "32-bit pixels, whose"),
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
        (Image.open(io.BytesIO(tiff(U16[..., :3], planes=True))), "separate planes"),
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
