"""`submit.py --on ray` trains on a real three-node cluster, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.ray_nodes import ray_nodes

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]


def submit(*words: str, token: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "launcher/submit.py", *words],
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_digits_train_through_ray_jobs(digits: Path, tmp_path: Path) -> None:
    with ray_nodes() as nodes:
        job = [
            "source_dir/configs/digits.yaml",
            "--on=ray",
            f"--address={nodes.dashboard}",
            f"output_dir={tmp_path}",
            f"params.data={digits / 'webdataset'}",
            "train.epochs=6",
            "train.workers=1",
        ]
        done = submit(*job, token=nodes.token)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        run_id = done.stdout.split(": Ctrl-C")[0]
        assert run_id.startswith(f"ray:{nodes.dashboard}/digits-")
        status = submit("status", run_id, token=nodes.token)
        state, *figures = status.stdout.splitlines()
        assert state == "succeeded"
        assert any("samples/s" in line for line in figures), "what the job's log told last"
        wrong = submit(*job, token="0" * 64)
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1 and "refuses this token" in wrong.stderr
    (path,) = tmp_path.glob("digits-*/summary.json")
    summary = json.loads(path.read_text())
    assert (summary["status"], summary["backend"]) == ("succeeded", "ray")
    assert len(summary["cluster"]["hosts"]) == 3
    assert {host["group"] for host in summary["cluster"]["hosts"]} == {"gpu", "cpu"}
    assert summary["metrics"]["best"]["val/acc1"] > 0.9
    assert len(summary["chain_tasks_by_host"]) >= 2, summary["chain_tasks_by_host"]
    assert (path.parent / "model").is_dir()
