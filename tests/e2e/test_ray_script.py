"""A Ray script of the user's own, unchanged: one process of it, with the whole cluster free for it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import shown_until, submit, typed

pytestmark = pytest.mark.long


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "runs/latest/summary.json").read_text()))


def test_a_ray_script_starts_once_and_its_workers_prints_and_reports_arrive(tmp_path: Path) -> None:
    """Longer than most: Ray Train starts a trainer inside of a job."""
    assert submit("init", "mine", "--kind", "ray", cwd=tmp_path).returncode == 0
    script = tmp_path / "mine/train.py"
    before = script.read_text()
    arguments = ["mine/job.yaml", "output_dir=runs", "--", "--images", "64", "--epochs", "2"]
    done = submit(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert script.read_text() == before
    assert done.stdout.count("trained on 1 workers, 0 GPUs") == 1
    assert "RayTrainWorker" in done.stdout, "what its train workers print"
    run = summary(tmp_path)
    assert run["status"] == "succeeded" and run["steps"] == 0, "a report is no step"
    assert run["metrics"]["last"].keys() == {"epoch", "loss", "images"}
    assert run["metrics"]["last"]["images"] == 64
    statistics = (tmp_path / "runs/latest/logs/ray_data_stats.txt").read_text()
    assert "Map(make_image)->Map(blur)" in statistics


LOOP = """
import signal, sys, time
import ray, ray.train, stoker
from ray.train.torch import TorchTrainer

def loop():
    for step in range(1, 31):
        for row in stoker.timed([{"x": [1, 2, 3]}] * 4):
            time.sleep(0.01)
        stoker.log({"loss": 1 / step}, step)
        print("one more", step, flush=True)
    while True:
        time.sleep(0.1)

def save(*_):
    (stoker.checkpoint_dir() / "saved").touch()
    sys.exit(0)

assert not (stoker.checkpoint_dir() / "saved").exists() or print("saved before") or sys.exit(0)
ray.init()
signal.signal(signal.SIGTERM, save)
print("CPUs", ray.available_resources()["CPU"], "of", ray.cluster_resources()["CPU"])
TorchTrainer(loop, scaling_config=ray.train.ScalingConfig(num_workers=1)).fit()
"""


def test_a_stopped_ray_script_saves_and_continues_with_resume(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    process = typed("loop.py", "--driver", "name=looping", cwd=tmp_path)
    shown = shown_until(process, "one more 30")
    os.killpg(process.pid, signal.SIGTERM)  # as `timeout` does: the job gets it twice, as one stop
    rest, _ = process.communicate(timeout=200)
    assert process.returncode == 143, shown + rest
    free = next(line.split() for line in shown.splitlines() if line.startswith("CPUs "))
    assert free[1] == free[3], "nothing of the cluster is taken"
    run = summary(tmp_path)
    assert run["status"] == "interrupted"
    assert run["metrics"]["last"]["loss"] == pytest.approx(1 / 30) and run["steps"] >= 30
    assert run["train_workers"] == 1
    events = (tmp_path / "runs/latest/events.jsonl").read_text().splitlines()
    loaded = [event for event in map(json.loads, events) if event["event"] == "loader"]
    assert loaded and all(event["samples"] == 3 * event["steps"] for event in loaded)
    again = submit("loop.py", "--driver", "name=looping", "--resume", "auto", cwd=tmp_path)
    assert again.returncode == 0 and "saved before" in again.stdout, again.stdout + again.stderr


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["driver=true", "recipe=x:Y"], "driver"),
        (["train.workers=2"], "train.workers"),
        (["cluster.cpu_hosts.max=2"], "cluster.cpu_hosts.max"),
    ],
)
def test_keys_that_a_ray_script_would_ignore_are_refused(
    words: list[str], key: str, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "job.yaml").write_text("name: x\n")
    command = ["job.yaml"] if "recipe=x:Y" in words else ["loop.py", "--driver"]
    done = submit(*command, *words, "--dry-run", cwd=tmp_path)
    assert done.returncode == 2 and f"{key}: " in done.stderr, done.stderr
