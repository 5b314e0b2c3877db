"""A run that requests CPU hosts from Ray's autoscaler while training waits, and lets them go."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from fakes.autoscaled import autoscaled

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900
PRICES = {"usd_per_hour": 0.36, "rest_usd_per_hour": 36.0}


def run_on(
    environment: dict[str, str], folder: Path, **sections: Any
) -> tuple[int, dict[str, Any], list[Any]]:
    """A job as Ray starts it on the head of a cluster: exit code, summary and events."""
    job = {"name": "scaled", "tracking": {"tensorboard": False}, "data": {"block_records": 20}, **sections}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    own = {
        "STOKER_BACKEND": "ray",
        "STOKER_RUN_DIR": str(folder / "run"),
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    command = [sys.executable, ROOT / "source_dir/train.py", "--config", str(path)]
    done = subprocess.run(
        command, env=environment | own, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (folder / "run" / "summary.json").exists(), done.stdout + done.stderr
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    print(done.stdout)
    return done.returncode, json.loads((folder / "run" / "summary.json").read_text()), events


def test_hosts_come_with_the_need_and_leave_after_it(tmp_path: Path) -> None:
    """Takes over 45 s: Ray starts hosts, and removes them when they have been idle."""
    paths = f"{ROOT / 'source_dir'}:{ROOT / 'tests/recipes'}"
    with autoscaled(path=paths, idle_s=2) as environment:
        code, summary, events = run_on(
            environment,
            tmp_path,
            recipe="phases:Phases",
            # 160 records/s need 7 CPUs, of which the head has 2; later these are enough for 32.
            params={"records": 100_000, "ms": 40, "kb": 200, "step_ms": [100, 500], "until": [150]},
            train={"epochs": 1, "batch_size": 16, "max_steps": 270},
            cluster={"cpu_hosts": {"max": 5, "release_after_s": 5, **PRICES}},
        )
    assert code == 0, summary["error"]
    assert summary["steps"] == 270
    requests = [event for event in events if event["event"] == "cpu_hosts"]
    counts = [event["count"] for event in requests]
    assert counts[0] == 1 and max(counts) > 1 and counts[-1] == 0, requests
    top = counts.index(max(counts))
    rising, falling = counts[: top + 1], counts[top:]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True), "no flapping"
    assert "training waits" in requests[0]["reason"] and "per 1M records" in requests[1]["reason"]
    joined = {event["node"] for event in events if event["event"] == "host_joined"}
    released = {event["node"] for event in events if event["event"] == "host_released"}
    assert len(joined) == max(counts)
    # While training goes on, Ray Train's own request for a CPU may keep one of them.
    assert released <= joined and len(released) >= len(joined) - 1
    assert not [event for event in events if event["event"] == "host_lost"]
    assert set(summary["chain_tasks_by_host"]) > {"head"}, "they preprocessed"
    hours = summary["cost"]["cpu_host_hours"]
    assert 0 < hours < max(counts) * summary["seconds"] / 3600, "hosts cost money while they are there"
