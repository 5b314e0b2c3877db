"""What lies beside an image and is about places in it moves with the image, or the run is refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.chain.probing import fix_schemas
from stoker.data import DecodeImage, Drop, Joint, RecordTransform, Rename, read_torch
from stoker.errors import UsageError

SIZE = (40, 60)
FLIP = v2.RandomHorizontalFlip(1.0)
BOXES = np.array([[0, 0, 20, 40]], np.float32)


def photo(size: tuple[int, int] = SIZE) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.zeros((*size, 3), np.uint8)).save(content, "PNG")
    return content.getvalue()


class Given:
    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return dict(self.records[number])


def note_of(records: Any, *entries: Any) -> str:
    """What a run says of the records before it begins; it may refuse them."""
    chain = Chain(as_stages([*entries]), seed=0)
    chain.collate = lambda records: {
        "text": [str(one.get("label")) for one in records]
    }  # takes lists, too
    given = Given(records if isinstance(records, list) else [records] * 4)
    fix_schemas({"train": read_torch(given)}, {"train": chain}, 4)
    return chain.note


PLACES: dict[str, Any] = {
    "boxes": BOXES,
    "gtBboxes_xyxy": BOXES.tolist(),
    "keypoints": np.ones((17, 3), np.float32),
    "polygons": [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0]],
    "segmentation": [[np.float32(1)]],
    "damaged": np.zeros(SIZE, bool),
    "plane": np.zeros((1, *SIZE), np.uint8),
    "lesionMask": np.ones((1, *SIZE), np.int64),
    "objects": [{"bbox": [0.0, 0.0, 20.0, 40.0]}],
    "masks": np.zeros((2, *SIZE), bool),
    "classes": torch.zeros(SIZE, dtype=torch.int64),
}


@pytest.mark.parametrize("name", PLACES)
def test_what_is_about_places_in_the_image_does_not_stay_where_a_random_flip_moves_it(
    name: str,
) -> None:
    record = {"image": photo(), name: PLACES[name]}
    with pytest.raises(
        UsageError, match=f"train: chain: RandomHorizontalFlip moves .* those of {name}; put"
    ):
        note_of(record, DecodeImage(), FLIP)
    left = f"RandomHorizontalFlip in Joint moves .* not those of {name}; name"
    if "box" in name.lower() or name == "objects":  # the Joint may have them in another column
        note = note_of(record | {"found": BOXES}, DecodeImage(), Joint(FLIP, boxes=["found"]))
        assert f"not those of {name}; name" in note and note.endswith(
            "unless it shows something else"
        )
    else:
        with pytest.raises(UsageError, match=left):
            note_of(record | {"found": BOXES}, DecodeImage(), Joint(FLIP, boxes=["found"]))
    for fine in (
        v2.RandomHorizontalFlip(0.0),
        v2.Resize((8, 8)),
        v2.ColorJitter(),
        Joint(v2.Resize((8, 8)), masks=[]),
    ):
        assert note_of(record, DecodeImage(), fine) == ""
    assert note_of(record, DecodeImage(), FLIP, Drop(name)) == ""
    assert note_of(record, DecodeImage(), Drop(name), FLIP) == ""


BOTH = np.zeros((*SIZE, 3), np.uint8)


@pytest.mark.parametrize(
    ("name", "value", "size"),
    [
        ("other", BOTH, SIZE),
        ("other", BOTH.transpose(2, 0, 1), SIZE),
        ("other", BOTH.astype(np.float32), SIZE),
        ("frames", np.zeros((5, 3, *SIZE), np.uint8), SIZE),
        ("spectrogram", np.zeros((128, 128), np.float32), (128, 128)),
        ("features", np.ones((32, 32), np.float32), (32, 32)),
        ("depth", np.ones(SIZE, np.float32), SIZE),
        ("normals", np.ones((*SIZE, 3), np.float32), SIZE),
        ("landmarks", np.ones(10, np.int64), SIZE),
        ("corners", np.ones((4, 2), np.float32), SIZE),
        ("points", np.ones((5, 2), np.float32), SIZE),
        ("bbox", BOXES[0], SIZE),
        ("mail_box", np.ones(4, np.int64), SIZE),
        ("segmentation", np.array([1]), SIZE),
        ("lesionMask", np.ones(SIZE, np.float32), SIZE),
        ("attention_mask", np.ones(SIZE, bool), SIZE),
        ("json", {"face_bboxes": BOXES.tolist()}, SIZE),
    ],
)
def test_what_may_be_about_something_else_is_only_noted(name: str, value: Any, size: Any) -> None:
    line = f"chain: RandomHorizontalFlip moves the pixels of the image only, not those of {name}; put it into"
    note = note_of({"image": photo(size), name: value}, DecodeImage(), FLIP)
    assert note.startswith(line) and note.endswith("unless it shows something else")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("label", 1),
        ("attention_mask", np.ones(77, bool)),
        ("loss_mask", np.ones(77, bool)),
        ("patch_mask", np.zeros((14, 14), bool)),
        ("causal_mask", np.zeros((7, 7), bool)),
        ("text_mask", np.zeros((1, 77), bool)),
        ("patch_masks", [1, 2, 3]),
        ("num_boxes", np.array([3])),
        ("box_labels", np.ones(4, np.int64)),
        ("joint_positions", np.ones(7, np.float32)),
        ("x_max", 3),
        ("pose", np.ones(6, np.float32)),
        ("tokens", np.ones((77, 16), np.float32)),
        ("boxes", 3),
        ("points", torch.tensor(87.0)),
        ("landmark", np.array(3)),
        ("boxes", ["cereal", "shoe"]),
        ("caption", "a box"),
        ("image_size", np.array(SIZE)),
    ],
)
def test_what_is_beside_the_matter_is_not_mentioned(name: str, value: Any) -> None:
    record = {"image": photo(), name: value}
    assert note_of(record, DecodeImage(), FLIP) == ""
    assert note_of(record | {"found": BOXES}, DecodeImage(), Joint(FLIP, boxes=["found"])) == ""


class Wrap(RecordTransform):
    random = False

    def __call__(self, record: dict[str, Any], rng: Any) -> dict[str, Any]:
        made = dict(record)
        if "keypoints" in record:
            made["keypoints"] = tv_tensors.KeyPoints(record["keypoints"], canvas_size=SIZE)
        if "classes" in record:
            made["classes"] = tv_tensors.Mask(record["classes"])
        return made


class Own(v2.RandomHorizontalFlip):
    """Gets the whole record, and so can turn keypoints."""


class Made(RecordTransform):
    random = False

    def __call__(self, record: dict[str, Any], rng: Any) -> dict[str, Any]:
        return {**record, "boxes": BOXES}


def test_what_joint_or_a_transform_of_the_users_own_moves_is_not_left_behind() -> None:
    record = {"image": photo(), "found": BOXES, "keypoints": np.ones((17, 2), np.float32)}
    record["classes"] = np.zeros(SIZE, np.uint8)
    for entries in (
        [Wrap(), Joint(FLIP, boxes=["found"])],
        [v2.Resize(SIZE), Wrap(), Joint(FLIP, masks=[])],
        [Joint(v2.Resize(SIZE), boxes=["found"]), Wrap(), Joint(FLIP, boxes=["found"])],
        [Joint(v2.Compose([v2.Compose([Own(1.0)])]), boxes=["found"])],
        [Joint(Own(1.0), boxes=["found"])],
        [Joint(v2.Compose([v2.Lambda(lambda each: each), Own(1.0), FLIP]), boxes=["found"])],
    ):
        left = {} if "found" in str([getattr(e, "boxes", "") for e in entries]) else {"found"}
        assert (
            note_of({n: v for n, v in record.items() if n not in left}, DecodeImage(), *entries)
            == ""
        )
    wrapped = as_stages([DecodeImage(), Wrap(), Joint(FLIP, boxes=["found"])])
    columns, _ = Chain(wrapped, seed=0).run([{"key": "a", **record}], 0)
    assert columns["keypoints"][0, 0].tolist() == [58, 1]


def test_boxes_that_are_made_after_a_joint_need_not_be_in_it() -> None:
    record = {"image": photo(), "mask": np.zeros(SIZE, np.uint8)}
    later = [Made(), v2.Resize(8), Joint(v2.Identity(), masks=[], boxes=["boxes"])]
    assert note_of(record, DecodeImage(), Joint(FLIP, masks=["mask"]), *later) == ""


class Keep(RecordTransform):
    random = False

    def __call__(self, record: dict[str, Any], rng: Any) -> dict[str, Any]:
        return {name: record[name] for name in ("key", "image", "label")}


def test_what_does_not_reach_training_is_no_reason_to_refuse_the_run() -> None:
    record = {"image": photo(), "label": 1, "depth": np.ones(SIZE, np.float32)}
    assert note_of(record, DecodeImage(), FLIP, Keep()) == ""
    record["mask"] = np.zeros(SIZE, np.uint8)
    assert "not those of mask" in note_of(record, DecodeImage(), FLIP, Keep()), (
        "it may be the label now"
    )
    with pytest.raises(UsageError, match="not those of mask"):
        note_of(record, DecodeImage(), FLIP, Rename(classes="mask"))


class DecodeOwn(RecordTransform):
    random = False

    def __call__(self, record: dict[str, Any], rng: Any) -> dict[str, Any]:
        return {**record, "seg": np.array(Image.open(io.BytesIO(record["seg"])))}


def test_a_mask_that_a_stage_of_the_users_own_decodes_after_a_resize_is_known() -> None:
    seg = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(seg, "PNG")
    with pytest.raises(UsageError, match="not those of seg;"):
        note_of(
            {"image": photo(), "seg": seg.getvalue()},
            DecodeImage(),
            v2.Resize((8, 8)),
            DecodeOwn(),
            FLIP,
        )


def test_a_record_without_the_column_does_not_hide_it() -> None:
    records = [
        {"image": photo(), "label": 1},
        *[{"image": photo(), "label": 1, "boxes": BOXES}] * 3,
    ]
    with pytest.raises(UsageError, match="not those of boxes;"):
        note_of(records, DecodeImage(), FLIP)


def test_a_struct_that_boxes_were_made_of_may_still_be_there() -> None:
    objects = {"bbox": BOXES.tolist(), "category": [1]}
    record = {"image": photo(), "objects": objects, "boxes": BOXES}
    note = note_of(record, DecodeImage(), Joint(FLIP, boxes=["boxes"]))
    assert "not those of objects;" in note
    with pytest.raises(UsageError, match="not those of objects;"):
        note_of({"image": photo(), "objects": objects}, DecodeImage(), FLIP)


def test_a_pillow_image_in_a_column_named_mask_is_a_mask() -> None:
    record = {"image": photo(), "mask": Image.fromarray(np.zeros(SIZE, np.uint8))}
    with pytest.raises(UsageError, match="not those of mask; put it into Joint"):
        note_of(record, DecodeImage(), FLIP)


class Consume(v2.Transform):
    """Makes something else of boxes, as a transform of the user's own may."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, record: dict[str, Any]) -> dict[str, Any]:
        boxes = record.pop("boxes")
        return {**record, **({"boxes": boxes.repeat(self.kept, 1)} if self.kept else {})}


