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
from fakes.autoscaled import autoscaled

pytestmark = pytest.mark.long

SCRIPT = """
import ray, stoker, torch, time

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.04)
        return ray.get_runtime_context().get_node_id()

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
    assert "training waits" in requests[0]["reason"] and "per 1M records" in requests[1]["reason"]
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
