"""Events of a train worker reach the coordinator, an actor with many threads, in the order of its calls."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

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
