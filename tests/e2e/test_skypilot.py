"""docs/ray/sky.yaml: SkyPilot's client loads it, and the commands of its tasks form a cluster that trains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import DIGITS, ROOT

from stoker.hosts.raynode import free_port
from tests.fakes.ray_nodes import stop_all

_, GPU, CPU = yaml.safe_load_all((ROOT / "docs/ray/sky.yaml").read_text())


PRIVATE = 'mount -t tmpfs tmpfs "$0" && exec "$@"'


def host(
    task: dict[str, Any], environment: dict[str, str], log: Path, own: Path | None = None
) -> subprocess.Popen[bytes]:
    """A task's commands in a shell, with the variables that SkyPilot and the task set.

    Args:
        task: of the manifest.
        environment: variables that differ here.
        log: for what the commands print.
        own: a folder that only they see: Ray's nodes unpack a job's code there, each over the other's.
    """
    given = {**task["envs"], "SKYPILOT_NUM_GPUS_PER_NODE": "0", **environment}
    command = ["bash", "-c", task["run"]]
    if own is not None:
        command = ["unshare", "--mount", "bash", "-c", PRIVATE, str(own), *command]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=given, stdout=output, stderr=output, start_new_session=True
        )


@pytest.mark.soak
def test_the_hosts_of_both_tasks_form_a_cluster_that_runs_the_job(
    digits: Path, tmp_path: Path
) -> None:
    """A head with a dashboard and a host of its own process tree, as on two machines."""
    job = yaml.safe_load(Path(DIGITS).read_text())
    job |= {
        "params": {"data": str(digits / "webdataset")},
        "train": {"epochs": 1, "batch_size": 64},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**job, "data": {"preprocess_on": ["cpu"]}}))
    scratch = Path(tempfile.mkdtemp(prefix="sk", dir="/tmp"))  # socket paths must stay short
    common = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "STOKER_"))
    }
    common |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HEAD": "127.0.0.1",
        "PORT": str(free_port()),
        "DASHBOARD": str(free_port()),
        "CPU_HOSTS": "1",
        "JOB": str(tmp_path / "job.yaml"),
        "OUTPUT": str(tmp_path / "runs"),
        "RAY_AUTH_TOKEN": "6" * 64,
        "RAY_TMPDIR": str(scratch),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    gpu = host(GPU, common, tmp_path / "gpu.log")
    cpu = host(CPU, common, tmp_path / "cpu.log", scratch)
    try:
        code = gpu.wait(540)
        assert code == 0, "".join(
            (tmp_path / name).read_text()[-4000:] for name in ("gpu.log", "cpu.log")
        )
        cpu.wait(120)  # SkyPilot would end it 30 s after the GPU task
    finally:
        stop_all([gpu, cpu])
        shutil.rmtree(scratch, ignore_errors=True)
    (path,) = (tmp_path / "runs").glob("digits-*/summary.json")
    summary = json.loads(path.read_text())
    assert (summary["status"], summary["place"]) == ("succeeded", "ray")
    assert sorted(host["group"] for host in summary["cluster"]["hosts"]) == ["cpu", "gpu"]


CLIENT = ROOT / ".places/skypilot/bin/python"
"""Where scripts/places.sh installs SkyPilot's client."""
LOAD = """
import sys
from sky.utils import dag_utils

given = {"env_overrides": [("JOB", "jobs/mine.yaml")], "secrets_overrides": [("RAY_AUTH_TOKEN", "0" * 64)]}
group = dag_utils.load_job_group_from_yaml(sys.argv[1], **given)
assert group.is_job_group() and group.primary_tasks == ["gpu"], group
gpu, cpu = group.tasks
(trains,), (preprocesses,) = gpu.resources, cpu.resources
print(gpu.num_nodes, trains.accelerators, cpu.num_nodes, preprocesses.accelerators)
"""


@pytest.mark.soak
@pytest.mark.skipif(
    not CLIENT.exists(), reason="SkyPilot's client is not installed: bash scripts/places.sh"
)
def test_skypilots_own_client_loads_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(CLIENT), "-c", LOAD, str(ROOT / "docs/ray/sky.yaml")],
        env={**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "1 {'L4': 1} 2 None"
