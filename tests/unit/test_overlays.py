"""Masks and boxes over the report's images: those of the record, in its place, or one line instead."""

from __future__ import annotations

import base64
import io
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from test_pictures import Log
from torchvision.transforms import v2

from stoker.config.schema import Config
from stoker.data import DecodeImage, DecodeMask, Joint
from stoker.recipe import Recipe
from stoker.train.sample_images import DRAWN_SIDE, Box, Overlay, Painter, color, show_once, show_predictions
from stoker.train.state import Worker

H, W = 32, 64
Region = tuple[int, int, int, int]
REGIONS: list[Region] = [(0, 0, 16, 16), (16, 32, 32, 64), (8, 8, 24, 48)]
"""Of each record: top, left, bottom, right of its only object, of class 1, 2, 3."""


class Shapes(Recipe):
    class_names = ("background", "disc", "square", "star")

    def preprocess(self, split: Any) -> list[Any]:
        joint = Joint(v2.RandomHorizontalFlip(), masks=["mask"], boxes=["boxes"], format="XYWH")
        return [DecodeImage(), DecodeMask("mask"), ("flip", joint)]


class Roads(Shapes):
    class_names = ("road", "car", "tree", "sky")


class Unnamed(Shapes):
    class_names: ClassVar[tuple[str, ...]] = ()


def masks() -> Any:
    found = torch.zeros(3, H, W, dtype=torch.uint8)
    for i, (top, left, bottom, right) in enumerate(REGIONS):
        found[i, top:bottom, left:right] = i + 1
    return found


def scores_for(numbers: Any, classes: int = 4) -> Any:
    return torch.nn.functional.one_hot(numbers.long(), classes).permute(0, 3, 1, 2).float()


def images() -> Any:
    """Grey, each of its own brightness, so that whose image is drawn can be told."""
    return torch.stack([torch.full((3, H, W), value, dtype=torch.uint8) for value in (40, 120, 200)])


def shown(split: str, batch: Any, result: Any = None, recipe: Recipe | None = None, **more: Any) -> Any:
    """(the `samples` event or None, the notes) of one batch of a split."""
    log = Log()
    worker = Worker(Config(), recipe or Shapes(), log, 0, 0, 1, torch.device("cpu"))
    if split == "train":
        show_once(worker, batch, result)
    else:
        for _ in range(2):
            show_predictions(worker, 9, batch, result, more)
    events = dict(log.events)
    return events.get("samples"), [values["text"] for name, values in log.events if name == "note"]


