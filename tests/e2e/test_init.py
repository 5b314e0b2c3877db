"""A project as `init` writes it trains at once. Its other kinds, without a run: tests/unit/test_init.py."""

from __future__ import annotations

import json
from pathlib import Path

from commands import submit


def test_a_new_project_trains_as_it_is(tmp_path: Path) -> None:
    written = submit("init", "homes", "--kind", "tabular", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    before = {path.name for path in (tmp_path / "homes").iterdir()}
    done = submit("homes/job.yaml", "train.epochs=1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs/latest/summary.json").read_text())
    assert summary["records"]["trained"] == summary["records"]["read"] == 6000
    assert summary["metrics"]["last"]["val/mae"] < 0.5
    assert {path.name for path in (tmp_path / "homes").iterdir()} - {"__pycache__"} == before
