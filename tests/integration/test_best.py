"""Which epoch is the best, what limits a run, and what the run, its model and its readers say of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from running import run_job
from safetensors.torch import load_file

from stoker import runs_dataframe
from stoker.events.bottleneck import verdict
from stoker.events.report import write_report

STEPS = 4


def test_a_late_first_batch_is_told_as_that_wait_and_not_as_a_bottleneck(
    ray_cluster: None, tmp_path: Path
) -> None:
    """Nothing else of this epoch of 60 steps takes nearly as long."""
    outcome = run_job(
        tmp_path,
        recipe="uncertain:FirstLate",
        params={"data": str(tmp_path), "train_records": 480, "pause_s": 6.0, "step_s": 0.1},
        data={"order": "exact", "shuffle": False, "block_records": 60},
        train={"epochs": 1, "batch_size": 8, "lr": 0.001},
    )
    summary = outcome.summary
    assert outcome.code == 0, summary.error
    assert (
        summary.speed.steps == 60 and 3 < summary.speed.first_wait_s == summary.speed.longest_wait_s
    )
    assert summary.bottleneck == "one_wait"
    told = verdict(summary)
    assert re.search(r"one wait explains .*: \d+\.\d s for the first batch", told.headline), told
    said = (outcome.run_dir / "logs/console.log").read_text()
    said += "".join([told.headline, *told.details, (outcome.run_dir / "report.html").read_text()])
    assert not re.search("CPU hosts help|are the bottleneck|limits the run", said)


def test_the_screen_the_summary_the_report_and_the_model_agree_on_the_best_epoch(
    ray_cluster: None, tmp_path: Path
) -> None:
    """Early stopping and the model follow one metric; a plain number has no direction, so no best.

    More rules: tests/unit/test_model_guarantees.py.
    """
    losses, by, epoch = [0.5, 0.4, 0.3, 0.6, 0.7], "val/loss", 3
    best = {
        "val/loss": 0.3
    }  # a plain number that the recipe calls acc1 has no direction, so no best
    outcome = run_job(
        tmp_path,
        recipe="scored:Scored",
        params={
            "train_records": 8 * STEPS,
            "val_records": 8,
            "steps": STEPS,
            "scores": {"acc1": [1.0, 1.0, 1.0, 0.5, 0.5]},
            "losses": losses,
        },
        train={"epochs": 5, "batch_size": 8, "early_stopping": {"monitor": by, "patience": 2}},
    )
    assert outcome.code == 0, outcome.summary.error
    summary, run_dir = outcome.summary, outcome.run_dir
    assert summary.metrics.best[by] == pytest.approx(best[by])
    assert "val/acc1" not in summary.metrics.best
    assert summary.model_from is not None
    assert (summary.model_from["epoch"], summary.model_from["metric"]) == (epoch, by)
    said = (run_dir / "logs/console.log").read_text()
    assert f"exported: epoch {epoch} by {by}" in said
    about = json.loads((run_dir / "model/model.json").read_text())
    assert (about["epoch"], about["step"]) == (epoch, epoch * STEPS)
    assert about["classes"] == ["cat", "dog"]
    assert float(load_file(run_dir / "model/model.safetensors")["bias"]) == pytest.approx(
        epoch * STEPS
    )
    frame = runs_dataframe([run_dir])
    assert frame[f"best/{by}"].tolist() == pytest.approx([best[by]])
    other = shutil.copytree(run_dir, tmp_path / "other")
    write_report([run_dir, other], tmp_path / "report.html")
    assert f"best, the model: epoch {epoch}<" in (tmp_path / "report.html").read_text()
    assert f"{by} {best[by]:g}".removesuffix(".0") in (tmp_path / "report.html").read_text()