def pixels(png: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")).astype(int)


def painted(png: str) -> Any:
    """Where a picture of grey has colour, in the image's own height × width."""
    found = pixels(png)
    return (found.max(2) - found.min(2) > 20)[1 :: DRAWN_SIDE // W, 1 :: DRAWN_SIDE // W]


@pytest.mark.parametrize("key", ["target", "column"])
def test_each_training_image_is_under_its_own_mask(key: str) -> None:
    batch = {"image": images(), "mask": masks()}
    result = {"loss": torch.zeros(()), "preds": torch.rand(3, 4, H, W), "target": masks().long()}
    event, notes = shown("train", batch, result if key == "target" else torch.zeros(()))
    assert event["split"] == "train" and not notes
    for i, picture in enumerate(event["images"]):
        assert np.array_equal(painted(picture["png"]), masks()[i].numpy() > 0)
        assert abs(pixels(picture["png"])[-1, 40] - [40, 120, 200][i]).max() < 4, "the image shines through"
        assert "predicted" not in picture
    hexes = ["#{:02x}{:02x}{:02x}".format(*color(kind)) for kind in (1, 2, 3)]
    names = ["disc", "square", "star"]
    assert event["legend"] == [{"name": n, "color": c} for n, c in zip(names, hexes, strict=True)]


def test_a_validation_image_is_shown_under_its_target_and_under_what_was_predicted() -> None:
    wrong = masks().roll(1, 0)
    result = {"preds": scores_for(wrong).bfloat16(), "target": masks().long()}
    event, _ = shown("val", {"image": images()}, result)
    assert event["epoch"] == 9
    for i, picture in enumerate(event["images"]):
        assert np.array_equal(painted(picture["png"]), masks()[i].numpy() > 0)
        assert np.array_equal(painted(picture["predicted"]), wrong[i].numpy() > 0)
        right = 100 * (wrong[i] == masks()[i]).float().mean()
        assert picture["label"] == f"{right:.0f} % right"


@pytest.mark.parametrize(
    "preds",
    [
        (masks() > 0).float()[:, None],
        (masks() > 0) * 8.0 - 4.0,
        (masks() > 0).float() * 0.9,
        masks() > 0,
        scores_for(masks() > 0, 2) * 3,
    ],
    ids=["shares", "logits", "shares below one", "truths", "two classes"],
)
def test_predictions_of_a_binary_segmentation_in_any_form(preds: Any) -> None:
    result = {"preds": preds, "target": (masks() > 0).float()[:, None]}
    event, notes = shown("val", {"image": images()}, result)
    assert not notes
    for i, picture in enumerate(event["images"]):
        assert np.array_equal(painted(picture["predicted"]), masks()[i].numpy() > 0)
        assert picture["label"] == "100 % right"


@pytest.mark.parametrize("ignored", [255, -100, -1])
def test_ignored_pixels_are_neither_drawn_nor_judged(ignored: int) -> None:
    target = masks().long()
    target[:, :8] = ignored
    predicted = masks()
    predicted[:, :8] = 3
    event, _ = shown("val", {"image": images()}, {"preds": scores_for(predicted), "target": target})
    for i, picture in enumerate(event["images"]):
        expected = masks()[i].numpy() > 0
        expected[:8] = False
        assert np.array_equal(painted(picture["png"]), expected)
        assert picture["label"] == "100 % right"


def test_class_0_is_drawn_where_its_name_is_not_background() -> None:
    batch = {"image": images(), "mask": masks()}
    assert painted(shown("train", batch, recipe=Roads())[0]["images"][0]["png"]).all()
    event, _ = shown("train", batch, recipe=Unnamed())
    assert not painted(event["images"][0]["png"]).all()
    assert [entry["name"] for entry in event["legend"]] == ["class 1", "class 2", "class 3"]


def outlines(i: int) -> Any:
    """The frame of a record's object, one pixel wide."""
    top, left, bottom, right = REGIONS[i]
    frame = np.zeros((H, W), bool)
    frame[top:bottom, left:right] = True
    frame[top + 1 : bottom - 1, left + 1 : right - 1] = False
    return frame


def padded_boxes() -> dict[str, Any]:
    """One box for each record, x, y, width, height, and a second place that is padding."""
    boxes = torch.zeros(3, 2, 4)
    boxes[:, 1] = torch.tensor([30.0, 2.0, 20.0, 20.0])
    for i, (top, left, bottom, right) in enumerate(REGIONS):
        boxes[i, 0] = torch.tensor([left, top, right - left, bottom - top])
    labels = torch.tensor([[1, 3], [2, 3], [3, 3]])
    return {"boxes": boxes, "boxes_length": torch.ones(3, dtype=torch.int64), "labels": labels}


def test_boxes_of_a_padded_column_are_drawn_in_their_format_without_the_padding() -> None:
    event, notes = shown("train", {"image": images(), **padded_boxes()})
    assert not notes
    for i, picture in enumerate(event["images"]):
        drawn, (top, left, bottom, right) = painted(picture["png"]), REGIONS[i]
        assert drawn[outlines(i)].all()
        drawn[top:bottom, left:right] = False
        assert drawn.sum() < 0.1 * H * W, "at most the label"
    assert [entry["name"] for entry in event["legend"]] == ["disc", "square", "star"]


def as_dicts(shift: int = 0, **scores: Any) -> list[dict[str, Any]]:
    """What torchmetrics' mean average precision takes."""
    return [
        {"boxes": torch.tensor([[left + shift, top, right + shift, bottom]]), "labels": torch.tensor([i + 1])}
        | {name: torch.tensor([value]) for name, value in scores.items()}
        for i, (top, left, bottom, right) in enumerate(REGIONS)
    ]


def test_detections_are_drawn_beside_their_targets_and_the_unlikely_are_left_out() -> None:
    preds = as_dicts(scores=0.9)
    preds[1]["scores"][0] = 0.2
    preds[2] = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0)}
    event, notes = shown("val", {"image": images()}, {"preds": preds, "target": as_dicts()})
    assert not notes
    assert all(painted(picture["png"])[outlines(i)].all() for i, picture in enumerate(event["images"]))
    assert painted(event["images"][0]["predicted"])[outlines(0)].all()
    assert not painted(event["images"][1]["predicted"]).any()
    assert [p["label"] for p in event["images"]] == ["1 box", "0 boxes", "0 boxes"]


