"""A project as `init` writes it trains at once. Its other kinds, without a run: tests/unit/test_init.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from commands import ROOT, submit


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


def test_a_lightning_project_resumes_within_an_epoch(tmp_path: Path) -> None:
    """Stopped after 40 of 60 steps, in the second epoch of 32 steps: the weights of a run without a stop."""
    written = submit("init", "lit", "--kind", "lightning", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    saved = tmp_path / "saved"
    for steps in ("40", "60"):
        done = submit("lit/job.yaml", f"checkpoint.dir={saved}", "--", "--steps", steps, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "whole").mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "STOKER_"))}
    environment |= {"PYTHONPATH": str(ROOT / "source_dir"), "STOKER_LOADER": "process"}
    environment["STOKER_CHECKPOINT_DIR"] = str(tmp_path / "whole")
    script = [sys.executable, str(tmp_path / "lit/train.py"), "--steps", "60"]
    alone = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    ours, whole = (
        torch.load(folder / "last.ckpt", weights_only=True) for folder in (saved, tmp_path / "whole")
    )
    assert ours["global_step"] == whole["global_step"] == 60
    for name, weights in whole["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], weights), name
