"""A train worker that dies ends the run with its cause, or restarts it; never from nothing in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
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


def test_a_restart_without_the_last_checkpoint_fails_and_names_it(
    ray_cluster: None, tmp_path: Path
) -> None:
    outcome = run_job(
        tmp_path,
        recipe="rows:LosesItsDisk",
        params={
            "train_records": 96,
            "marker": str(tmp_path / "marker"),
            "run_dir": str(tmp_path / "run"),
        },
        train={"epochs": 3, "batch_size": 16, "max_failures": 1},
        data={"order": "exact"},
    )
    error = outcome.summary.error or ""
    assert outcome.code == 1, (
        f"{outcome.summary.epochs} epochs, {outcome.summary.steps} steps: {error}"
    )
    assert f"{tmp_path}/run/checkpoints/step-00000006, the last checkpoint of this run" in error
    assert "checkpoint.dir must be s3:// or a folder that they share" in error
    assert "\n" not in error


@pytest.mark.parametrize("seconds", [2, 3])
def test_train_workers_wait_for_a_host_as_long_as_hosts_may_take_to_join(
    ray_cluster: None, tmp_path: Path, seconds: int
) -> None:
    outcome = run_job(
        tmp_path,
        recipe="rows:Counting",
        train={"epochs": 1, "batch_size": 16},
        cluster={"join_timeout_s": seconds},
        train_group="not there",
    )
    error = outcome.summary.error or ""
    assert outcome.code == 1 and "could not start the train workers" in error
    assert f"timed out after {seconds}.0 seconds" in error


def test_a_rank_that_validates_for_longer_than_data_may_stall_holds_up_the_others(
    ray_cluster: None, tmp_path: Path
) -> None:
    """Three batches of 11 s, against 30 s: no more than the start of processes may take on a busy machine."""
    outcome = run_job(
        tmp_path,
        recipe="rows:SlowFirstRank",
        params={"train_records": 32, "val_records": 24, "seconds": 11.0},
        data={"stall_timeout_s": 30},
        train={"epochs": 1, "batch_size": 4, "workers": 2},
    )
    assert outcome.code == 0, outcome.summary.error
