"""Calls of one caller to an actor with many threads: events, and orders to the loaders' service."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Threaded:
    """Its first call takes longer than those after it."""

    def __init__(self) -> None:
        self.changed = threading.Lock()
        self.taken: list[int] = []

    def log(self, number: int) -> None:
        if number == 0:
            time.sleep(0.5)
        with self.changed:
            self.taken.append(number)

    def wait(self) -> str:
        """As a train worker waits for its turn: other calls go on."""
        while True:
            with self.changed:
                if 9 in self.taken:
                    return "came"
            time.sleep(0.01)

    def all(self) -> list[int]:
        return self.taken


def test_ordered_methods_run_in_the_order_of_the_calls_beside_others_that_wait() -> None:
    import ray

    from stoker.data.opening import threaded_actor

    actor: Any = threaded_actor(Threaded, "log").options(num_cpus=0, max_concurrency=8).remote()
    waiting = actor.wait.remote()
    last = [actor.log.remote(number) for number in range(10)][-1]
    ray.get(last, timeout=60)
    assert ray.get(actor.all.remote(), timeout=60) == list(range(10))
    assert ray.get(waiting, timeout=60) == "came"
    ray.kill(actor)
