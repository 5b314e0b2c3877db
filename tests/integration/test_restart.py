"""A train worker that dies costs its epoch, not the run, and loses no record."""

from __future__ import annotations

from pathlib import Path

from running import run_job


def test_a_killed_train_worker_is_restarted_from_the_last_checkpoint(
    ray_cluster: None, tmp_path: Path
) -> None:
    outcome = run_job(
        tmp_path,
        recipe="rows:DiesOnce",
        params={"train_records": 96, "val_records": 10, "marker": str(tmp_path / "marker")},
        train={"epochs": 3, "batch_size": 8, "workers": 2, "lr": 0.001, "max_failures": 1},
    )
    assert outcome.code == 0, outcome.summary.error
    resumed = [event for event in outcome.summary.events if event["event"] == "resumed"]
    assert [event["epoch"] for event in resumed] == [1]
    trained = [e["trained"] for e in outcome.summary.records.epochs if e["split"] == "train"]
    assert trained == [96, 96, 96]
    assert outcome.summary.steps == 18


def test_without_restarts_the_cause_is_named(ray_cluster: None, tmp_path: Path) -> None:
    outcome = run_job(
        tmp_path,
        recipe="rows:DiesOnce",
        params={"train_records": 96, "marker": str(tmp_path / "marker")},
        train={"epochs": 3, "batch_size": 16},
    )
    assert outcome.code == 1
    assert "died" in (outcome.summary.error or "")
    assert len((outcome.summary.error or "").splitlines()) == 1
