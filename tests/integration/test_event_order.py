"""Events of a train worker reach the coordinator, an actor with many threads, in the order of its calls; with
the last one, a run ends.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from running import run_job

from stoker.events.kinds import Printed
from stoker.train.state import Worker

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Slow:
    """In place of the coordinator: every other event takes longer than the next one."""

    def __init__(self) -> None:
        self.changed = threading.Lock()
        self.taken: list[int] = []

    def log(self, event: Printed, after: None = None) -> None:
        step = int(event.text)
        time.sleep(0 if step % 2 else 0.1)
        with self.changed:
            self.taken.append(step)

    def all(self) -> list[int]:
        return self.taken


def test_events_come_in_the_order_of_the_steps_and_all_before_training_ends() -> None:
    import ray

    head: Any = ray.remote(Slow).options(num_cpus=0, max_concurrency=8).remote()
    nothing: Any = None
    worker = Worker(nothing, nothing, head, attempt=0, rank=0, world_size=1, device=None)
    for step in range(10):
        worker.log(Printed(text=str(step)))
    worker.flush()
    assert ray.get(head.all.remote(), timeout=60) == list(range(10))
    ray.kill(head)


def test_a_run_ends_soon_after_its_training(tmp_path: Path) -> None:
    """Ray Train alone waits 12 s for an actor that looks for the dashboard, where there is none."""
    outcome = run_job(tmp_path, recipe="rows:Counting", train={"epochs": 1, "batch_size": 20})
    ended = time.time()
    assert outcome.code == 0, outcome.summary.error
    lines = (outcome.run_dir / "events.jsonl").read_text().splitlines()
    [complete] = [event["time"] for event in map(json.loads, lines) if event["event"] == "complete"]
    assert ended - complete < 10
