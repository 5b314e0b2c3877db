"""Which service a host belongs to, before anything is installed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.entry.door import Head, HeadLost
from stoker.hosts import raynode, requirements
from stoker.hosts.requirements import ConflictError
from stoker.hosts.services import sagemaker, vertex
from stoker.hosts.topology import TopologyError

TRAIN = Path(requirements.__file__).parents[2] / "train.py"


def start(base: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "SAGEMAKER_BASE_DIR": str(base), **environment}
    return subprocess.run(
        [sys.executable, TRAIN], capture_output=True, text=True, timeout=120, env=given
    )


@pytest.mark.parametrize("content", ["{", "[]", "7"])
def test_hosts_that_are_described_wrongly_fail_with_the_reason(
    tmp_path: Path, content: str
) -> None:
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "resourceconfig.json").write_text(content)
    done = start(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: resourceconfig.json: cannot be read")
    assert (tmp_path / "output" / "failure").read_text() in done.stderr


def test_attempts_of_a_queued_job_are_one_job_to_its_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINING_JOB_NAME", "AWSBatchflowers-1-0123")
    assert sagemaker.place().job == "AWSBatchflowers-1-0123"
    monkeypatch.setenv("STOKER_SERVICE_JOB", "flowers-1")
    assert sagemaker.place().job == "flowers-1"


@pytest.mark.long
def test_the_heads_cause_is_written_before_another_host_learns_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vertex AI ends a job with the first host of its first pool, which need not be the head."""
    code, config = tmp_path / "code", tmp_path / "ml" / "input" / "config"
    shutil.copytree(TRAIN.parent, code, ignore=shutil.ignore_patterns("__pycache__"))
    config.mkdir(parents=True)
    token = "7" * 64
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    (code / ".ray-token").write_text(token)
    hosts = {
        "current_host": "algo-1",
        "hosts": ["algo-1", "algo-2"],
        "network_interface_name": "lo",
    }
    (config / "resourceconfig.json").write_text(json.dumps(hosts))
    failure = tmp_path / "ml" / "output" / "failure"
    port = raynode.free_port()
    with socket.create_server(("127.0.0.1", port)):  # Ray needs it, too
        (code / "job.yaml").write_text(
            f"recipe: recipes.digits:Digits\ncluster: {{port: {port}}}\n"
        )
        environment = {**os.environ, "SAGEMAKER_BASE_DIR": str(tmp_path / "ml")}
        head = subprocess.Popen([sys.executable, code / "train.py"], env=environment)
        seen = Head("127.0.0.1", port + 1, "")
        seen.reach(time.monotonic() + 120, lambda: None)
        with pytest.raises(HeadLost):
            seen.ready(time.monotonic() + 120, lambda: None)
        assert f"port {port}" in failure.read_text()
    assert head.wait(120) == 1


def test_a_vertex_request_that_is_submitted_twice_does_not_mix_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bucket").mkdir()
    monkeypatch.setattr(vertex, "MOUNTS", tmp_path)
    task = {"cluster": {"workerpool0": ["a-0:2222"]}, "task": {"type": "workerpool0", "index": 0}}
    variables = {
        name: f"gs://bucket/jobs/one/{i}/" for i, name in enumerate(vertex.OUTPUT_VARIABLES)
    }
    variables |= {vertex.CLUSTER_VARIABLE: json.dumps(task), "CLOUD_ML_JOB_ID": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for _ in ("its first start", "restarted by the service"):
        assert vertex.SERVICE.resource()
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "2")
    with pytest.raises(TopologyError, match="has the run of job 1, whose request this is"):
        vertex.SERVICE.resource()
    assert not vertex.SERVICE.place().failure.is_relative_to(tmp_path), (
        "not a cause of the first job's"
    )


def test_hosts_that_outlive_the_job_get_nothing_installed(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("pytest\nno-such-package\n")
    with pytest.raises(ConflictError, match="no-such-package not installed for"):
        requirements.ensure(tmp_path, install=False)
