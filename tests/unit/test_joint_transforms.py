"""Image, mask and boxes go through one transform: the same crop, the same flip, in every process."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms, tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import _geometry

from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.chain.joint import _DRAWN, _STILL, moved_alone, noting_places
from stoker.data import (
    DecodeImage,
    DecodeMask,
    DecodeVideo,
    Drop,
    Joint,
    Pad,
    RandomResizedCrop,
    RecordTransform,
)
from stoker.errors import UsageError
from stoker.protocol import BlockReport


def encoded(pixels: Any, kind: str = "PNG", mode: str | None = None) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels, mode).save(content, kind)
    return content.getvalue()


def pair(key: str, size: tuple[int, int] = (20, 30)) -> dict[str, Any]:
    mask = np.kron(
        np.random.default_rng(int(key)).integers(0, 5, (size[0] // 5, size[1] // 5)),
        np.ones((5, 5)),
    )
    mask = mask.astype(np.uint8)
    image = np.repeat(40 * mask[..., None], 3, axis=2)
    return {"key": key, "image": encoded(image), "mask": encoded(mask)}


def run(
    records: list[dict[str, Any]], *entries: Any, epoch: int = 0
) -> tuple[dict[str, Any], BlockReport]:
    return Chain(as_stages([DecodeImage(), DecodeMask(), *entries]), seed=5).run(records, epoch)


CROP = v2.Compose(
    [v2.RandomCrop(12), v2.RandomHorizontalFlip(), v2.RandomVerticalFlip(), v2.RandomRotation(90)]
)


def test_random_crops_flips_and_rotations_hit_image_and_mask_alike() -> None:
    columns, report = run([pair(str(i)) for i in range(60)], Joint(CROP))
    assert not report.bad
    image, mask = columns["image"], columns["mask"]
    assert (image.shape, mask.shape) == ((60, 3, 12, 12), (60, 12, 12))
    assert (image == 40 * mask[:, None]).all()
    assert len(np.unique(mask)) == 5


def test_each_record_and_epoch_draws_its_own_and_again_the_same() -> None:
    same = [{**pair("0"), "key": str(i)} for i in range(20)]
    first, again, later = (run(same, Joint(CROP), epoch=epoch)[0]["mask"] for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    assert len(np.unique(first, axis=0)) > 15
    assert not np.array_equal(first, later)


def test_classes_are_not_mixed_where_masks_are_resized() -> None:
    columns, _ = run([pair(str(i)) for i in range(8)], Joint(v2.Resize((13, 17), antialias=True)))
    assert set(np.unique(columns["mask"])) <= set(range(5))


def test_boxes_follow_their_image_and_those_outside_are_left_out_with_their_labels() -> None:
    def record(key: str) -> dict[str, Any]:
        mask = np.zeros((20, 30), np.uint8)
        mask[4:9, 2:8], mask[12:15, 20:29] = 1, 2
        boxes = np.array([[2, 4, 8, 9], [20, 12, 29, 15]], np.float32)
        parts = {"boxes": boxes, "labels": np.array([1, 2])}
        return {
            "key": key,
            "image": encoded(np.repeat(mask[..., None], 3, 2)),
            "mask": encoded(mask),
            **parts,
        }

    crop = v2.Compose([v2.RandomCrop(10), v2.RandomHorizontalFlip(), v2.SanitizeBoundingBoxes()])
    records = [record(str(i)) for i in range(40)]
    chain = as_stages([DecodeImage(), DecodeMask(), Joint(crop, boxes=["boxes"])])
    pads = {"boxes": Pad(0), "labels": Pad(-1)}
    columns, report = Chain(chain, seed=5, pads=pads).run(records, 0)
    assert not report.bad
    counts = set()
    for i in range(40):
        mask = columns["mask"][i]
        boxes, labels = columns["boxes"][i : i + 1].values, columns["labels"][i : i + 1].values
        counts.add(len(boxes))
        assert sorted(labels) == [c for c in (1, 2) if (mask == c).any()]
        for (x1, y1, x2, y2), label in zip(boxes.astype(int), labels, strict=True):
            rows, places = np.nonzero(mask == label)
            assert (x1, y1, x2, y2) == (places.min(), rows.min(), places.max() + 1, rows.max() + 1)
    assert counts == {0, 1}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"mask": encoded(np.zeros((20, 29), np.uint8))},
            "mask has size (20, 29), its image (20, 30)",
        ),
        (
            {"mask": encoded(np.zeros((20, 30, 3), np.uint8))},
            "a PNG of mode RGB holds no class numbers",
        ),
        ({"mask": encoded(np.zeros((20, 30), np.uint8), "JPEG")}, "a lossy compression"),
        (
            {"mask": encoded(np.zeros((20, 30), np.uint16))},
            "a PNG of mode I;16 holds no class numbers",
        ),
        ({"mask": b"<html>404"}, "mask: not an image (first bytes b'<html>40')"),
        ({"mask": np.zeros((20, 30), np.uint8)}, "mask is a ndarray, neither an encoded mask nor"),
    ],
)
def test_a_mask_that_does_not_fit_its_image_is_quarantined(
    change: dict[str, Any], expected: str
) -> None:
    columns, report = run([pair("0"), {**pair("1"), **change}], Joint(CROP))
    assert [(one.key, expected in one.reason) for one in report.bad] == [("1", True)]
    assert len(columns["mask"]) == 1


@pytest.mark.parametrize(
    "entry",
    [
        DecodeMask("maks"),
        Joint(v2.Identity(), masks=["maks"]),
        Joint(v2.Identity(), masks=[], boxes=["maks"]),
        DecodeVideo(2, column="maks"),
    ],
)
def test_a_misspelt_column_is_named_with_the_closest(entry: Any) -> None:
    _, report = run([pair("0")], ("stage", entry))
    line = "stage: LookupError: no column 'maks'; did you mean mask? (columns: image, mask)"
    assert [bad.reason for bad in report.bad] == [line]


def test_a_column_without_a_value_is_not_called_absent() -> None:
    _, report = Chain(as_stages([DecodeImage()]), seed=0).run([{"key": "a", "image": None}], 0)
    assert [bad.reason for bad in report.bad] == [
        "DecodeImage: LookupError: column 'image' is NULL"
    ]


def test_the_numbers_of_a_palette_are_the_classes_whatever_its_colours() -> None:
    numbers = np.arange(12, dtype=np.uint8).reshape(3, 4)
    image = Image.fromarray(numbers, "P")
    image.putpalette([255 - i % 256 for i in range(768)])
    content = io.BytesIO()
    image.save(content, "PNG")
    record = {
        "key": "a",
        "image": encoded(np.zeros((3, 4, 3), np.uint8)),
        "mask": content.getvalue(),
    }
    assert np.array_equal(run([record])[0]["mask"][0], numbers)


@pytest.mark.parametrize(
    ("transform", "draws"), [(v2.Resize(8), False), (CROP, True), (v2.CenterCrop(8), False)]
)
def test_a_joint_transform_that_draws_nothing_may_be_cached(transform: Any, draws: bool) -> None:
    assert Joint(transform).random is draws


def test_the_answer_of_the_text_example_does_not_depend_on_the_padding() -> None:
    from recipes.text import Reviews

    torch.manual_seed(1)
    model = Reviews(data="").model().eval()
    ids = torch.tensor([[5, 9, 2, 0, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0, 0, 0]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[:1], model(ids[:1, :3]))
        torch.testing.assert_close(model(ids)[1:], model(ids[1:, :1]))


def test_corners_of_a_rotated_mask_get_the_number_of_no_class() -> None:
    fill = {tv_tensors.Mask: 255, tv_tensors.Image: 0}
    columns, _ = run([pair("0")], Joint(v2.RandomRotation((45, 45), fill=fill)))
    corner = columns["mask"][0, 0, 0], *columns["image"][0, :, 0, 0]
    assert [*map(int, corner)] == [255, 0, 0, 0]


class OwnCrop(v2.RandomCrop):
    pass


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        (v2.RandomHorizontalFlip(), [("RandomHorizontalFlip", True)]),
        (transforms.RandomRotation(10), [("RandomRotation", True)]),
        (RandomResizedCrop(8), [("RandomResizedCrop", True)]),
        (OwnCrop(8), [("OwnCrop", True)]),
        (v2.Resize(8, antialias=True), [("Resize", False)]),
        (v2.Resize(8, antialias=False), [("Resize", False)]),
        (v2.RandomApply([v2.Resize(8)]), [("Resize", True)]),
        (
            v2.Compose([v2.ColorJitter(), v2.RandomChoice([v2.RandomAffine(3)])]),
            [("RandomAffine", True)],
        ),
        (
            v2.Compose([v2.Resize(9), v2.RandomHorizontalFlip()]),
            [("Resize", False), ("RandomHorizontalFlip", True)],
        ),
        (v2.RandAugment(), [("RandAugment", True)]),
        (v2.ColorJitter(), []),
        (v2.RandomErasing(), []),
        (Joint(v2.RandomRotation(9)), []),
    ],
)
def test_what_moves_an_image_without_its_mask(entry: Any, found: list[tuple[str, bool]]) -> None:
    for chain in ([DecodeMask(), entry], [entry, Joint(CROP)]):
        lines = moved_alone(as_stages(chain))
        assert [(text.split()[1], random) for text, random in lines] == found
    assert moved_alone(as_stages([entry])) == [], "without masks"
    assert moved_alone(as_stages([DecodeMask(), entry, Drop("mask")])) == []
    if found:
        line = moved_alone(as_stages([entry, Joint(CROP, boxes=["boxes"])]))[0][0]
        assert "not those of boxes;" in line, "a mask is not required beside boxes"


def test_all_of_torchvisions_geometric_transforms_are_known() -> None:
    there = {
        n
        for n, kind in vars(_geometry).items()
        if getattr(kind, "__module__", "") == _geometry.__name__
    }
    assert {n for n in there if isinstance(getattr(_geometry, n), type)} == _STILL | _DRAWN


def turned(pixels: Any, orientation: int, kind: str = "JPEG") -> bytes:
    exif, content = Image.Exif(), io.BytesIO()
    exif[0x112] = orientation
    Image.fromarray(pixels).save(
        content, kind, exif=exif, **({"quality": 100} if kind == "JPEG" else {})
    )
    return content.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize(
    "form", ["encoded", "Pillow", "array", "boxes", "one box", "lists", "in a struct", "structs"]
)
@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_what_lies_beside_a_photo_that_exif_turns_is_refused_unless_the_recipe_says_what_it_is_of(
    orientation: int, form: str, kind: str
) -> None:
    mask = np.zeros((16, 24), np.uint8)
    mask[:8, :6] = 1
    photo = turned(np.repeat(mask[..., None] * 255, 3, 2), orientation, kind)
    boxes = np.array([[0, 0, 6, 8]], np.float32)
    name, value = {
        "encoded": ("mask", encoded(mask)),
        "Pillow": ("mask", Image.fromarray(mask)),
        "array": ("mask", mask),
        "boxes": ("boxes", boxes),
        "one box": ("bbox", boxes[0]),
        "lists": ("gtBoxes", boxes.tolist()),
        "in a struct": ("objects", {"bbox": boxes.tolist(), "category": [1]}),
        "structs": (
            "objects",
            [{"segmentation": {"counts": "Pb", "size": [16, 24]}, "category": 1}],
        ),
    }[form]
    record = {"key": "a", "image": photo, "label": 1, "text": "two words", name: value}
    decoded = [DecodeMask()] * (form in ("encoded", "Pillow"))
    made, report = {}, {}
    for exif in (None, True, False):
        chain = as_stages(
            [DecodeImage(exif=exif), *decoded, *([Drop(name)] * (not decoded)), Drop("text")]
        )
        made[exif], report[exif] = Chain(chain, seed=0).run([record], 0)
    assert (
        not made[None]
        and f"does not turn the image and {name} alike: set" in report[None].bad[0].reason
    )
    white = {exif: made[exif]["image__hwc"][0, ..., 0] > 128 for exif in (True, False)}
    assert (white[False] == (mask > 0)).all() and white[True].shape == (
        mask.T if orientation > 4 else mask
    ).shape
    assert white[True].shape != mask.shape or (white[True] != (mask > 0)).any()


@pytest.mark.parametrize(
    "value",
    [b"BMW M3", [np.int64(1)], [np.float32(1)], [None, 1], [[1, 2]], np.eye(3), ["a", "b"], 2],
)
def test_what_tells_no_place_in_a_photo_that_exif_turns_is_no_reason_to_refuse_it(
    value: Any,
) -> None:
    photo = turned(np.zeros((16, 24, 3), np.uint8), 6)
    for name in (
        "caption",
        "pose",
        "sandbox_tags",
        "attention_mask",
        "boxes" if isinstance(value, int) else "tokens",
    ):
        chain = as_stages([DecodeImage(), Drop(name)])
        columns, report = Chain(chain, seed=0).run([{"key": "a", "image": photo, name: value}], 0)
        assert not report.bad and columns["image__hwc"].shape == (1, 24, 16, 3)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", [2, 3, 6, 8])
def test_a_mask_is_turned_by_an_exif_of_its_own(orientation: int, kind: str) -> None:
    mask = np.zeros((16, 24), np.uint8)
    mask[:8, :6] = 1
    photo = turned(np.repeat(mask[..., None] * 255, 3, 2), orientation)
    record = {"key": "a", "image": photo, "mask": turned(mask, orientation, kind)}
    for exif in (None, True):
        chain = as_stages([DecodeImage(exif=exif), DecodeMask(), Joint(v2.Identity())])
        columns, report = Chain(chain, seed=0).run([record], 0)
        assert not report.bad
        assert ((columns["image"][0, 0] > 128) == (columns["mask"][0] == 1)).all()
    chain = as_stages([DecodeImage(exif=False), DecodeMask(), Joint(v2.Identity())])
    columns, _ = Chain(chain, seed=0).run([record], 0)
    assert ((columns["image"][0, 0] > 128) == (columns["mask"][0] == 1)).all() and not (
        columns["mask"][0] - mask
    ).any()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize(("of_image", "of_mask"), [(1, 3), (1, 6), (6, 3), (3, 6), (3, 1)])
def test_a_mask_that_its_exif_turns_otherwise_than_the_image_is_refused(
    of_image: int, of_mask: int, kind: str
) -> None:
    mask = np.zeros((16, 16), np.uint8)
    mask[:8, :6] = 1
    photo = turned(np.repeat(mask[..., None] * 255, 3, 2), of_image)
    record = {"key": "a", "image": photo, "mask": turned(mask, of_mask, kind)}
    columns, report = Chain(as_stages([DecodeImage(), DecodeMask()]), seed=0).run([record], 0)
    assert (
        not columns and "EXIF does not turn the image and mask alike: set" in report.bad[0].reason
    )
    for chain in ([DecodeImage(exif=False), DecodeMask()], [DecodeMask(), DecodeImage(exif=False)]):
        columns, report = Chain(as_stages(chain), seed=0).run([record], 0)
        assert ((columns["image__hwc"][0, ..., 0] > 128) == mask).all() and (
            columns["mask"][0] == mask
        ).all()


def test_a_mask_that_is_decoded_before_the_image_is_refused_since_its_exif_is_lost() -> None:
    with pytest.raises(UsageError, match=r"put DecodeImage\(\) before DecodeMask\(\)"):
        as_stages([DecodeMask(), DecodeImage()])
    for exif in (True, False):
        as_stages([DecodeMask(), DecodeImage(exif=exif)])


def test_boxes_that_a_later_stage_reads_from_text_are_known_too() -> None:
    class Parse(RecordTransform):
        random = False

        def __call__(self, record: dict[str, Any], rng: Any) -> dict[str, Any]:
            return {**record, "found": np.array([[0, 0, 6, 8]], np.float32)}

    decode, photo = DecodeImage(), turned(np.zeros((16, 24, 3), np.uint8), 3)
    records = [{"key": "a", "image": photo, "json": b"[[0, 0, 6, 8]]"}]
    joint = [Parse(), Drop("json"), Joint(v2.Identity(), boxes=["found"])]
    columns, report = Chain(as_stages([decode, *joint]), seed=0).run(records, 0)
    assert not columns and "does not turn the image and found alike: set" in report.bad[0].reason
    columns, _ = Chain(as_stages([decode, Drop("json")]), seed=0).run(records, 0)
    assert len(columns["image__hwc"]) == 1, "the chain without boxes shares the stage"


@pytest.mark.parametrize("shape", [(64, 48, 3), (3, 64, 48), (3, 64, 3), (8, 64, 48)])
def test_a_tensor_is_height_by_width_by_channels_if_its_channels_cannot_be_first(
    shape: Any,
) -> None:
    last = shape == (64, 48, 3)
    wide = 3 if shape == (3, 64, 3) else 48
    box = np.array([[0, 10, 1, 20]], np.float32)
    record = {
        "key": "a",
        "image": torch.zeros(shape),
        "boxes": box,
        "mask": np.zeros((64, wide), np.uint8),
    }
    flip = Joint(v2.RandomHorizontalFlip(p=1), boxes=["boxes"], masks=["mask"])
    columns, report = Chain(as_stages([flip]), seed=0).run([record], 0)
    assert not report.bad and columns["image"].shape[1:] == ((3, 64, 48) if last else shape)
    assert columns["boxes"][0, 0].tolist() == [wide - 1, 10, wide, 20]
    plain = {"key": "a", "image": record["image"], "classes": record["mask"]}
    reached: dict[str, dict[str, int]] = {}
    stages = as_stages([v2.RandomHorizontalFlip()])
    Chain(noting_places(stages, reached), seed=0).run([plain], 0)
    assert "not those of classes;" in moved_alone(stages, reached)[0][0]


def test_a_decoder_of_ones_own_need_not_call_the_constructor_of_stokers() -> None:
    class Grey(DecodeImage):
        def __init__(self) -> None:
            self.mode, self.bits = "L", None

    record = {"key": "a", "image": encoded(np.zeros((4, 6), np.uint8))}
    columns, report = Chain(as_stages([Grey()]), seed=0).run([record], 0)
    assert not report.bad and columns["image__hwc"].shape == (1, 4, 6, 1)


def boxed(*boxes: Any, dtype: Any = np.float32, width: int = 60) -> dict[str, Any]:
    image = encoded(np.zeros((40, width, 3), np.uint8))
    return {"key": "a", "image": image, "boxes": np.array(boxes, dtype).reshape(-1, 4)}


@pytest.mark.parametrize(
    ("box", "format", "fits"),
    [
        ([30, 20, 10, 15], "XYXY", False),
        ([10, 20, 30, 15], "XYXY", False),
        ([np.nan, 20, 30, 35], "XYXY", False),
        ([10, 20, np.inf, 35], "XYXY", False),
        ([30, 20, 10, 15], "XYWH", True),
        ([30, 20, 10, -15], "XYWH", False),
        ([np.nan, 20, 10, 15], "XYWH", False),
        ([30, 20, 10, 15], "cxcywh", True),
        ([30, 20, 30, 20], "xyxy", True),
        ([30.0, 5, 29.99998, 9], "XYXY", True),
        ([30, 5, 29, 9], "XYXY", False),
        ([-1, -1, -1, -1], "XYXY", True),
        ([-3, 20, 70, 45], "XYXY", True),
    ],
)
def test_boxes_that_are_none_in_their_format_are_quarantined(
    box: Any, format: str, fits: bool
) -> None:
    record = boxed([1, 2, 3, 4], box)
    chain = as_stages(
        [DecodeImage(), Joint(v2.RandomHorizontalFlip(1), boxes=["boxes"], format=format)]
    )
    columns, report = Chain(chain, seed=0).run([record], 0)
    assert bool(columns) is fits
    if not fits:
        why = (
            "set `format`"
            if np.isfinite(box).all()
            else "padding; leave such rows out, `pad` adds them"
        )
        assert (
            f"{np.float32(box).tolist()} is not a box of the format {format}: {why}"
            in report.bad[0].reason
        )


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64, np.float16, np.float64])
def test_boxes_of_any_type_are_exact(dtype: Any) -> None:
    record = boxed([10, 5, 30, 21], dtype=dtype, width=300)
    enlarge = v2.Compose([v2.RandomHorizontalFlip(1), v2.Resize((90, 3000))])
    chain = as_stages([DecodeImage(), Joint(enlarge, boxes=["boxes"])])
    columns, _ = Chain(chain, seed=0).run([record], 0)
    assert columns["boxes"][0].tolist() == [[2700, 11.25, 2900, 47.25]]
    assert columns["boxes"].dtype == (np.float64 if dtype is np.float64 else np.float32)


class Normalized(v2.Transform):
    """The boxes in shares of the image, as DETR takes them."""

    def forward(self, record: dict[str, Any]) -> dict[str, Any]:
        height, width = record["image"].shape[-2:]
        return {**record, "boxes": record["boxes"] / torch.tensor([width, height, width, height])}


def test_boxes_may_become_shares_of_the_image() -> None:
    record = boxed([10, 5, 30, 21], dtype=np.int64, width=40)
    chain = as_stages(
        [
            DecodeImage(),
            Joint(v2.Compose([v2.RandomHorizontalFlip(1), Normalized()]), boxes=["boxes"]),
        ]
    )
    columns, _ = Chain(chain, seed=0).run([record], 0)
    assert columns["boxes"][0] == pytest.approx(np.array([[0.25, 0.125, 0.75, 0.525]]))


@pytest.mark.parametrize("none", [[], np.array([]), np.zeros((0, 4)), torch.zeros(0)])
def test_boxes_may_be_lists_or_absent_from_an_image(none: Any) -> None:
    chain = as_stages([DecodeImage(), Joint(v2.Identity(), boxes=["boxes"])])
    for boxes, rows in (([[10.0, 5.0, 30.0, 21.0]], 1), (none, 0)):
        columns, report = Chain(chain, seed=0).run([boxed() | {"boxes": boxes}], 0)
        assert not report.bad and columns["boxes"].shape == (1, rows, 4)


@pytest.mark.parametrize("kind", ["PNG", "memory"])
def test_a_mask_whose_checksum_is_wrong_is_quarantined(kind: str) -> None:
    whole = pair("0")
    at = whole["mask"].index(b"IDAT") + 12
    changed = whole["mask"][:at] + bytes([whole["mask"][at] ^ 1]) + whole["mask"][at + 1 :]
    value = memoryview(changed) if kind == "memory" else changed
    _, report = run([{**whole, "mask": value}], Joint(CROP))
    assert "the checksum of the PNG's b'IDAT' part is wrong" in report.bad[0].reason


@pytest.mark.parametrize(
    ("kind", "options", "fits"),
    [
        ("AVIF", {}, False),
        ("WEBP", {}, False),
        ("TIFF", {"compression": "jpeg"}, False),
        ("DDS", {}, True),
        ("TIFF", {"compression": "tiff_lzw"}, True),
        ("TIFF", {"compression": "tiff_adobe_deflate"}, True),
        ("TIFF", {}, True),
        ("BMP", {}, True),
        ("GIF", {}, True),
        ("PPM", {}, True),
        ("TGA", {}, True),
    ],
)
def test_masks_of_lossy_formats_hold_no_class_numbers(kind: str, options: Any, fits: bool) -> None:
    numbers = np.kron(np.arange(12).reshape(3, 4), np.ones((8, 8))).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(numbers).save(content, kind, **options)
    image = encoded(np.zeros((24, 32, 3), np.uint8))
    columns, report = run([{"key": "a", "image": image, "mask": content.getvalue()}])
    if fits:
        assert (columns["mask"][0] == numbers).all()
    else:
        assert "a lossy compression" in report.bad[0].reason


@pytest.mark.parametrize("given", ["bytes", "path", "file", "open", "closed", "pickled"])
@pytest.mark.parametrize(
    ("kind", "options"), [("PNG", {"bits": b}) for b in (2, 4, 8)] + [("TIFF", {})]
)
def test_the_numbers_of_a_mask_are_those_of_the_file_also_once_pillow_has_read_it(
    tmp_path: Any, given: str, kind: str, options: Any
) -> None:
    numbers = np.kron([[0, 1], [2, 3]], np.ones((8, 8))).astype(np.uint8)
    path = tmp_path / "mask"
    Image.fromarray(numbers).save(path, kind, **options)
    if given in ("file", "closed"):
        with path.open("rb") if given == "file" else Image.open(path) as file:
            mask = Image.open(file) if given == "file" else file
            mask.load()
    else:
        mask = Image.open(io.BytesIO(path.read_bytes()) if given == "bytes" else path)
        if given != "open":
            mask.load()
    mask = pickle.loads(pickle.dumps(mask)) if given == "pickled" else mask  # noqa: S301
    assert (masked(mask)[0]["mask"][0] == numbers).all()


def masked(mask: Any) -> tuple[dict[str, Any], BlockReport]:
    return run([{"key": "a", "image": encoded(np.zeros((16, 16, 3), np.uint8)), "mask": mask}])


@pytest.mark.parametrize("bits", [2, 4])
def test_a_mask_whose_numbers_pillow_has_stretched_unnoticed_is_quarantined(
    bits: int, tmp_path: Any
) -> None:
    whole = np.arange(2**bits, dtype=np.uint8)[:, None].repeat(8, 1)
    Image.fromarray(whole).save(tmp_path / "mask", "PNG", bits=bits)
    gone = Image.open(tmp_path / "mask")
    gone.load()
    (tmp_path / "mask").unlink()
    assert "are stretched from 2 or 4 bits; give its bytes" in masked(gone)[1].bad[0].reason
    assert not masked(gone.copy())[1].bad, "it may be of any file"


@pytest.mark.parametrize(
    "classes", [(0, 255), (0, 17), (0, 17, 255), (0, 17, 34), (0, 17, 18, 255)]
)
def test_classes_that_might_be_stretched_by_their_numbers_are_classes(classes: Any) -> None:
    numbers = np.resize(np.array(classes, np.uint8), (16, 16))
    assert (masked(Image.fromarray(numbers))[0]["mask"][0] == numbers).all()


@pytest.mark.parametrize("loaded", [False, True])
def test_a_tiff_whose_numbers_pillow_inverts_holds_no_class_numbers(loaded: bool) -> None:
    content = io.BytesIO()
    Image.fromarray(np.ones((16, 16), np.uint8)).save(content, "TIFF", tiffinfo={262: 0})
    mask = Image.open(content)
    assert mask.tile[0].args[0] == "L;I", "white is zero"
    if loaded:
        mask.load()
    assert "inverted" in masked(mask)[1].bad[0].reason


@pytest.mark.parametrize("size", [(20, 40), (48, 64), (33, 45)])
def test_the_segmentation_example_does_not_score_what_it_adds_to_small_images(
    size: tuple[int, int],
) -> None:
    from recipes.segmentation import Shapes

    mask = np.random.default_rng(0).integers(0, 3, size).astype(np.uint8)
    record = {"key": "a", "image": encoded(np.repeat(mask[..., None], 3, 2)), "mask": encoded(mask)}
    columns, _ = Chain(as_stages(Shapes(data="").preprocess("val")), seed=0).run([record], 0)
    found, image = columns["mask"][0], columns["image"][0, 0]
    assert found.shape == (32, 32) and ((found == image) | (found == 255)).all()
    assert (found != 255).sum() == min(size[0], 32) * 32
    if min(size) > 32:
        assert (found == v2.CenterCrop(32)(torch.from_numpy(mask)).numpy()).all()
