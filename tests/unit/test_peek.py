"""`submit.py peek JOB`: what a look at the data shows, and which problems it finds."""

from __future__ import annotations

import base64
import importlib
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner, Result

from stoker_launcher.command_line import app


@pytest.fixture(autouse=True)
def _no_haste(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How many records are examined must not depend on the machine; the command sets Ray's environment."""
    monkeypatch.setattr("stoker_launcher.advise.peek.looking.SECONDS", 600.0)
    with mock.patch.dict(os.environ):
        yield


def peek(
    folder: Path, *words: str, recipe: str = "looked_at:LookedAt", **params: Any
) -> tuple[Result, str]:
    job, page = folder / "job.yaml", folder / "page.html"
    settings = {"name": "look", "recipe": recipe, "params": params, "train": {"batch_size": 32}}
    job.write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(app, ["peek", str(job), "--out", str(page), *words])
    return result, page.read_text() if page.is_file() else ""


def said(result: Result) -> list[str]:
    return re.findall(r"^(?:warn|error)\S* (.*)", result.output, re.M)


def pictures(page: str) -> list[Any]:
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="image', page)
    images = [Image.open(io.BytesIO(base64.b64decode(png))) for png in found]
    return [np.asarray(image.convert("RGB")) for image in images]


def test_counts_columns_types_shapes_and_costs_after_each_stage(tmp_path: Path) -> None:
    result, page = peek(tmp_path, "--n", "5", chain="batch")
    assert result.exit_code == 0, result.output
    assert "look: 60 train + 7 val records from Made" in result.output
    assert "examined 60 train records" in result.output
    assert re.search(r"read +image +uint8 +24×32×3 +0 .*\d\.\d{3}", result.output)
    assert re.search(r"note +NULL +60", result.output)
    assert re.search(r"whole +mean +float64 +0 .*\d\.\d{3}", result.output)
    assert page.count('class="tile') == 5
    assert "dropped: note" in page
    assert max(map(len, result.output.splitlines())) <= 100 or "/" in result.output
    result, page = peek(tmp_path, "--split", "val")
    assert "examined 7 val records" in result.output and page.count('class="tile') == 7


def test_nothing_of_the_data_becomes_markup(tmp_path: Path) -> None:
    _, page = peek(tmp_path, "-n", "3")
    assert "&lt;script&gt;alert(" in page
    assert "<script" not in page and "<b>1" not in page


def test_masks_and_boxes_are_drawn_where_the_chain_has_put_them(tmp_path: Path) -> None:
    _, page = peek(tmp_path, "-n", "2", chain="boxes")
    plain = peek(tmp_path, "-n", "2", chain="fine")[1]
    for flipped, straight in zip(pictures(page), pictures(plain), strict=True):
        assert flipped.shape == straight.shape == (144, 192, 3)
        # The mask covers columns 6 to 13 of 32, rows 4 to 11; flipped, columns 18 to 25.
        for image, inside, outside in ((straight, 60, 140), (flipped, 140, 60)):
            assert np.ptp(image[60, inside].astype(int)) > 60
            assert np.ptp(image[60, outside].astype(int)) < 10
    assert "1 boxes" in page


@pytest.mark.parametrize(
    ("chain", "code", "lines", "absent"),
    [
        ("fine", 0, [], ["note"]),  # the chain drops it
        ("null", 2, ["column 'note' is NULL in all 60 records", "60 × column 'note' is None"], []),
        ("shapes", 2, ["column 'image' differs in shape between records"], []),
        ("raises", 2, ["stage raises: RuntimeError: no such table"], []),
        ("counts", 0, ["the chain gives another result when the same records run again"], []),
        ("drawn", 0, [], ["another result"]),
    ],
)
def test_problems_that_are_found(
    tmp_path: Path, chain: str, code: int, lines: list[str], absent: list[str]
) -> None:
    result, page = peek(tmp_path, chain=chain)
    problems = "\n".join(said(result))
    assert [line for line in lines if line not in problems] == [], result.output
    assert [line for line in absent if line in problems] == []
    assert result.exit_code == code, "2: a run would not begin, or fail"
    assert code == 0 or 'class="tile bad"' in page, "the records are shown all the same"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.batch_size=61", "61 records × 1 train worker exceed the 60 training records"),
        ("train.workers=2", "32 records × 2 train workers exceed the 60 training records"),
        ("checkpoint.monitor=val/ac1", "no metric 'val/ac1'; did you mean val/acc1?"),
        ("train.early_stopping.monitor=val/los", "no metric 'val/los'; did you mean val/loss?"),
    ],
)
def test_settings_that_a_run_refuses_once_it_knows_the_data(
    tmp_path: Path, override: str, line: str
) -> None:
    result, _ = peek(tmp_path, override)
    assert result.exit_code == 2
    assert any(line in problem for problem in said(result)), result.output


def test_one_reason_is_one_line_whatever_the_keys(tmp_path: Path) -> None:
    """A record's key may be a digit that the reason holds, too."""
    result, _ = peek(tmp_path, recipe="looked_at:Numbered")
    (line,) = [line for line in said(result) if "ValueError" in line]
    assert line.startswith("12 × Refusing: ValueError: no frame 10 of 31 in record")


