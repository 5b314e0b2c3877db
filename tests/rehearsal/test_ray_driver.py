"""A Ray script on emulated hosts: one driver, whose trainer gets every GPU and whose data every CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsals import PATIENT, new_name

pytestmark = pytest.mark.long

SCRIPT = """
import collections
import socket

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer


def where(row):
    import time

    time.sleep(0.5)  # so that no host can do the work of all
    return {**row, "host": socket.gethostname()}


def loop():
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    hosts = collections.Counter(
        host for batch in ray.train.get_dataset_shard("train").iter_batches() for host in batch["host"]
    )
    own = ray.get_gpu_ids() or ray.get_runtime_context().get_accelerator_ids()["GPU"]
    ray.train.report({"workers": total.item(), "gpus": len(own), "rows": sum(hosts.values())})
    print("trained on", socket.gethostname(), "rows of", sorted(hosts))


ray.init()
free = ray.available_resources()
print("driver sees", free["GPU"], "GPUs and", free["CPU"], "CPUs")
groups = {node["Labels"]["stoker-group"] for node in ray.nodes()}
print("groups", sorted(groups))
TorchTrainer(
    loop,
    datasets={"train": ray.data.range(64, override_num_blocks=64).map(where)},
    # No device is behind a declared GPU.
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ray.train.ScalingConfig(num_workers=int(free["GPU"]), use_gpu=True),
).fit()
"""


def test_one_driver_has_all_declared_gpus_and_all_cpus(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    options = [
        "--driver",
        f"name={new_name()}",
        "rehearsal.hosts=gpu=2,cpu=2",
        "rehearsal.gpus=2",
        "rehearsal.timeout_s=540",
        # Ray shows a line once that several workers print.
        "sagemaker.environment={RAY_worker_niceness: '0', RAY_DEDUP_LOGS: '0'}",
    ]
    command = [sys.executable, "-c", PATIENT, "mine.py", *options, "--on", "rehearsal"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=560)
    screen = done.stdout
    assert done.returncode == 0, screen + done.stderr
    assert screen.count("driver sees 4.0 GPUs and 8.0 CPUs") == 1, screen
    assert "groups ['cpu', 'gpu']" in screen
    assert screen.count("rows of") == 4, "one line of each train worker"
    summary = json.loads((tmp_path / "runs/latest/summary.json").read_text())
    assert summary["status"] == "succeeded"
    assert summary["metrics"]["last"] == {"workers": 4.0, "gpus": 1.0, "rows": 16.0}
    hosts = {
        host for line in screen.splitlines() if "rows of" in line for host in line.split("'")[1::2]
    }
    assert hosts == {"algo-1", "algo-2", "algo-3", "algo-4"}
    assert [
        host["exit_code"]
        for host in json.loads((tmp_path / "runs/latest/rehearsal.json").read_text())["hosts"]
    ] == [0] * 4
