"""The page on training with your own images can be followed by copy and paste."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from stoker.data import read_any, read_images
from stoker.errors import UsageError

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorials/own-images.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def photos(folder: Path) -> None:
    for name in ("circle", "square"):
        (folder / name).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (40, 50), (20 * i, 0, 0)).save(folder / name / f"{i}.jpg")
    (folder / "circle/notes.txt").write_text("from the garden")


def test_images_without_a_split_are_copied_into_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    torch.export.save(
        torch.export.export(Brightest(), (example,), dynamic_shapes=batch), folder / "model.pt2"
    )
    inputs = [{"name": "image", "dtype": "uint8", "shape": ["batch", 3, 24, 24]}]
    (folder / "model.json").write_text(json.dumps({"classes": ["red", "green", "blue"], "inputs": inputs}))
    Image.fromarray(np.full((70, 50, 3), (0, 200, 0), np.uint8)).save("new.jpg")
    exec(blocks("python")[-1], {})  # noqa: S102 - as a reader does
    assert capsys.readouterr().out == "green\n"