def test_a_stage_that_fails_on_some_records_says_on_which_and_why(tmp_path: Path) -> None:
    result, page = peek(tmp_path, "-n", "12", chain="broken")
    (failure,) = [line for line in said(result) if "Broken" in line]
    assert failure.startswith("15 × Broken: KeyError: 'annotation of <b>")
    assert "15 of 60 records cannot be used (25.0 %)" in "\n".join(said(result))
    assert 0 < page.count('class="tile bad"') < 12
    assert "looked_at.py:" in failure, "where it was raised"
    assert result.exit_code == 2, "all records were examined, and a run would fail"
    within, _ = peek(tmp_path, "-n", "12", "data.bad_record_budget=0.3", chain="broken")
    assert within.exit_code == 0


def test_images_in_class_folders_are_captioned_with_their_class_and_named_by_their_path(
    tmp_path: Path,
) -> None:
    counts = {"train": 40, "val": 4}
    for split, name in itertools.product(counts, ("circle", "square")):
        (tmp_path / split / name).mkdir(parents=True)
        for i in range(counts[split]):
            pixels = np.random.default_rng(i).integers(0, 255, (20, 20, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / name / f"{i}.png")
    broken = tmp_path / "train/square/7.png"
    broken.write_bytes(b"")
    result, page = peek(tmp_path, recipe="ImageClassification", data=str(tmp_path), image_size=16)
    assert any(f"; record {broken}" in line for line in said(result)), result.output
    assert {"label 0 (circle)", "label 1 (square)"} == set(re.findall(r"label \d \(\w+\)", page))


@pytest.mark.long
def test_the_examples_digits_with_their_labels(tmp_path: Path, digits: Path) -> None:
    where = str(digits / "webdataset")
    result, page = peek(tmp_path, "-n", "6", recipe="recipes.digits:Digits", data=where)
    assert result.exit_code == 0, result.output
    assert "no problems found" in result.output
    assert re.search(r"DecodeImage +image +uint8 +32×32×1", result.output)
    assert page.count('alt="as read"') == len(pictures(page)) == 6
    assert len(set(re.findall(r"<b>label \d</b>", page))) > 1, "from several places of the data"


NUMBERS = r"\d+ chars … \d+ chars[\s\S]*ids +int64 +\d+ … \d+ "
EXAMPLES = [
    ("text:Reviews", 80, NUMBERS, r">ids, \d+</p>"),
    ("audio:Tones", 40, "frames", r'alt="frames, \d+×64 of record'),
]


@pytest.mark.parametrize(("recipe", "records", "on_screen", "on_page"), EXAMPLES)
def test_text_sound_and_rows_of_any_length(
    tmp_path: Path, recipe: str, records: int, on_screen: str, on_page: str
) -> None:
    recipe = f"recipes.{recipe}"
    importlib.import_module(recipe.partition(":")[0]).write(tmp_path / "data", records)
    result, page = peek(tmp_path, "-n", "4", recipe=recipe, data=str(tmp_path / "data"))
    assert result.exit_code == 0, result.output
    assert re.search(on_screen, result.output)
    assert len(re.findall(on_page, page)) == 4


def test_data_that_only_a_ray_cluster_reads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from stoker.recipe import Recipe\n\nclass Own(Recipe):\n    def read(self, split):\n"
        "        import ray\n        return ray.data.range(20)\n"
    )
    (tmp_path / "job.yaml").write_text("recipe: own:Own\n")
    words = [str(Path(__file__).parents[2] / "launcher/submit.py"), "peek", "job.yaml"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    line = "error: peek: does not start Ray, with which this recipe reads; see its rows with dataset.take(3)"
    assert done.stderr.splitlines()[0] == line


def test_a_page_that_is_written_where_the_user_works_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("recipe: looked_at:LookedAt\n")
    result = CliRunner().invoke(app, ["peek", "job.yaml", "params.records=9"])
    assert "written: peek.html" in result.output
    assert not re.search(r'(src|href)="(?!data:)', (tmp_path / "peek.html").read_text())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.yaml", "peek.html"]


def test_a_split_without_records_is_refused(tmp_path: Path) -> None:
    result, _ = peek(tmp_path, "params.records=0")
    assert str(result.exception) == "peek: the train split has no records"


HOMES = ("{here}/my set #2", "~/my set #2", "$HOME/my set #2", "${{HOME}}/my set #2")


@pytest.mark.parametrize("typed", [*HOMES, "[my] {{set}}: 010"])
def test_a_folder_named_on_the_command_line_is_the_one_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    """Other folders lie where a part of the text would lead."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name, classes, each in (("my set", 2, 3), ("my set #2", 3, 5), ("[my] {set}: 010", 3, 5)):
        for number in range(classes * each):
            file = tmp_path / name / "train" / f"class {number % classes}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 40), (number, 0, 0)).save(file)
    data = typed.format(here=tmp_path)
    words = ["params.augment=none", "params.image_size=032", "params.model=resnet18"]
    words.append(f"params.data={data}")
    result, _ = peek(tmp_path, *words, recipe="ImageClassification")
    assert "look: 15 train records from" in result.output
    assert re.search(r"label +int64 +0 +0 … 2", result.output), result.output
    assert re.search(r"CenterCrop +image +uint8 +32×32×3", result.output), result.output
    assert "RandomResizedCrop" not in result.output  # augment=none means a centre crop
