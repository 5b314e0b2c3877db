"""Sample images: a batch of whatever kind becomes small PNG files, or nothing, and never a failed run.

Over them lie the masks and boxes of the record, in their place, or one line says why not.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from stoker.config.schema import Config
from stoker.data import DecodeImage, DecodeMask, Joint
from stoker.events.recorder import Recorder
from stoker.events.runs import read_run
from stoker.events.sinks import Tracking
from stoker.events.summary import Summary
from stoker.events.tensorboard import Board
from stoker.recipe import Recipe
from stoker.train.sample_images import (
    DRAWN_SIDE,
    MOST,
    Box,
    Overlay,
    Painter,
    as_picture,
    color,
    pictures,
    show_once,
    show_predictions,
)
from stoker.train.state import Worker


def opened(picture: dict[str, str]) -> Any:
    return Image.open(io.BytesIO(base64.b64decode(picture["png"])))


class Log:
    """Stands where the coordinator's actor handle does."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.log = self

    def remote(self, event: str, values: dict[str, Any], after: object) -> None:
        self.events.append((event, values))


def worker(log: Log, rank: int = 0, recipe: Recipe | None = None) -> Worker:
    return Worker(Config(), recipe or Recipe(), log, 0, rank, 1, torch.device("cpu"))


def test_uint8_images_are_shown_as_they_are() -> None:
    images = torch.randint(0, 256, (20, 3, 32, 24), dtype=torch.uint8)
    shown = pictures({"image": images, "label": torch.arange(20)})
    assert len(shown) == MOST and [p["label"] for p in shown[:3]] == ["0", "1", "2"]
    assert np.array_equal(np.asarray(opened(shown[5])), images[5].permute(1, 2, 0).numpy())


def test_normalised_images_are_scaled_back_one_by_one_and_large_ones_made_small() -> None:
    ramp = torch.linspace(-2, 3, 300).expand(2, 3, 200, 300).clone()
    ramp[1] *= 7
    ramp[1, 0, 0, 0] = float("nan")
    first, second = pictures({"image": ramp})
    assert opened(first).size == (96, 64) and first["label"] == ""
    assert np.asarray(opened(first)).min() < 4 and np.asarray(opened(first)).max() > 251
    assert abs(np.asarray(opened(first)).astype(int) - np.asarray(opened(second))).max() <= 30


@pytest.mark.parametrize("channels", [1, 4])
def test_grey_and_rgba(channels: int) -> None:
    (shown,) = pictures({"image": torch.rand(1, channels, 8, 8)})
    assert opened(shown).mode == ("L" if channels == 1 else "RGB")


def test_mixed_labels_are_told_with_their_shares() -> None:
    label = torch.zeros(1, 10)
    label[0, 3], label[0, 7] = 0.7, 0.3
    assert pictures({"image": torch.rand(1, 3, 8, 8), "label": label})[0]["label"] == "3 (70 %) + 7 (30 %)"


@pytest.mark.parametrize(
    "batch",
    [{}, {"x": torch.rand(4, 10)}, {"text": ["a", "b"]}, {"spectra": torch.rand(4, 13, 8, 8)}],
)
def test_batches_without_images_are_passed_over(batch: dict[str, Any]) -> None:
    assert pictures(batch) == []


def test_one_event_from_rank_0_and_no_failure_whatever_the_batch() -> None:
    log = Log()
    first = worker(log)
    batch = {"image": torch.rand(2, 3, 8, 8), "label": torch.arange(2)}
    for _ in range(3):
        show_once(first, batch)
    show_once(worker(log, rank=1), batch)
    show_once(worker(log), {"image": torch.rand(2, 3, 8, 8), "label": torch.arange(1)})
    assert [name for name, _ in log.events] == ["samples"]


def test_noise_stays_small_enough_for_a_page() -> None:
    shown = pictures({"image": torch.randint(0, 256, (16, 3, 224, 224), dtype=torch.uint8)})
    assert sum(len(p["png"]) for p in shown) < 450_000


def test_they_reach_the_events_and_tensorboard(tmp_path: Path) -> None:
    """By the head's own Recorder, as the train worker sends them."""
    log = Log()
    show_once(worker(log), {"image": torch.rand(2, 3, 8, 8), "label": torch.arange(2)})
    summary = Summary()
    tracking = Tracking(summary, [Recorder(tmp_path, summary, 0.0), Board(tmp_path)])
    tracking.take({"time": 1.0, "event": name, **values} for name, values in log.events)
    tracking.close()
    assert [p["label"] for p in read_run(tmp_path).pictures["train"].images] == ["0", "1"]
    written = b"".join(file.read_bytes() for file in (tmp_path / "tensorboard").iterdir())
    assert b"samples/0" in written and b"samples/1" in written and b"PNG" in written


@pytest.mark.parametrize("scale", [1.0, 255.0])
def test_colours_of_images_that_were_converted_to_floats_stay_what_they_are(scale: float) -> None:
    colour = torch.tensor([15.0, 47.0, 44.0]).reshape(3, 1, 1).expand(3, 32, 32)
    shown = as_picture(colour / 255 * scale)
    assert shown.getpixel((5, 5)) == (15, 47, 44), "not stretched to its own darkest and brightest value"


# ---- masks and boxes ----

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
    one = worker(log, recipe=recipe or Shapes())
    if split == "train":
        show_once(one, batch, result)
    else:
        for _ in range(2):
            show_predictions(one, 9, batch, result, more)
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
