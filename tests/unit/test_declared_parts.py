"""Declared masks, boxes and key points move with their image through every later transform of a chain."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import numpy as np
import pytest
import spoilt
import torch
from damage import chained, reasons
from PIL import Image
from spoilt import flipped
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from stoker.data import (
    Boxes,
    CheckLabel,
    DecodeImage,
    DecodeMask,
    DecodeVideo,
    Drop,
    KeyPoints,
    Pad,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RecordTransform,
    Rename,
)
from stoker.errors import UsageError


def encoded(pixels: Any, kind: str = "PNG", turn: int = 1, **options: Any) -> bytes:
    if turn != 1:
        options["exif"] = Image.Exif()
        options["exif"][0x112] = turn
    return spoilt.encoded(kind, Image.fromarray(pixels), **options)


def pair(key: str, size: tuple[int, int] = (20, 30)) -> dict[str, Any]:
    """A mask of blocks, and an image whose colours follow from it."""
    blocks = np.random.default_rng(int(key)).integers(0, 5, (size[0] // 5, size[1] // 5))
    mask = np.kron(blocks, np.ones((5, 5))).astype(np.uint8)
    image = np.repeat(40 * mask[..., None], 3, axis=2)
    return {"key": key, "image": encoded(image), "mask": encoded(mask)}


run = partial(chained, seed=5)
FLIP, CROP = v2.RandomHorizontalFlip(0.5), v2.RandomCrop(12)
DECODE = [DecodeImage(), DecodeMask()]


class Remap(RecordTransform):
    """Makes an array or a plain tensor of a declared mask."""

    random = False

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __call__(self, record: dict[str, Any], rng: Any) -> dict[str, Any]:
        mask = record["mask"]
        return {**record, "mask": np.asarray(mask) + 0 if self.kind is np else mask + 0}


class OwnCrop(v2.RandomCrop):
    pass


MOVED: dict[str, list[Any]] = {
    "v2": [*DECODE, CROP, FLIP, v2.RandomVerticalFlip()],
    "a Compose": [*DECODE, v2.Compose([CROP, v2.ColorJitter(), FLIP])],
    "v1 Compose of v2": [*DECODE, v1.Compose([CROP, v1.ColorJitter(), FLIP])],
    "v1 that Stoker replaces": [*DECODE, CROP, v1.RandomHorizontalFlip()],
    "RandomApply": [*DECODE, CROP, v2.RandomApply([v2.RandomVerticalFlip()])],
    "own subclass": [*DECODE, OwnCrop(12)],
    "Stoker's": [*DECODE, CROP, RandomHorizontalFlip(), CheckLabel(9)],
    "v2 and v1": [*DECODE, CROP, FLIP, v2.RandomRotation(90), v1.CenterCrop(12)],
    "after an array": [*DECODE, Remap(np), CROP, FLIP],
    "after a tensor": [*DECODE, Remap(torch), FLIP, CROP],
    "after a batch": [*DECODE, lambda columns: columns, CROP, FLIP],
    "fused": [DecodeMask(), DecodeImage(exif=True), v2.RandomHorizontalFlip(), v2.CenterCrop(12)],
    "pure": [*DECODE, v2.Compose([CROP, FLIP, v2.ToPureTensor()])],
}


@pytest.mark.parametrize("case", MOVED)
def test_a_declared_mask_moves_with_its_image(case: str) -> None:
    records = [{**pair(str(i)), "label": i % 9} for i in range(40)]
    columns, report = run(records, *MOVED[case])
    assert not report.bad
    assert type(columns["mask"]) is np.ndarray and columns["mask"].shape == (40, 12, 12)
    assert (columns["image"] == 40 * columns["mask"][:, None]).all()
    assert len(np.unique(columns["mask"])) == 5


def test_a_mask_is_resized_without_mixing_its_classes() -> None:
    for resize in (v2.Resize((13, 17)), RandomResizedCrop((13, 17))):
        columns, _ = run([pair(str(i)) for i in range(8)], *DECODE, resize)
        assert columns["mask"].shape[1:] == columns["image"].shape[2:] == (13, 17)
        assert set(np.unique(columns["mask"])) <= set(range(5))


def test_each_record_and_epoch_draws_its_own_and_again_the_same() -> None:
    same = [{**pair("0"), "key": str(i)} for i in range(20)]
    first, again, later = (run(same, *DECODE, CROP, epoch=epoch)[0]["mask"] for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    assert len(np.unique(first, axis=0)) > 15
    assert not np.array_equal(first, later)


def test_types_of_torchvision_that_a_dataset_returns_are_declarations() -> None:
    image = np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8)
    points = torch.tensor([[2.0, 3.0], [29.0, 0.0]])
    record = {
        "key": "a",
        "image": image,
        "mask": tv_tensors.Mask(torch.from_numpy(image[..., 0].copy())),
        "boxes": tv_tensors.BoundingBoxes([[2, 4, 8, 9]], format="XYXY", canvas_size=(20, 30)),  # type: ignore[call-overload]
        "plain": image[..., 1].copy(),
        "keypoints": points,
    }
    entries = [KeyPoints(), v2.RandomHorizontalFlip(1.0), Drop("nothing"), v2.CenterCrop((20, 28))]
    columns, report = run([record], *entries)
    assert not report.bad
    flipped = image[:, 1:-1][:, ::-1]
    assert np.array_equal(columns["image"][0], flipped.transpose(2, 0, 1))
    assert np.array_equal(columns["mask"][0], flipped[..., 0])
    assert columns["boxes"].tolist() == [[[21, 4, 27, 9]]]
    assert columns["keypoints"].tolist() == [[[26, 3], [-1, 0]]]
    assert np.array_equal(columns["plain"][0], image[..., 1]), "nothing declares it"
    [reason] = reasons(run([record], v1.RandomRotation(9))[1])
    assert "RandomRotation of torchvision.transforms moves the image without mask" in reason
    assert not run([record], v1.ColorJitter(0.1))[1].bad


def test_a_declaration_follows_its_column_and_ends_with_it() -> None:
    flip = v2.RandomHorizontalFlip(1.0)
    columns, _ = run([pair("1")], *DECODE, Remap(np), Rename(classes="mask"), flip)
    assert (columns["image"][0, 0] == 40 * columns["classes"][0]).all()
    columns, report = run([pair("1")], *DECODE, Remap(np), Drop("mask"), flip)
    assert not report.bad and "mask" not in columns


class Made(RecordTransform):
    """Finds boxes in the image as it is now."""

    def __call__(self, record: dict[str, Any], rng: Any) -> dict[str, Any]:
        return {**record, "boxes": [[0, 0, 4, 4]]}


MOVES_FIRST: list[list[Any]] = [
    [DecodeImage(), FLIP, DecodeMask()],
    [DecodeImage(), RandomHorizontalFlip(), DecodeMask()],
    [DecodeImage(), v2.RandAugment(), DecodeMask()],
    [DecodeImage(), v1.RandomRotation(9), DecodeMask()],
    [DecodeImage(), FLIP, Drop("x"), Boxes()],
]
MOVES_BOTH: list[list[Any]] = [
    [DecodeImage(), v2.ColorJitter(), DecodeMask()],
    [DecodeImage(), v2.Resize(9), DecodeMask()],
    [DecodeImage(), FLIP, Made(), Boxes()],
]


@pytest.mark.parametrize("entries", MOVES_FIRST)
def test_an_image_is_not_moved_before_its_mask_is_declared(entries: list[Any]) -> None:
    with pytest.raises(UsageError, match="moves the image before"):
        run([], *entries)
    for others in MOVES_BOTH:
        run([], *others)


def boxed(boxes: Any, width: int = 60, **more: Any) -> dict[str, Any]:
    return {"key": "a", "image": encoded(np.zeros((40, width, 3), np.uint8)), "boxes": boxes} | more


def test_boxes_follow_their_image_and_those_outside_go_with_their_labels() -> None:
    mask = np.zeros((20, 30), np.uint8)
    mask[4:9, 2:8], mask[12:15, 20:29] = 1, 2
    boxes = np.array([[2, 4, 8, 9], [20, 12, 29, 15]], np.float32)
    image, labels = np.repeat(mask[..., None], 3, 2), np.array([1, 2])
    record = {"image": image, "mask": mask, "boxes": boxes, "labels": labels}
    records = [{"key": str(i), **record} for i in range(40)]
    crop = v2.Compose([v2.RandomCrop(10), FLIP, v2.SanitizeBoundingBoxes()])
    pads = {"boxes": Pad(0), "labels": Pad(-1)}
    counts = set()
    columns, report = run(records, DecodeImage(), DecodeMask(), Boxes(), crop, pads=pads)
    assert not report.bad
    for i in range(40):
        mask = columns["mask"][i]
        boxes, labels = columns["boxes"][i : i + 1].values, columns["labels"][i : i + 1].values
        counts.add(len(boxes))
        assert sorted(labels) == [c for c in (1, 2) if (mask == c).any()]
        for (x1, y1, x2, y2), label in zip(boxes.astype(int), labels, strict=True):
            rows, places = np.nonzero(mask == label)
            corners = (places.min(), rows.min(), places.max() + 1, rows.max() + 1)
            assert (x1, y1, x2, y2) == corners
    assert counts == {0, 1}


BOXES: dict[str, tuple[list[list[float]], list[list[float]]]] = {
    "XYXY": (
        [[30, 20, 30, 20], [30.0, 5, 29.99998, 9], [-3, 20, 70, 45]],
        [[30, 20, 10, 15], [10, 20, 30, 15], [30, 5, 29, 9]],
    ),
    "XYWH": ([[30, 20, 10, 15]], [[30, 20, 10, -15]]),
    "cxcywh": ([[30, 20, 10, 15]], []),
}
"""Format → boxes that are one, and boxes that are none."""


@pytest.mark.parametrize("format", BOXES)
def test_boxes_that_are_none_in_their_format_are_quarantined(format: str) -> None:
    whole, wrong = BOXES[format]
    infinite = [[np.nan, 20, 30, 35], [10, 20, np.inf, 35]]
    records = [boxed(np.array([[1, 2, 3, 4], box], "f4")) for box in [*whole, *wrong, *infinite]]
    columns, report = run(records, DecodeImage(), Boxes("boxes", format))
    assert len(columns["boxes"]) == len(whole)
    says = ["set `format`"] * len(wrong) + ["padding; leave such rows out"] * 2
    for reason, expected in zip(reasons(report), says, strict=True):
        assert expected in reason


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64, np.float16, np.float64])
def test_boxes_of_any_type_are_exact(dtype: Any) -> None:
    record = boxed(np.array([[10, 5, 30, 21]], dtype), width=300)
    enlarge = v2.Compose([v2.RandomHorizontalFlip(1), v2.Resize((90, 3000))])
    columns, _ = run([record], DecodeImage(), Boxes(), enlarge)
    assert columns["boxes"].tolist() == [[[2700, 11.25, 2900, 47.25]]]
    assert columns["boxes"].dtype == (np.float64 if dtype is np.float64 else np.float32)


@pytest.mark.parametrize("none", [[], np.array([]), np.zeros((0, 4)), torch.zeros(0)])
def test_an_image_may_have_no_boxes(none: Any) -> None:
    for boxes, rows in (([[10.0, 5.0, 30.0, 21.0]], 1), (none, 0)):
        columns, report = run([boxed(boxes)], DecodeImage(), Boxes(), v2.Resize(8))
        assert not report.bad and columns["boxes"].shape == (1, rows, 4)


def test_what_a_users_transform_makes_of_boxes_is_the_users() -> None:
    class Shares(v2.Transform):
        def forward(self, record: dict[str, Any]) -> dict[str, Any]:
            height, width = record["image"].shape[-2:]
            sides = torch.tensor([width, height, width, height])
            return {**record, "boxes": record["boxes"] / sides}

    last = v2.Compose([v2.RandomHorizontalFlip(1), Shares()])
    columns, _ = run([boxed([[10, 5, 30, 21]], width=40)], DecodeImage(), Boxes(), last)
    assert columns["boxes"][0] == pytest.approx(np.array([[0.25, 0.125, 0.75, 0.525]]))


class Halve(RecordTransform):
    """Shrinks the image, and forgets the mask."""

    random = False

    def __call__(self, record: dict[str, Any], rng: Any) -> dict[str, Any]:
        return {**record, "image": record["image"][::2]}


def unlike(*shape: int) -> dict[str, Any]:
    return {"mask": encoded(np.zeros(shape, np.uint8))}


POINTS = {"keypoints": np.ones((5, 3))}
NUMBERS = np.kron(np.arange(12).reshape(3, 4), np.ones((8, 8))).astype(np.uint8)
LOSSY = "a lossy compression"
UNFIT: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "other size": (unlike(20, 29), [CROP], "mask has size (20, 29), its"),
    "other size, no transform": (unlike(20, 29), [], "mask has size (20, 29), its"),
    "image changed alone": ({}, [Halve()], "mask has size (20, 30), its image (10, 30)"),
    "colours": (unlike(20, 30, 3), [], "a PNG of mode RGB holds no class"),
    "no image": ({"mask": b"<html>404"}, [], "mask: not an image (first bytes b'<html>40')"),
    "text": ({"mask": "a.png"}, [], "mask is a str, not a mask"),
    "NULL": ({"mask": None}, [], "column 'mask' is NULL"),
    **{f: ({"mask": encoded(NUMBERS, f)}, [], LOSSY) for f in ("JPEG", "AVIF", "WEBP")},
    "JPEG in TIFF": ({"mask": encoded(NUMBERS, "TIFF", compression="jpeg")}, [], LOSSY),
    "white is zero": ({"mask": encoded(NUMBERS, "TIFF", tiffinfo={262: 0})}, [], "inverted"),
    "PGM": ({"mask": b"P5 32 24 15\n" + NUMBERS.tobytes()}, [], "inverted or scaled"),
    "a wrong checksum": ({"mask": flipped(encoded(NUMBERS), 50)}, [], "checksum of the PNG's b'ID"),
    "key points with visibility": (POINTS, [KeyPoints()], "key points are … × 2"),
    "flat boxes": ({"boxes": [1, 2, 3, 4]}, [Boxes()], "boxes are number × 4"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_part_that_does_not_fit_its_image_is_quarantined(case: str) -> None:
    change, entries, expected = UNFIT[case]
    columns, report = run([{**pair("1"), **change}], *DECODE, *entries)
    assert not columns and expected in reasons(report)[0]


def test_rows_that_go_with_boxes_are_not_those_of_a_mask() -> None:
    boxes = np.array([[0, 0, 9, 3], [1, 1, 1, 1], [2, 0, 9, 2]], np.float32)
    record = {"image": np.zeros((3, 60, 3), np.uint8), "boxes": boxes}
    entries = [DecodeMask(), Boxes(), v2.SanitizeBoundingBoxes(labels_getter=None)]
    _, report = run([{"key": "a", **record, "mask": np.zeros((3, 60), np.uint8)}], *entries)
    assert "mask has size (2, 60), its image (3, 60)" in reasons(report)[0]
    instances = np.zeros((3, 3, 60), np.uint8)
    columns, _ = run([{"key": "b", **record, "mask": instances}], *entries)
    assert columns["mask"].shape == (1, 2, 3, 60)


@pytest.mark.parametrize(
    "entry", [DecodeMask("maks"), Boxes("maks"), DecodeVideo(2, column="maks")]
)
def test_a_misspelt_column_is_named_with_the_closest(entry: Any) -> None:
    _, report = run([pair("0")], DecodeImage(), ("stage", entry))
    line = "stage: LookupError: no column 'maks'; did you mean mask? (columns: image, mask)"
    assert reasons(report) == [line]


def palette() -> bytes:
    image = Image.fromarray(NUMBERS, "P")
    image.putpalette([255 - i % 256 for i in range(768)])
    return spoilt.encoded("PNG", image)


def opened(content: bytes, loaded: bool = True) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    if loaded:
        image.load()
    return image


BLACK = np.zeros((24, 32, 3), np.uint8)
PLANES = np.arange(12)[:, None, None] == NUMBERS
CLASSES: dict[str, tuple[Any, Any]] = {
    **{
        f"{kind} {options}": (encoded(NUMBERS, kind, **options), NUMBERS)
        for kind in ("PNG", "DDS", "TIFF", "BMP", "GIF", "PPM", "TGA")
        for options in ([{}, {"compression": "tiff_lzw"}] if kind == "TIFF" else [{}])
    },
    "2 bits": (encoded(NUMBERS % 4, bits=2), NUMBERS % 4),
    "4 bits": (encoded(NUMBERS, bits=4), NUMBERS),
    "16 bits": (encoded(NUMBERS.astype(np.uint16) * 300), NUMBERS.astype(np.int32) * 300),
    "memory": (memoryview(encoded(NUMBERS)), NUMBERS),
    "palette": (palette(), NUMBERS),
    "a Pillow image": (Image.fromarray(NUMBERS), NUMBERS),
    "0 and 255": (Image.fromarray(NUMBERS % 2 * 255), NUMBERS % 2 * 255),
    "multiples of 17": (Image.fromarray(NUMBERS * 17), NUMBERS * 17),
    "of 4 bits that Pillow has read": (opened(encoded(NUMBERS, bits=4)), NUMBERS * 17),
    "an opened palette": (opened(palette(), loaded=False), NUMBERS),
    "black and white": (Image.fromarray(NUMBERS > 5), NUMBERS > 5),
    "an array": (NUMBERS.astype(np.int64), NUMBERS.astype(np.int64)),
    "one plane for each class": (PLANES, PLANES),
    "a tensor": (torch.from_numpy(NUMBERS), NUMBERS),
}


@pytest.mark.parametrize("case", CLASSES)
def test_the_numbers_of_a_mask_are_its_classes(case: str) -> None:
    mask, expected = CLASSES[case]
    columns, report = run([{"key": "a", "image": BLACK, "mask": mask}], *DECODE)
    assert not report.bad
    assert np.array_equal(columns["mask"][0], expected)
    assert columns["mask"].dtype == (np.uint8 if case == "black and white" else expected.dtype)


def test_corners_of_a_rotated_mask_get_the_number_that_the_recipe_fills_in() -> None:
    fill = {tv_tensors.Mask: 255, tv_tensors.Image: 0}
    columns, _ = run([pair("0")], *DECODE, v2.RandomRotation((45, 45), fill=fill))
    corner = columns["mask"][0, 0, 0], *columns["image"][0, :, 0, 0]
    assert [*map(int, corner)] == [255, 0, 0, 0]


@pytest.mark.parametrize("size", [(20, 40), (48, 64), (33, 45)])
def test_the_segmentation_example_does_not_score_what_it_adds_to_small_images(
    size: tuple[int, int],
) -> None:
    from recipes.segmentation import Shapes

    mask = np.random.default_rng(0).integers(0, 3, size).astype(np.uint8)
    record = {"key": "a", "image": encoded(np.repeat(mask[..., None], 3, 2)), "mask": encoded(mask)}
    columns, _ = run([record], *Shapes(data="").preprocess("val"))
    found, image = columns["mask"][0], columns["image"][0, 0]
    assert found.shape == (32, 32) and ((found == image) | (found == 255)).all()
    assert (found != 255).sum() == min(size[0], 32) * 32
    if min(size) > 32:
        assert (found == v2.CenterCrop(32)(torch.from_numpy(mask)).numpy()).all()


CORNER = np.zeros((16, 24), np.uint8)
CORNER[:8, :6] = 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("turn", [3, 6, 8])
def test_a_photo_that_exif_turns_away_from_its_parts_is_quarantined_until_exif_is_set(
    turn: int, kind: str
) -> None:
    photo = encoded(np.repeat(CORNER[..., None] * 255, 3, 2), kind, turn)
    parts: dict[str, tuple[Any, Any]] = {
        "mask": (encoded(CORNER), DecodeMask("mask")),
        "boxes": ([[0, 0, 6, 8]], Boxes("boxes")),
        "keypoints": ([[0, 0]], KeyPoints("keypoints")),
    }
    for name, (value, entry) in parts.items():
        record = {"key": "a", "image": photo, name: value}
        _, report = run([record], DecodeImage(), entry)
        assert f"does not turn the image and {name} alike: set" in reasons(report)[0]
        columns, _ = run([record], DecodeImage(exif=False), entry)
        assert ((columns["image__hwc"][0, ..., 0] > 128) == CORNER).all()
        columns, _ = run([record], DecodeImage(exif=True), Drop(name))
        upright = columns["image__hwc"][0, ..., 0] > 128
        assert upright.shape != CORNER.shape or (upright != CORNER).any()
        assert not run([record], DecodeImage(), Drop(name))[1].bad, "nothing declares it"


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize(
    ("of_image", "of_mask"), [(2, 2), (3, 3), (6, 6), (8, 8), (1, 3), (6, 3), (3, 1)]
)
def test_a_mask_is_turned_by_an_exif_of_its_own(of_image: int, of_mask: int, kind: str) -> None:
    square = np.ascontiguousarray(CORNER[:, :16])
    photo = encoded(np.repeat(square[..., None] * 255, 3, 2), "JPEG", of_image, quality=100)
    record = {"key": "a", "image": photo, "mask": encoded(square, kind, of_mask)}
    columns, report = run([record], DecodeImage(), DecodeMask())
    if of_image == of_mask:
        assert ((columns["image__hwc"][0, ..., 0] > 128) == columns["mask"][0]).all()
    else:
        assert "EXIF does not turn the image and mask alike: set" in reasons(report)[0]
    for chain in ([DecodeImage(exif=False), DecodeMask()], [DecodeMask(), DecodeImage(exif=False)]):
        columns, _ = run([record], *chain)
        assert ((columns["image__hwc"][0, ..., 0] > 128) == square).all()
        assert (columns["mask"][0] == square).all()


def test_a_mask_that_is_decoded_before_the_image_is_refused_since_its_exif_is_lost() -> None:
    with pytest.raises(UsageError, match=r"put DecodeImage\(\) before DecodeMask\(\)"):
        run([], DecodeMask(), DecodeImage())


def test_a_decoder_of_the_users_own_need_not_call_the_constructor_of_stokers() -> None:
    class Grey(DecodeImage):
        def __init__(self) -> None:
            self.mode, self.bits = "L", None

    columns, report = run([{"key": "a", "image": encoded(NUMBERS)}], Grey())
    assert not report.bad and columns["image__hwc"].shape == (1, 24, 32, 1)


def test_the_answer_of_the_text_example_does_not_depend_on_the_padding() -> None:
    from recipes.text import Reviews

    torch.manual_seed(1)
    model = Reviews(data="").model().eval()
    ids = torch.tensor([[5, 9, 2, 0, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0, 0, 0]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[:1], model(ids[:1, :3]))
        torch.testing.assert_close(model(ids)[1:], model(ids[1:, :1]))
