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
        "params: {records: 1500, image_size: 128, blurs: 3, composed: false}\ntrain: {epochs: 2}\n"
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
    assert 0 < measured["serial_s"] < measured["other_s"] < 0.01, "the coordinator takes part in receiving"
    sent = stages["task"]["cpu_ms_per_sample"]
    assert sent > 500 * measured["serial_s"], "a chain worker hands over the bytes that a train worker takes"
    assert measured["samples"] == 3_000
    assert told["recommended"]["binds"] in ("cpu", "gpu_host_cpu", "network", "receiver", "gpu")
    assert any(line.startswith("blur takes ") for line in told["reasons"])


@pytest.mark.soak
def test_a_dataset_of_ray_data_is_part_of_the_preprocessing(tmp_path: Path) -> None:
    """Its own operators and the chain behind them each take the CPU time that they are known to take."""
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: worked\nrecipe: worked:Worked\ntrain: {epochs: 3}\n"
        "params: {records: 800, dataset_ms: 4, chain_ms: 6}\n"
    )
    command = [sys.executable, str(ROOT / "launcher/submit.py"), "size", str(job), "--json"]
    command += ["--source-dir", str(ROOT / "tests/recipes"), "--gpu-samples-per-s", "5000"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)["measured"]
    stages = {stage["stage"]: stage["cpu_ms_per_sample"] for stage in measured["stages"]}
    own = "ray.data: ReadRange->Map(Busy)"
    assert list(stages) == ["read", "BusyStage", "pack", own, "task"]
    assert stages[own] == pytest.approx(4, rel=0.25)
    assert stages["BusyStage"] == pytest.approx(6, rel=0.25)
    assert sum(stages.values()) == pytest.approx(1000 * measured["cpu_s"], rel=0.02)
    assert measured["samples"] == 2400, "the dataset came to its end, so its length is known"
