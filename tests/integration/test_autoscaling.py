"""A run that requests CPU hosts from Ray's autoscaler while training waits, and lets them go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.autoscaled import GPU_TYPE, autoscaled

pytestmark = pytest.mark.long

DATASET = """
import ray, time, torch

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.04)
        return ray.get_runtime_context().get_node_id()
"""
SCRIPT = f"""{DATASET}
import stoker

nodes = set()
for batch in stoker.DataLoader(Slow(), batch_size=4, num_workers=2):
    nodes |= set(batch)
    if len(nodes) > 2:
        break
print("preprocessed on", len(nodes), "hosts")
while sum(node["Alive"] for node in ray.nodes()) > 1:  # it does something else now
    time.sleep(1)
print("then they were let go")
"""
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600
PRICES = {"usd_per_hour": 0.36, "rest_usd_per_hour": 36.0}
FAST_MS, SLOW_MS = "250", "3000"


GPU_HOSTS = """
import ray, sys, time

def gpu_hosts():
    return [node["Labels"].get("stoker-group") for node in ray.nodes()].count(sys.argv[1])

ray.init(log_to_driver=False)
while not gpu_hosts():
    time.sleep(0.2)
"""
BY_US = f"""{GPU_HOSTS}
import stoker
from stoker_dataset import Slow

nodes = set()
for batch in stoker.DataLoader(Slow(), batch_size=4, num_workers=2):
    nodes |= set(batch)
    if len(nodes) > 2:  # head, GPU host, CPU host
        break
print("GPU hosts:", gpu_hosts())
"""
BY_RAY_DATA = f"""{GPU_HOSTS}
ray.data.DataContext.get_current().enable_progress_bars = False

def slow(rows):
    time.sleep(2)
    return rows

for rows in ray.data.range(2_000, override_num_blocks=1_000).map_batches(slow).iter_batches(batch_size=None):
    if gpu_hosts() > 1:
        break
print("GPU hosts:", gpu_hosts())
"""
UNTIL_RAY_259 = {"RAY_DATA_CLUSTER_AUTOSCALER": "V2"}
"""What Ray Data does by default there."""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("script", "own", "count"),
    [
        (BY_US, {"STOKER_CPU_HOSTS": '{"max": 2}', "STOKER_JOB": "scaled"}, 1),
        (BY_RAY_DATA, UNTIL_RAY_259, 2),
    ],
    ids=["us", "ray data"],
)
def test_a_loader_requests_no_gpu_host_for_work_of_cpus_where_ray_data_does(
    script: str, own: dict[str, str], count: int, tmp_path: Path
) -> None:
    """Ray starts a cluster and three hosts, which takes minutes on a busy machine."""
    (tmp_path / "stoker_dataset.py").write_text(DATASET)
    path = os.pathsep.join([str(ROOT / "source_dir"), str(tmp_path)])
    with autoscaled(gpu_hosts=1, path=path) as environment:
        assert f"GPU hosts: {count}" in run_in(environment | own, script, GPU_TYPE)


def run_in(environment: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", *words],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


class Scene:
    """A job as Ray starts it on the head of a cluster, which trains until it is stopped."""

    def __init__(self, environment: dict[str, str], folder: Path, **sections: Any) -> None:
        self.run_dir, self.pace = folder / "run", folder / "pace"
        self.pace.write_text(FAST_MS)
        job = {
            "name": "scaled",
            "tracking": {"tensorboard": False, "log_every_steps": 1},
            "data": {"block_records": 20},
            **sections,
        }
        job["params"] = {**job["params"], "pace": str(self.pace)}
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        own = {
            "STOKER_PLACE": "ray",
            "STOKER_RUN_DIR": str(self.run_dir),
            "RAY_TRAIN_V2_ENABLED": "1",
        }
        self.output = folder / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, ROOT / "source_dir/train.py", "--config", str(folder / "job.yaml")],
                env=environment | own, cwd=folder, stdout=output, stderr=output,
            )  # fmt: skip

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.run_dir / "events.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if event["event"] == kind]

    def wait_for(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.5)


def test_hosts_come_with_the_need_and_leave_after_it(tmp_path: Path) -> None:
    """Takes over 45 s: Ray starts hosts, and removes them when they have been idle."""
    path = os.pathsep.join([str(ROOT / "source_dir"), str(ROOT / "tests/recipes")])
    with autoscaled(path=path, idle_s=2) as environment:
        job = Scene(
            environment,
            tmp_path,
            recipe="phases:Phases",
            # 128 records/s need 10 CPUs, of which the head and each host have 2: two hosts are needed also
            # where training is half as fast, on a busy machine. Later one CPU is enough. Hosts leave once
            # their ready blocks are taken: large ones are few.
            params={"records": 1_000_000, "ms": 80, "kb": 300},
            train={"epochs": 1, "batch_size": 32},
            cluster={"cpu_hosts": {"max": 2, "release_after_s": 5, **PRICES}},
        )
        try:
            job.wait_for(lambda: len(job.events("host_joined")) > 1)
            draft = job.pace.with_suffix(".new")
            draft.write_text(SLOW_MS)
            draft.rename(job.pace)  # the recipe reads it all the time
            # While training goes on, Ray Train's own request for a CPU may keep one of them.
            job.wait_for(
                lambda: (
                    job.events("cpu_hosts")[-1]["count"] == 0
                    and len(job.events("host_released")) >= len(job.events("host_joined")) - 1
                )
            )
            job.process.send_signal(signal.SIGTERM)
            assert job.process.wait(timeout=LIMIT_S) == 143, job.output.read_text()
        finally:
            job.process.kill()
            job.process.wait()
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted", summary["error"]
    requests = job.events("cpu_hosts")
    counts = [event["count"] for event in requests]
    top = counts.index(max(counts))
    rising, falling = counts[: top + 1], counts[top:]
    assert counts[0] == 1 and max(counts) > 1 and counts[-1] == 0, requests
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True), "no flapping"
    assert "training waits" in requests[0]["reason"]
    joined, released = (
        {e["node"] for e in job.events(kind)} for kind in ("host_joined", "host_released")
    )
    assert released and released <= joined and not job.events("host_lost")
    assert set(summary["chain_tasks_by_host"]) > {"head"}, "they preprocessed"
    hours = summary["cost"]["cpu_host_hours"]
    assert 0 < hours < len(joined) * summary["seconds"] / 3600, (
        "hosts cost money while they are there"
    )


@pytest.mark.soak
def test_a_scripts_loader_has_hosts_while_training_waits(tmp_path: Path) -> None:
    """Ray starts hosts, which takes half a minute on a busy machine."""
    script, told = tmp_path / "train.py", tmp_path / "events.jsonl"
    script.write_text(SCRIPT)
    with autoscaled(path=str(ROOT / "source_dir"), idle_s=2) as environment:
        own = {"STOKER_CPU_HOSTS": '{"max": 2}', "STOKER_EVENTS": str(told), "STOKER_JOB": "scaled"}
        done = subprocess.run(
            [sys.executable, str(script)],
            env=environment | own, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    assert done.stdout == "preprocessed on 3 hosts\nthen they were let go\n", done.stderr[-4000:]
    counts = [
        event["count"]
        for event in map(json.loads, told.read_text().splitlines())
        if "count" in event
    ]
    assert counts == [1, 2, 0]
