"""A Lightning project as `init` writes it.

The tabular one trains in tests/e2e/test_wheel.py; the others, without a run: tests/unit/test_init.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import ROOT, submit

pytestmark = pytest.mark.long

TWICE = """
import os, runpy, sys

script = sys.argv[1]
for folder, steps in (("saved", "40"), ("whole", "60")):
    os.environ["STOKER_CHECKPOINT_DIR"] = folder
    sys.argv = [script, "--steps", steps]
    runpy.run_path(script, run_name="__main__")
"""


def test_a_lightning_project_resumes_within_an_epoch(tmp_path: Path) -> None:
    """40 of 60 steps as a script; then a job goes on in the second epoch of 32 steps, to the weights of a run
    without a stop.
    """
    written = submit("init", "lit", "--kind", "lightning", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    saved, whole = tmp_path / "saved", tmp_path / "whole"
    for folder in (saved, whole):
        folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "STOKER_"))}
    environment |= {"PYTHONPATH": str(ROOT / "source_dir"), "STOKER_LOADER": "process"}
    scripts = [sys.executable, "-c", TWICE, str(tmp_path / "lit/train.py")]
    alone = subprocess.run(
        scripts, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert torch.load(saved / "last.ckpt", weights_only=True)["global_step"] == 40
    done = submit("lit/job.yaml", f"checkpoint.dir={saved}", "--", "--steps", "60", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = (
        torch.load(folder / "last.ckpt", weights_only=True) for folder in (saved, whole)
    )
    assert ours["global_step"] == theirs["global_step"] == 60
    for name, weights in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], weights), name
