"""The feed's threads: every step once and in order, whoever asks and however long answers take."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import DataError
from stoker.train.device import StepTimes
from stoker.train.feed import Prefetcher, PrefetchLimit


class Answering(Prefetcher):
    """Asks a list of steps instead of the coordinator."""

    def __init__(self, steps: int, fails_at: int = 1 << 30, silent_from: int = 1 << 30) -> None:
        self.steps, self.fails_at, self.silent_from = steps, fails_at, silent_from
        self.asked: list[int] = []
        self.asking = 0
        self.silent, self.go_on = threading.Event(), threading.Event()
        owner: Any = SimpleNamespace(
            split="train",
            first_step=0,
            stall_timeout_s=20.0,
            prefetch=PrefetchLimit(2.0, 1 << 20),
            times=StepTimes(),
            transport=SimpleNamespace(finish_pass=lambda: None),
            collator=None,
            join_s=0.0,
        )
        super().__init__(owner)

    def _call(self, step: int, most: int) -> Any:
        self.asking += 1
        assert self.asking == 1, "one thread asks at a time"
        if step >= self.silent_from:
            self.silent.set()
            self.go_on.wait(60)
        time.sleep(random.random() / 500)
        if step >= self.fails_at:
            raise DataError("no more")
        given = list(range(step, min(step + random.randint(1, most), self.steps)))
        self.asked += given
        self.asking -= 1
        return given

    def _fetch(self, portion: Any, produced: float) -> Any:
        time.sleep(random.random() / 500)
        return SimpleNamespace(step=portion)


@pytest.mark.parametrize("steps", [0, 1, 57])
def test_every_step_comes_once_in_order_and_then_the_end(steps: int) -> None:
    feed = Answering(steps)
    taken = []
    while (item := feed.take()) is not None:
        taken.append(item.step)
    assert taken == feed.asked == list(range(steps))
    feed.end()


def test_a_failure_comes_after_the_steps_before_it() -> None:
    feed = Answering(100, fails_at=3)
    taken = []
    with pytest.raises(DataError, match="no more"):
        while (item := feed.take()) is not None:
            taken.append(item.step)
    assert taken == feed.asked and len(taken) >= 3
    feed.end()


class EndsLate(Answering):
    """Its fetches end a while after the pass has."""

    def _fetch(self, portion: Any, produced: float) -> Any:
        while portion > 2 and not self._over:
            time.sleep(0.01)
        time.sleep(0.2)
        return SimpleNamespace(step=portion)


def test_a_pass_that_is_over_has_no_thread_that_could_still_drop_a_block() -> None:
    """Ray ends a process that does so while it disconnects."""
    before = set(threading.enumerate())
    feed = EndsLate(57)
    feed.owner.join_s = 60.0
    taken = [feed.take() for _ in range(3)]
    assert [item.step for item in taken if item] == [0, 1, 2]
    feed.end()
    assert set(threading.enumerate()) <= before


def test_what_is_loaded_is_taken_and_the_pass_ends_while_the_coordinator_is_silent() -> None:
    feed = Answering(100, silent_from=1)
    taken = [feed.take()]
    while not feed.silent.wait(0.05):  # it asks again once there is room
        if len(taken) < len(feed.asked):
            taken.append(feed.take())
    taken += [feed.take() for _ in range(len(feed.asked) - len(taken))]
    feed.end()
    assert feed.asking == 1, "the call is still under way"
    feed.go_on.set()
    assert [item.step for item in taken if item] == feed.asked
