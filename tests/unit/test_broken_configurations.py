"""What a user gets for each way of getting the configuration wrong: one clear line, exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import type_command

GOOD = "name: job\nrecipe: rows:Counting\n"

CASES = {
    "misspelt section": ("trian: {epochs: 3}", [], "job.yaml: trian: unknown key; did you mean train?"),
    "misspelt key": ("train: {epoch: 3}", [], "train.epoch: unknown key; did you mean epochs?"),
    "key of another section": (
        "batch_size: 3",
        [],
        "batch_size: unknown key; did you mean train.batch_size?",
    ),
    "wrong type": ("train: {epochs: many}", [], "train.epochs: input should be a valid integer"),
    "not one of": ("data: {order: exakt}", [], "data.order: input should be 'any' or 'exact' (got 'exakt')"),
    "out of range": ("data: {bad_record_budget: 2}", [], "should be less than or equal to 1 (got 2)"),
    "bad name": ("name: 'two words'", [], "job.yaml: name: "),
    "twice the same key": ("seed: 1\nseed: 2", [], "the key 'seed' stands twice"),
    "no YAML": ("train: [1, 2", [], "job.yaml: not valid YAML: line "),
    "a list": ("- train", [], "holds a list, not keys and values"),
    "an override without a value": (
        "seed: 1",
        ["train.epochs"],
        "'train.epochs' is not of the form key=value",
    ),
    "an override into a value": ("seed: 1", ["seed.x=1"], "seed is a value, not a section"),
    "an override of the wrong type": ("seed: 1", ["train.lr=fast"], "command line: train.lr: "),
    "no such place": ("seed: 1", ["--on", "sagemakr"], "--on sagemakr: no such place"),
    "no such source folder": ("seed: 1", ["--source-dir", "nowhere"], "nowhere: no such folder"),
    "no such preparation": ("data: {prepare: 'recipes.none:write'}", [], "no module recipes.none"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line_and_exit_code_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, arguments, expected = CASES[case]
    path = tmp_path / "job.yaml"
    path.write_text(text)
    code, lines, _ = type_command([str(path), *arguments, "--dry-run"], capsys)
    assert code == 2
    assert len(lines) == 1
    assert expected in lines[0]


def test_an_absent_file_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "digits.yaml").write_text(GOOD)
    code, lines, _ = type_command([str(tmp_path / "digit.yaml")], capsys)
    assert code == 2
    assert "no such configuration file; did you mean" in lines[0]
    assert "digits.yaml" in lines[0]


def test_an_empty_file_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text("")
    code, lines, _ = type_command([str(tmp_path / "job.yaml")], capsys)
    assert code == 2
    assert "the file is empty" in lines[0]


def test_all_errors_come_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text("trian: 1\ntrain: {epochs: 0, lr: x}\n")
    code, lines, _ = type_command([str(tmp_path / "job.yaml"), "data.order=no"], capsys)
    assert code == 2
    assert len(lines) == 4
