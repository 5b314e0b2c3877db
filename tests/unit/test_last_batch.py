"""An epoch's last batch: one record that batch norm cannot train on is told before, or left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from inprocess import Batches, batches, no_cluster, no_ray_data, start
from last_batches import Normed, images_of
from typer.testing import CliRunner

from stoker.config.loading import load
from stoker.entry import job_checks as checks
from stoker.errors import UsageError
from stoker_launcher.command_line import app

__all__ = ["no_cluster", "no_ray_data"]


class Heavy(Normed):
    made: ClassVar[list[str]] = []

    def model(self):  # type: ignore[no-untyped-def]
        self.made.append(torch.empty(1).device.type)
        return super().model()


def refusal(
    folder: Path, *words: str, records: int = 9, batch: int = 4, norm: str = "batch"
) -> str:
    """Why a job with so many records is refused before a cluster forms; empty: it is not."""
    path = folder / "job.yaml"
    job: dict[str, Any] = {
        "name": "last",
        "recipe": "last_batches:Normed",
        "params": {"train_records": records, "norm": norm},
        "train": {"epochs": 1, "batch_size": batch, "workers": 1},
    }
    path.write_text(yaml.safe_dump(job))
    try:
        checks.check_chains(checks.check(load(path, list(words))))
    except UsageError as error:
        return "; ".join(error.problems)
    return ""


def test_a_last_batch_of_one_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    said = refusal(tmp_path)
    assert "9 records in batches of 4" in said and "batch norm" in said
    assert "data.remainder=2" in said and "train.batch_size=3" in said
    for remedy in ("data.remainder=2", "train.batch_size=3", "data.remainder=4"):
        assert refusal(tmp_path, remedy) == ""
    assert "set 2 or more" in refusal(tmp_path, batch=1)


@pytest.mark.parametrize(
    ("words", "records", "norm", "refused"),
    [
        ([], 9, "layer", False),
        ([], 9, "frozen", False),
        ([], 8, "batch", False),
        ([], 10, "batch", False),
        (["train.max_steps=2"], 9, "batch", False),
        (["train.max_steps=3"], 9, "batch", True),
        (["train.workers=2"], 9, "batch", False),
        (["train.workers=2"], 10, "batch", True),
        (["train.workers=2"], 11, "batch", True),
        (["train.workers=2"], 10, "sync", False),
        ([], 9, "sync", True),
        (["train.workers=2"], 12, "batch", False),
        (["train.workers=2", "data.remainder=pad"], 9, "batch", True),
        (["train.workers=2", "data.remainder=pad"], 11, "batch", False),
        (["train.accumulate_steps=2"], 9, "batch", True),
        (["train.accumulate_steps=2", "train.max_steps=1"], 9, "batch", False),
    ],
)
def test_only_what_would_fail_is_refused(
    tmp_path: Path, words: list[str], records: int, norm: str, refused: bool
) -> None:
    assert bool(refusal(tmp_path, *words, records=records, norm=norm)) == refused


@pytest.mark.parametrize("batch", [1, 4])
def test_a_model_without_batch_norm_is_not_loaded_for_that(tmp_path: Path, batch: int) -> None:
    Heavy.made.clear()
    assert refusal(tmp_path, "recipe=test_last_batch:Heavy", batch=batch, norm="layer") == ""
    assert Heavy.made == ["meta"]


@pytest.mark.long
def test_peek_says_it_too(tmp_path: Path) -> None:
    """An error with the number of train workers; else a warning, as GPUs may change it."""
    images_of(tmp_path / "data", 9)
    job = tmp_path / "job.yaml"
    params = {"data": str(tmp_path / "data"), "model": "resnet10t", "image_size": 32}
    job.write_text(yaml.safe_dump({"name": "peek", "params": params, "train": {"batch_size": 4}}))
    for word, code, level in (("train.workers=1", 2, "error"), ("seed=0", 0, "warning")):
        result = CliRunner().invoke(
            app, ["peek", str(job), word, "--out", str(tmp_path / "page.html")]
        )
        assert result.exit_code == code, result.output
        assert any(
            line.startswith(level) and "data.remainder=2" in line
            for line in result.output.splitlines()
        )
    result = CliRunner().invoke(
        app, ["peek", str(job), "data.remainder=2", "--out", str(tmp_path / "page.html")]
    )
    assert "batch norm" not in result.output


@pytest.mark.usefixtures("no_cluster")
def test_one_that_comes_all_the_same_is_told_in_terms_of_the_job(tmp_path: Path) -> None:
    """Where the number of records is unknown, or some of them are quarantined."""

    def data(split: str, epoch: int) -> Batches:
        return Batches(split, epoch, batches([4, 1]))

    made = start(tmp_path, data, Normed(), has_val=False, train={"epochs": 1, "batch_size": 4})
    assert isinstance(made.error, UsageError)
    assert "a batch of 1 record came" in str(made.error) and "data.remainder=2" in str(made.error)
    assert torch.is_tensor(made.worker.model[0].weight)
