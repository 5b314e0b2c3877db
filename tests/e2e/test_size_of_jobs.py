"""`submit.py size` as a user types it: figures of a short run of the job."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import DIGITS, ROOT, submit

from tests.waiting import until

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


SLOW = """
import pathlib, time
from rows import Counting

class Slow(Counting):
    began: str

    def training_step(self, model, batch):
        pathlib.Path(self.began).touch()
        time.sleep(60)
        return super().training_step(model, batch)
"""


def test_sigterm_ends_all_processes_of_the_short_run(tmp_path: Path) -> None:
    """A run starts and trains: half a minute."""
    (tmp_path / "job.yaml").write_text(
        f"name: slow\nrecipe: slow:Slow\nparams: {{began: {tmp_path}/began}}\n"
        "train: {epochs: 50, batch_size: 16, workers: 1}\n"
    )
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "rows.py").write_text((ROOT / "tests/recipes/rows.py").read_text())
    command = [sys.executable, str(ROOT / "launcher/submit.py"), "size", "job.yaml", *HOSTS]
    process = subprocess.Popen(command, cwd=tmp_path)
    until(lambda: (tmp_path / "began").exists() or process.poll() is not None, 300)
    assert process.poll() is None
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) > 3
    asked = time.monotonic()
    process.terminate()
    assert process.wait(60) == 143
    assert psutil.wait_procs(below, timeout=60)[1] == []
    assert time.monotonic() - asked < 30, "10 s on a free machine; a step takes 60 s"


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
