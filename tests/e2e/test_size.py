"""`submit.py size` as a user types it: a profile of the real chain and of real receiving."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_profile_names_every_cost(tmp_path: Path) -> None:
    """It measures a real chain and real receiving on Ray nodes, for half a minute and more."""
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: blurred\nrecipe: recipes.synthetic_vit:SyntheticViT\n"
        "params: {records: 5000, image_size: 128, blurs: 3, composed: false}\ntrain: {epochs: 2}\n"
    )
    command = [sys.executable, str(ROOT / "launcher/submit.py"), "size", str(job), "--json"]
    command += ["--gpu", "ml.g5.xlarge", "--cpu", "ml.c5.xlarge", "--gpu-samples-per-s", "5000"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    measured = told["measured"]
    stages = {stage["stage"]: stage for stage in measured["stages"]}
    assert list(stages) == ["read", "RandomImage", "blur 1", "blur 2", "blur 3", "pack", "task"]
    total = sum(stage["cpu_ms_per_sample"] for stage in stages.values())
    assert total == pytest.approx(1000 * measured["cpu_s"], rel=0.02), "the stages add up to the whole"
    assert measured["bytes_per_sample"] == pytest.approx(3 * 128 * 128, abs=64)
    assert 0 < measured["other_s"] < 0.01 and 0 < measured["serial_s"] < 0.01
    assert measured["samples"] == 10_000
    assert told["recommended"]["binds"] in ("cpu", "gpu_host_cpu", "network", "receiver", "gpu")
    assert any(line.startswith("blur takes ") for line in told["reasons"])
