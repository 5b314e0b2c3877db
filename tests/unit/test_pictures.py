"""Sample images: a batch of whatever kind becomes small PNG files, or nothing, and never a failed run."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stoker.config.schema import Config
from stoker.events.recorder import Recorder
from stoker.events.runs import read_run
from stoker.events.sinks import Tracking
from stoker.events.summary import Summary
from stoker.events.tensorboard import Board
from stoker.recipe import Recipe
from stoker.train.sample_images import MOST, as_picture, pictures, show_once
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


def worker(log: Log, rank: int = 0) -> Worker:
    return Worker(Config(), Recipe(), log, 0, rank, 1, torch.device("cpu"))


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
