"""A LightningModule trains unchanged on Stoker's data; a run of it cannot be resumed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from running import Outcome, run_job
from test_stop_in_validation import when

from stoker.entry import driver

pytest.importorskip("lightning")


def lit_job(
    folder: Path, digits: Path, *overrides: str, run_dir: Path | None = None, **train: Any
) -> Outcome:
    folder.mkdir()
    return run_job(
        folder,
        *overrides,
        run_dir=run_dir,
        recipe="stoker.train.lightning_recipe:LightningRecipe",
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


def test_it_trains_and_a_run_that_has_begun_is_never_continued(
    ray_cluster: None, digits: Path, tmp_path: Path
) -> None:
    """A job whose two train workers import Lightning each."""
    whole = lit_job(tmp_path / "whole", digits)
    assert whole.code == 0, whole.summary.error
    assert whole.summary.steps == 3 * 23
    for epoch in range(3):
        ids = trained_ids(whole, epoch)  # of 1437 one remains over
        assert len(ids) == sum(ids.values()) == 1436
    metrics = whole.summary.metrics
    assert metrics.best["val/acc1"] > 0.85
    assert metrics.last["val/callback"] == 2, "the module's own callback"
    assert metrics.last["lr"] == pytest.approx(3e-3 / 8), "the module's own schedule"
    for folder, words in (
        ("named", [f"checkpoint.resume={whole.run_dir}"]),
        ("kept", [f"checkpoint.dir={whole.run_dir}/checkpoints"]),
    ):
        again = lit_job(tmp_path / folder, digits, *words)
        assert again.code == 2 and "stoker.DataLoader" in (again.summary.error or ""), again.summary.error
        assert not again.run_dir.exists(), "refused before a cluster forms"
    # The run's own folder, which services name only with the cluster.
    again = lit_job(tmp_path / "again", digits, run_dir=whole.run_dir)
    assert again.code == 2 and "LitDigits" not in (again.summary.error or "")
    assert "checkpoint.resume: LightningRecipe cannot" in (again.summary.error or "")


def test_a_stopped_run_does_not_end_as_if_it_were_complete(
    ray_cluster: None, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_stop_reason", "")
    events = tmp_path / "job/run/events.jsonl"
    stepped = lambda: events.is_file() and '"event": "step"' in events.read_text()  # noqa: E731
    with when(stepped, lambda: driver.request_stop("SIGTERM")):
        stopped = lit_job(tmp_path / "job", digits, epochs=500)
    assert (stopped.code, stopped.summary.status) == (143, "interrupted"), stopped.summary.error
    assert stopped.summary.epochs < 500


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lr=0.1"], "train.lr: has no effect with LightningRecipe"),
        (["params.trainer.max_epochs=3"], "params.trainer.max_epochs: is set by train.epochs"),
        (["params.trainer.gradient_clip=3"], "lightning.Trainer has no such argument"),
        (["checkpoint.every_steps=5"], "checkpoint.every_steps: not with LightningRecipe"),
        (["checkpoint.every_minutes=5"], "checkpoint.every_minutes: not with LightningRecipe"),
        (["train.max_failures=1"], "train.max_failures: not with LightningRecipe"),
        (["params.module=lit:Counter"], "is not a LightningModule class"),
        (["params.module=lit:LitDigit"], "did you mean LitDigits"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    digits: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    outcome = lit_job(tmp_path / "job", digits, *overrides)
    assert outcome.code == 2 and message in (outcome.summary.error or "")
