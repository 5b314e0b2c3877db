"""`submit.py size` as a user types it: a profile of the real chain and of real receiving."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_profile_of_a_minute_at_most_names_every_cost(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: blurred\nrecipe: recipes.synthetic_vit:SyntheticViT\n"
        "params: {records: 5000, image_size: 128, blurs: 3, composed: false}\ntrain: {epochs: 2}\n"
    )
    command = [sys.executable, str(ROOT / "launcher/submit.py"), "size", str(job), "--json"]
    command += ["--gpu", "ml.g5.xlarge", "--cpu", "ml.c5.xlarge", "--gpu-samples-per-s", "5000"]
    started, used_before = time.monotonic(), cpu_s_of_children()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170)
    seconds, used_s = time.monotonic() - started, cpu_s_of_children() - used_before
    assert done.returncode == 0, done.stderr
    # Sixty seconds of two cores; of the clock, too, where nothing else runs.
    assert used_s < 120 and seconds < 120
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
