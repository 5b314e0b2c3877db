"""What a user gets for broken recipes and broken data: one clear line, the right exit code, no traceback.

All ways of getting the data wrong stand in `test_bad_data`; here is one, as a whole job.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import run_job
from spoilt import cut
from streaming import Train

from stoker.config.schema import Config
from stoker.errors import DataError


def copied(form: str, name: str) -> Callable[[Path, Path], dict[str, Any]]:
    """A copy of the digits in which one file is cut in half."""

    def make(data: Path, digits: Path) -> dict[str, Any]:
        shutil.copytree(digits / form, data)
        file = sorted(data.glob(name))[0]
        file.write_bytes(cut(file.read_bytes()))
        params = {"data": str(data), "num_classes": 10, "image_size": 32}
        return {"recipe": "ImageClassification", "params": params}

    return make


def recipe(name: str, **params: Any) -> Callable[[Path, Path], dict[str, Any]]:
    return lambda data, digits: {"recipe": name, "params": params}


def raises(where: str) -> Callable[[Path, Path], dict[str, Any]]:
    return recipe("rows:RaisesIn", where=where)


BEFORE_TRAINING = {
    "not a recipe": (recipe("rows:NOT_A_RECIPE"), "is not a Recipe class"),
    "unknown parameter": (recipe("rows:Counting", train_record=3), "did you mean train_records?"),
    "wrong parameter type": (recipe("rows:Counting", train_records="x"), "params.train_records: "),
    "missing parameter": (recipe("rows:RaisesIn"), "params.where: is required"),
    "read raises": (raises("read"), "RaisesIn.read('train') failed: RuntimeError"),
    "preprocess raises": (raises("preprocess"), "broken preprocess (rows.py:"),
    "reads nothing": (recipe("rows:Nothing"), "returned nothing to train on"),
    "no model": (recipe("rows:NoModel"), "NoModel does not say what to train: define model()"),
    "zero records": (recipe("rows:Nothing", empty=True), "the dataset is empty"),
    "a cut tar": (copied("webdataset", "train/*0002.tar"), "shard-0002.tar: not a whole tar shard"),
}
UNWRITABLE = "checkpoint.dir: /proc/sys/checkpoints cannot be written: "
BY_OVERRIDE = {
    "checkpoint.dir=/proc/sys/checkpoints": UNWRITABLE,
    "data.preprocess_on=[cpus]": "no host in group cpus; available: ",
}
TOO_MANY = "1 of 1437 train records cannot be used, more than data.bad_record_budget allows (0.00%;"
IN_TRAINING = {
    "every record fails": (raises("record"), "Fails: ValueError: cannot be used"),
    "training_step raises": (raises("training_step"), "broken training_step (rows.py:"),
    "the loss is not a number": (raises("nan"), "the loss is nan by step 1"),
    "a cut JPEG": (copied("images", "train/3/*"), TOO_MANY),
}
"""Each ends in another place: the step, the check of the loss, the data."""

IN_THE_CHAIN = {
    "a batch stage raises": (raises("batch"), "stage fails: ValueError: no such batch"),
    "a stage loses records": (raises("loses"), "a chain must keep every record"),
}
"""What the train workers are told, and end with as "a cut JPEG" does."""


def check(folder: Path, digits: Path, make: Any, expected: str, code: int, *overrides: str) -> None:
    sections = make(folder / "data", digits)
    train = {"epochs": 1, "batch_size": 16}
    outcome = run_job(folder, "data.bad_record_budget=0", *overrides, train=train, **sections)
    error = outcome.summary.error or ""
    assert expected in error
    assert outcome.code == code
    assert len(error.splitlines()) == 1
    assert "Traceback" not in error
    if outcome.run_dir.exists():
        assert outcome.summary.status == "failed"
        assert (outcome.run_dir / "config.yaml").is_file()


@pytest.mark.parametrize("case", BEFORE_TRAINING)
def test_refused_before_training(
    case: str, ray_cluster: None, tmp_path: Path, digits: Path
) -> None:
    make, expected = BEFORE_TRAINING[case]
    check(tmp_path, digits, make, expected, 2)


@pytest.mark.parametrize("override", BY_OVERRIDE)
def test_a_wrong_value_is_refused(
    override: str, ray_cluster: None, tmp_path: Path, digits: Path
) -> None:
    check(tmp_path, digits, recipe("rows:Counting"), BY_OVERRIDE[override], 2, override)


def test_a_model_folder_that_cannot_be_written_costs_no_step(
    ray_cluster: None, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/model").touch()
    outcome = run_job(tmp_path, recipe="rows:Counting", train={"epochs": 1, "batch_size": 16})
    assert outcome.code == 2 and outcome.summary.steps == 0
    error = f"model: {tmp_path}/run/model cannot be written: Not a directory"
    assert outcome.summary.error == error


@pytest.mark.parametrize("case", IN_TRAINING)
def test_fails_while_training(case: str, ray_cluster: None, tmp_path: Path, digits: Path) -> None:
    make, expected = IN_TRAINING[case]
    check(tmp_path, digits, make, expected, 1)


@pytest.mark.parametrize("case", IN_THE_CHAIN)
def test_the_data_side_says_why_it_ends(
    case: str, ray_cluster: None, tmp_path: Path, digits: Path
) -> None:
    make, expected = IN_THE_CHAIN[case]
    sections = make(tmp_path / "data", digits)
    job = {"data": {"bad_record_budget": 0}, "train": {"epochs": 1, "batch_size": 16}, **sections}
    train = Train(Config.model_validate(job))
    with pytest.raises(DataError) as told:
        list(train.steps("train", 0))
    assert expected in str(told.value)
    train.close()
