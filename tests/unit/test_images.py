"""Images as the chain makes them: equal to Pillow and torchvision, whatever decoded and resized them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import spoilt
import torch
from damage import chained
from PIL import Image, ImageOps
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from stoker.chain.picture import Picture
from stoker.chain.transforms import GaussianBlurs
from stoker.data import CheckLabel, DecodeImage, RandomResizedCrop

IMAGE = "image__hwc"


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)

    def noise(*size: int) -> Any:
        image = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
        return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC), dtype=float)

    coarse, fine = noise(6, 8), noise(height // 4 + 1, width // 4 + 1)
    return Image.fromarray((0.8 * coarse + 0.2 * fine).astype(np.uint8))


def encoded(image: Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    return spoilt.encoded(form, image, **({"quality": 90} if form == "JPEG" else {}), **options)


def reference(content: bytes, mode: str = "RGB") -> torch.Tensor:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert(mode)
    return functional.pil_to_tensor(image)


def levels(ours: Any, theirs: torch.Tensor) -> tuple[int, float]:
    """Greatest and mean difference, of 255 levels."""
    difference = np.abs(ours.astype(int) - theirs.permute(1, 2, 0).numpy().astype(int))
    return int(difference.max()), float(difference.mean())


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "jpeg": ("JPEG", {}),
    "progressive": ("JPEG", {"progressive": True}),
    "without subsampling": ("JPEG", {"subsampling": 0}),
    "restart markers": ("JPEG", {"restart_marker_rows": 1}),
    "png": ("PNG", {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_crop_equals_torchvision_on_the_same_box(kind: str, seed: int) -> None:
    form, options = KINDS[kind]
    content = encoded(photo(150, 200, seed), form, **options)
    box = RandomResizedCrop(64).box(150, 200, np.random.default_rng(seed))
    ours = Picture(content).resized_crop(box, 64, 64).pixels()
    theirs = functional.resized_crop(reference(content), *box, [64, 64], antialias=True)
    assert levels(ours, theirs)[0] <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(60, 84), (403, 601)])
def test_orientation_is_applied_also_where_the_picture_is_decoded_smaller(
    orientation: int, size: tuple[int, int]
) -> None:
    image = photo(*size)
    exif = image.getexif()
    exif[0x0112] = orientation
    content = encoded(image, exif=exif.tobytes())
    assert levels(Picture(content).pixels(), reference(content))[0] == 0
    box = RandomResizedCrop(32).box(
        *reference(content).shape[1:], np.random.default_rng(orientation)
    )
    picture = Picture(content).resized_crop(box, 32, 32)
    theirs = functional.resized_crop(reference(content), *picture.box, [32, 32], antialias=True)
    greatest, mean = levels(picture.pixels(), theirs)
    assert greatest <= 12
    assert mean <= 2


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (40, 1400), (375, 500), (900, 600)])
@pytest.mark.parametrize("color", ["RGB", "L"])
@pytest.mark.parametrize("form", ["JPEG", "grey JPEG", "CMYK JPEG", "PNG"])
@pytest.mark.long
def test_resize_and_centre_crop_equal_torchvision(
    size: tuple[int, int], color: str, form: str
) -> None:
    image = photo(*size).convert({"grey JPEG": "L", "CMYK JPEG": "CMYK"}.get(form, "RGB"))
    content = encoded(image, form.split()[-1])
    chain = [DecodeImage(color), CheckLabel(2), v2.Resize(40), v2.CenterCrop(32)]  # type: ignore[arg-type]
    columns, report = chained([{"key": "a", "image": content, "label": 1}], *chain)
    assert not report.bad
    theirs = v2.CenterCrop(32)(v2.Resize(40)(reference(content, color)))
    greatest, mean = levels(columns[IMAGE][0], theirs)
    assert greatest <= 12
    assert mean <= 2


def test_boxes_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    module, ours = v2.RandomResizedCrop(32), RandomResizedCrop(32)
    image = torch.empty(3, 90, 130)
    theirs = np.array([list(module.make_params([image]).values())[:4] for _ in range(4000)])
    rng = np.random.default_rng(0)
    own = np.array([ours.box(90, 130, rng) for _ in range(4000)])
    quantiles = (0.1, 0.25, 0.5, 0.75, 0.9)
    assert np.abs(np.quantile(own, quantiles, 0) - np.quantile(theirs, quantiles, 0)).max() <= 4


@pytest.mark.parametrize("damage", ["cut", "cut with an end marker", "cut below the crop"])
def test_a_truncated_jpeg_is_quarantined_never_grey(damage: str) -> None:
    whole = encoded(photo(300, 400))
    content = whole[: len(whole) * (9 if "below" in damage else 5) // 10]
    if "marker" in damage:
        content += b"\xff\xd9"
    for crop in (v2.RandomResizedCrop(32), v2.Resize(32), v2.CenterCrop(400)):
        _, report = chained([{"key": "a", "image": content}], DecodeImage(), crop)
        [bad] = report.bad
        assert bad.reason.startswith("DecodeImage: DecodeError: cannot be decoded")


def test_fused_stages_are_one_in_the_report_and_a_user_behind_torchvision_gets_a_tensor() -> None:
    seen = []

    def user(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(batch["image"].shape)
        return batch

    chain = [DecodeImage(), CheckLabel(2), v2.RandomResizedCrop(32), v2.RandomHorizontalFlip()]
    row = {"key": "a", "image": encoded(photo(60, 80)), "label": 1}
    _, report = chained([row], *chain, user)
    fused = "DecodeImage+RandomResizedCrop+RandomHorizontalFlip"
    assert [*report.costs] == ["read", "CheckLabel", fused, "user"]
    assert seen == [(1, 3, 32, 32)]


@pytest.mark.parametrize("kind", ["float32", "uint8"])
def test_blurs_as_one_equal_torchvision_one_after_the_other(kind: str) -> None:
    modules = [v2.GaussianBlur(11) for _ in range(10)]
    image = torch.from_numpy(np.random.default_rng(0).random((3, 64, 72), dtype=np.float32))
    if kind == "uint8":
        image = (image * 255).to(torch.uint8)
    blurs = GaussianBlurs([(tuple(m.kernel_size), tuple(m.sigma)) for m in modules])
    torch.manual_seed(5)
    ours = blurs({"key": "a", "image": image}, np.random.default_rng(0))["image"]
    torch.manual_seed(5)
    theirs = v2.Compose(modules)(image)
    difference = np.abs(ours.numpy().astype(float) - theirs.numpy().astype(float)).max()
    assert difference <= (1e-6 if kind == "float32" else 2)


def test_a_kernel_larger_than_the_image_is_torchvisions_to_refuse() -> None:
    row = {"key": "a", "image": np.zeros((4, 4, 3), np.uint8)}
    _, report = chained([row], v2.GaussianBlur(11), v2.GaussianBlur(11))
    assert "padding" in report.bad[0].reason.lower()
