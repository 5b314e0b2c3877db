"""`submit.py size` as a user types it: figures of a short run of the job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import DIGITS, ROOT, submit

pytestmark = pytest.mark.long

PATIENT = (
    "from stoker_launcher.advise import sizing\nsizing.RUN_SECONDS = 400.0\n"
    "from stoker_launcher.command_line import main\nmain()\n"
)
HOSTS = ("--gpu", "ml.g5.xlarge", "--cpu", "ml.c5.xlarge", "--gpu-samples-per-s", "5000")


def test_a_short_run_names_every_cost_and_leaves_nothing(tmp_path: Path) -> None:
    """It trains the job for 45 s, or to its end; here to its end, which a busy machine may delay."""
    elsewhere = "data.preprocess_on=[cpu]"  # a group that is not on this machine
    command = [
        sys.executable,
        "-c",
        PATIENT,
        "size",
        DIGITS,
        "train.epochs=2",
        elsewhere,
        "--json",
        *HOSTS,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    measured = told["measured"]
    stages = {stage["stage"]: stage["cpu_ms_per_sample"] for stage in measured["stages"]}
    assert {"read", "DecodeImage", "Jiggle"} <= stages.keys()
    random = {stage["stage"]: stage["random"] for stage in measured["stages"]}
    assert (random["read"], random["DecodeImage"], random["Jiggle"]) == (False, False, True)
    assert sum(stages.values()) == pytest.approx(1000 * measured["cpu_s"], rel=0.02)
    assert measured["bytes_per_sample"] > 0 and measured["samples"] == 2 * 1437
    assert told["recommended"]["binds"] in ("cpu", "gpu_host_cpu", "network", "receiver", "gpu")
    assert not (tmp_path / "runs").exists()


def test_a_job_that_cannot_run_says_why(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: broken\nrecipe: broken:Broken\n")
    (tmp_path / "broken.py").write_text(
        "from stoker.recipe import Recipe\n\n\n"
        "class Broken(Recipe):\n    def read(self, split):\n        raise OSError('no such bucket')\n"
    )
    done = submit("size", str(job), *HOSTS, cwd=tmp_path)
    assert done.returncode == 2 and "no such bucket" in done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.yaml")) == ["job.yaml"]


@pytest.mark.soak
def test_a_dataset_of_ray_data_is_said_not_to_be_counted(tmp_path: Path) -> None:
    """A run starts and trains: one of a minute."""
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: worked\nrecipe: worked:Worked\ntrain: {epochs: 1, batch_size: 16}\n"
        "params: {records: 400, dataset_ms: 1, chain_ms: 6}\n"
    )
    source = str(ROOT / "tests/recipes")
    done = submit("size", str(job), "--json", "--source-dir", source, *HOSTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    stages = {stage["stage"]: stage["cpu_ms_per_sample"] for stage in told["measured"]["stages"]}
    assert stages["BusyStage"] == pytest.approx(6, rel=0.25)
    assert any("without the ray.data.Dataset's own operators" in note for note in told["notes"])