RESULT = {"preds": scores_for(masks()), "target": masks().long()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": masks().long()[:, ::2]}, "target is 3 × 16 × 64, the images 3 × 32 × 64"),
        ({"target": masks().long()[:2]}, "target is 2 × 32 × 64, the images 3"),
        ({"preds": scores_for(masks())[:, :, ::2, ::2]}, "preds is 3 × 16 × 32, the images"),
        ({"preds": scores_for(masks())[:2]}, "preds are of 2 records, the images of 3"),
        ({"target": as_dicts()[:2], "preds": as_dicts()}, "target has the boxes of 2 records"),
        (
            {"target": as_dicts(), "preds": [{**as_dicts()[0], "scores": torch.ones(2)}] * 3},
            "preds has 1 boxes, 1 labels and 2 scores",
        ),
        ({"target": [{"boxes": torch.rand(1, 4)}] * 3, "preds": as_dicts()}, "as if they were shares"),
        ({"target": [{"boxes": torch.rand(2, 5) * 30}] * 3}, "boxes of the shape 2 × 5"),
    ],
)
def test_what_does_not_fit_the_images_is_said_once_in_one_line(changes: Any, said: str) -> None:
    event, notes = shown("val", {"image": images()}, {**RESULT, **changes})
    assert event is None and len(notes) == 1
    assert said in notes[0] and len(notes[0].splitlines()) == 1


def test_training_images_whose_mask_does_not_fit_are_shown_without() -> None:
    event, notes = shown("train", {"image": images(), "mask": masks()[:, ::2], "label": torch.arange(3)})
    assert [picture["label"] for picture in event["images"]] == ["0", "1", "2"]
    assert "mask is 3 × 16 × 64" in notes[0]


@pytest.mark.parametrize(
    "result",
    [
        {"preds": torch.rand(3, 5), "target": torch.arange(3)},
        {"preds": torch.rand(3, 1, H, W), "target": torch.rand(3, H, W)},
        {"preds": torch.rand(3, 3, H, W), "target": torch.rand(3, 3, H, W)},
        {"preds": torch.rand(3, 7, 100), "target": torch.ones(3, 7, dtype=torch.int64)},
    ],
    ids=["classes", "depths", "images", "texts"],
)
def test_other_targets_draw_nothing_and_are_no_failure(result: Any) -> None:
    assert shown("val", {"image": images()}, result) == (None, [])
    assert shown("val", {"image": images(), "mask": masks()}, result) == (None, []), "and nothing else"
    event, notes = shown("train", {"image": images(), "label": torch.arange(3)}, result)
    assert [picture["label"] for picture in event["images"]] == ["0", "1", "2"] and not notes


def test_random_numbers_of_a_chain_that_is_asked_for_its_columns_are_not_trainings() -> None:
    class Draws(Shapes):
        def preprocess(self, split: Any) -> list[Any]:
            torch.rand(1), np.random.rand()
            return super().preprocess(split)

    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert shown("train", {"image": images(), "mask": masks()}, recipe=Draws())[0]["legend"]
    assert torch.equal(torch.rand(1), expected)


def test_a_box_smaller_than_a_pixel_is_drawn() -> None:
    """Also one that is a share of the image by mistake."""
    boxes = [Box(corners, 1, None) for corners in ((0.4, 0.4, 0.6, 0.6), (10.0, 10.0, 10.5, 30.0))]
    painter = Painter(())
    picture = painter.draw(Image.new("RGB", (640, 640)), Overlay(None, boxes))
    assert picture.size == (DRAWN_SIDE, DRAWN_SIDE)
    assert painter.legend()
