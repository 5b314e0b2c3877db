"""Images of the user's own: PIL pictures of any mode from a dataset, and the page on them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from damage import chained, opened_job, preprocessed, read_all
from pictured import pixels
from PIL import Image
from spoilt import of

from stoker.data import DecodeImage, read_any, read_images, read_torch
from stoker.errors import UsageError


def opened(**params: Any) -> Any:
    job = {"recipe": "pictured:Pictured", "params": params, "data": {"block_records": 4}}
    return opened_job(job)[1]


def batched(data: Any) -> Any:
    found = []
    for columns, report in preprocessed(data, records=4):
        assert not report.bad
        last = columns.get("image__hwc")
        found += list(columns["image"] if last is None else last.transpose(0, 3, 1, 2))
    return np.stack(found)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "P", "CMYK"])
@pytest.mark.parametrize("first", ["decode", "grey"])
def test_pictures_of_mixed_modes_become_rgb_or_grey(mode: str, first: str) -> None:
    expected = []
    for number in range(8):
        image = Image.fromarray(pixels(number)).convert(mode if number % 2 else "RGB")
        expected.append(np.atleast_3d(np.asarray(image.convert("L" if first == "grey" else "RGB"))))
    found = batched(opened(first=first, mode=mode))
    assert np.array_equal(found, np.stack(expected).transpose(0, 3, 1, 2))


LIKE = "differs in shape .*DecodeImage"
UNBATCHED: list[tuple[dict[str, Any], str]] = [
    (
        {"first": "nothing"},
        r"is still a PIL image \(record 0\); add DecodeImage\(\) or v2\.ToImage",
    ),
    ({"first": "image", "mode": "L"}, LIKE + r"\(\) gives all the same channels"),
    ({"first": "image", "mode": "L", "pads": True}, "pad would add black channels"),
    ({"first": "nothing", "mode": "L", "array": True}, LIKE),
]


@pytest.mark.parametrize(("params", "expected"), UNBATCHED)
def test_pictures_that_no_batch_holds_are_refused_with_the_stage_to_add(
    params: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected) as refused:
        opened(**params)
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