@pytest.mark.parametrize("kept", [0, 2])
def test_boxes_that_a_transform_uses_up_or_adds_are_not_removed(kept: int) -> None:
    record = {"key": "a", "image": photo(), "boxes": np.repeat(BOXES, 3, axis=0)}
    chain = Chain(as_stages([DecodeImage(), Joint(Consume(kept), boxes=["boxes"])]), seed=0)
    chain.collate = lambda records: {}
    assert not chain.run([record], 0)[1].bad


def test_a_mask_of_as_many_rows_as_there_are_boxes_keeps_them() -> None:
    size, mask = (3, 60), np.zeros((3, 60), np.uint8)
    boxes = np.array([[0, 0, 9, 3], [1, 1, 1, 1], [2, 0, 9, 2]], np.float32)
    record = {"image": photo(size), "boxes": boxes, "mask": mask}
    sanitize = v2.SanitizeBoundingBoxes(labels_getter=None)
    chain = Chain(as_stages([DecodeImage(), Joint(sanitize, boxes=["boxes"])]), seed=0)
    whole = {**record, "boxes": boxes[[0, 0, 2]]}
    instances = {**record, "mask": np.zeros((3, *size), np.uint8)}
    _, report = chain.run([{"key": "a", **record}, {"key": "b", **whole}], 0)
    assert [bad.key for bad in report.bad] == ["a"]
    assert not chain.run([{"key": "c", **instances}], 0)[1].bad
    assert "mask has 2 rows after the transform, its image does not" in report.bad[0].reason
