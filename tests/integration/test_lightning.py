"""A LightningModule trains unchanged on Stoker's data, and goes on where it was interrupted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from running import Outcome, run_job

pytest.importorskip("lightning")


def lit_job(folder: Path, digits: Path, *overrides: str, **train: Any) -> Outcome:
    folder.mkdir()
    return run_job(
        folder,
        *overrides,
        recipe="stoker.integrations.lightning:LightningRecipe",
        params={
            "data": str(digits / "webdataset"),
            "num_classes": 10,
            "image_size": 32,
            "augment": "none",
            "module": "lit:LitDigits",
            "trainer": {"gradient_clip_val": 1.0},
        },
        data={"order": "exact"},
        train={"epochs": 3, "batch_size": 32, "workers": 2, **train},
        tracking={"tensorboard": False, "record_ids": True},
    )


def trained_ids(outcome: Outcome, epoch: int) -> Counter[str]:
    files = (outcome.run_dir / "records").glob(f"train-epoch-{epoch:03d}-rank-*.txt")
    return Counter(line for file in files for line in file.read_text().split())


def test_it_trains_and_goes_on_within_an_epoch(ray_cluster: None, digits: Path, tmp_path: Path) -> None:
    """Two jobs whose two train workers import Lightning each: a part of a run, and its rest."""
    part = lit_job(tmp_path / "part", digits, max_steps=28)  # of 23 steps in an epoch
    assert part.code == 0, part.summary.error
    rest = lit_job(tmp_path / "rest", digits, f"checkpoint.resume={part.run_dir}")
    assert rest.code == 0, rest.summary.error
    assert rest.summary.steps == 3 * 23
    for epoch in (1, 2):
        ids = trained_ids(rest, epoch)  # of 1437 one remains over
        assert len(ids) == sum(ids.values()) == 1436, "what was trained before the stop counts"
    metrics = rest.summary.metrics
    assert metrics.best["val/acc1"] > 0.85
    assert metrics.last["val/callback"] == 2, "the module's own callback"
    assert metrics.last["lr"] == pytest.approx(3e-3 / 8), "the module's own schedule"
    assert rest.summary.records.validated == 3 * rest.summary.records.epochs[1]["validated"]


@pytest.mark.soak
def test_what_goes_on_ends_like_a_whole_run(ray_cluster: None, digits: Path, tmp_path: Path) -> None:
    whole = lit_job(tmp_path / "whole", digits)
    assert whole.code == 0, whole.summary.error
    part = lit_job(tmp_path / "part", digits, max_steps=whole.summary.steps // 3 + 5)
    rest = lit_job(tmp_path / "rest", digits, f"checkpoint.resume={part.run_dir}")
    assert rest.summary.steps == whole.summary.steps
    assert trained_ids(rest, 1) == trained_ids(whole, 1)
    assert rest.summary.metrics.last["val/loss"] == pytest.approx(
        whole.summary.metrics.last["val/loss"], abs=1e-4
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lr=0.1"], "train.lr: has no effect with LightningRecipe"),
        (["params.trainer.max_epochs=3"], "params.trainer.max_epochs: is set by train.epochs"),
        (["params.trainer.gradient_clip=3"], "lightning.Trainer has no such argument"),
        (["params.module=lit:Counter"], "is not a LightningModule class"),
        (["params.module=lit:LitDigit"], "did you mean LitDigits"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    digits: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    outcome = lit_job(tmp_path / "job", digits, *overrides)
    assert outcome.code == 2 and message in (outcome.summary.error or "")
