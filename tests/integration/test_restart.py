"""A train worker that dies without a restart ends the run with its cause; restarts: test_resume.py."""

from __future__ import annotations

from pathlib import Path

from running import run_job


def test_without_restarts_the_cause_is_named(ray_cluster: None, tmp_path: Path) -> None:
    outcome = run_job(
        tmp_path,
        recipe="rows:DiesOnce",
        params={"train_records": 96, "marker": str(tmp_path / "marker")},
        train={"epochs": 3, "batch_size": 16},
    )
    assert outcome.code == 1
    # What Ray knows of a process in the first second of its absence.
    assert any(word in (outcome.summary.error or "") for word in ("died", "unavailable"))
    assert len((outcome.summary.error or "").splitlines()) == 1
