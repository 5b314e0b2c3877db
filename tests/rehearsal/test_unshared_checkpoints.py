"""Hosts that train and do not share their checkpoints: restarts are refused before anything is trained."""

from __future__ import annotations

from pathlib import Path

from rehearsals import CHEAP, new_name

from launcher.job import Job
from launcher.places import rehearsal
from stoker.config.loading import load

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def test_restarts_are_refused_where_the_checkpoints_of_one_host_are_not_on_the_other(tmp_path: Path) -> None:
    keys = [
        *CHEAP, f"output_dir={tmp_path}", f"name={new_name()}", "recipe=rows:Counting",
        "rehearsal.hosts=gpu=2", "rehearsal.timeout_s=500",
        "train.workers=2", "train.batch_size=8", "train.epochs=1", "train.max_failures=1",
    ]  # fmt: skip
    run = rehearsal.submit(rehearsal.plan(Job(load(None, keys), RECIPES)), show=False)
    assert run.wait() == 2, run.failure_reason
    line = run.failure_reason
    assert "train.max_failures: 1 restart may land on another host, but algo-" in line
    assert "cannot see the checkpoints in /opt/ml/checkpoints of algo-" in line
    assert "set checkpoint.dir to s3:// or a folder shared by the hosts that train" in line
