"""The threads of a feed or a loader: every item once and in order, whoever asks and however long it takes."""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from stoker.errors import DataError
from stoker.serve.blocks.batches import LateError, Prefetcher


class Service:
    def __init__(self, items: int, fails_at: int = 1 << 30, silent_from: int = 1 << 30) -> None:
        self.items, self.fails_at, self.silent_from = items, fails_at, silent_from
        self.asked: list[int] = []
        self.asking = 0
        self.silent, self.go_on = threading.Event(), threading.Event()

    def ask(self, first: int, most: int, fetched: int) -> list[int] | None:
        self.asking += 1
        assert self.asking == 1, "one thread asks at a time"
        assert fetched <= first
        if first >= self.silent_from:
            self.silent.set()
            self.go_on.wait(60)
        time.sleep(random.random() / 500)
        if first >= self.fails_at:
            raise DataError("no more")
        given = list(range(first, min(first + random.randint(1, most), self.items)))
        self.asked += given
        self.asking -= 1
        return given or None


def fetch(item: int, since: float) -> int:
    time.sleep(random.random() / 500)
    return item


def feed_of(service: Service, fetch: Callable[[int, float], int] = fetch) -> Prefetcher[int, int]:
    return Prefetcher("feed", service.ask, fetch, threads=2, limit=4)


def all_of(feed: Prefetcher[int, int]) -> Iterator[int]:
    while (item := feed.take(20)) is not None:
        yield item


@pytest.mark.parametrize("steps", [0, 1, 57])
def test_every_step_comes_once_in_order_and_then_the_end(steps: int) -> None:
    service = Service(steps)
    feed = feed_of(service)
    assert list(all_of(feed)) == service.asked == list(range(steps))
    feed.end()


def test_a_failure_comes_after_the_steps_before_it() -> None:
    service = Service(100, fails_at=3)
    feed, taken = feed_of(service), list[int]()
    with pytest.raises(DataError, match="no more"):
        taken.extend(all_of(feed))
    assert taken == service.asked and len(taken) >= 3
    feed.end()


def test_a_pass_that_is_over_has_no_thread_that_could_still_drop_a_block() -> None:
    """Ray ends a process that does so while it disconnects."""
    before, over = set(threading.enumerate()), threading.Event()

    def ends_late(item: int, since: float) -> int:
        if item > 2:
            over.wait(60)
        time.sleep(0.2)
        return item

    feed = feed_of(Service(57), ends_late)
    assert [feed.take(20) for _ in range(3)] == [0, 1, 2]
    threading.Timer(0.1, over.set).start()
    feed.end(join_s=60)
    assert {
        each.name for each in set(threading.enumerate()) - before if each.name.startswith("feed")
    } == set()


def test_what_is_loaded_is_taken_and_the_pass_ends_while_the_service_is_silent() -> None:
    service = Service(100, silent_from=1)
    feed = feed_of(service)
    taken = [feed.take(20)]
    while not service.silent.wait(0.05):  # it asks again once there is room
        if len(taken) < len(service.asked):
            taken.append(feed.take(20))
    taken += [feed.take(20) for _ in range(len(service.asked) - len(taken))]
    feed.end()
    assert service.asking == 1, "the call is still under way"
    service.go_on.set()
    assert taken == service.asked


def test_only_what_a_script_wants_is_asked_for_and_only_so_much_is_fetched_ahead() -> None:
    """The service drops the blocks that it gave when it is asked again: by then, they are here."""
    service, fetched, left = Service(100), list[int](), threading.Event()
    at_asking: list[tuple[int, int]] = []

    def ask(first: int, most: int, fetched_before: int) -> list[int] | None:
        at_asking.append((first, len(fetched)))
        return (
            service.ask(first, most, fetched_before) if random.random() < 0.7 else []
        )  # nothing in time

    def fetch(item: int, since: float) -> int:
        fetched.append(item)
        return item

    feed: Prefetcher[int, int] = Prefetcher(
        "blocks", ask, fetch, threads=1, limit=12, loaded=4, wanted=0, left=left.set
    )
    with pytest.raises(LateError):
        feed.take(0.1)
    assert not service.asked
    for number in range(60):
        feed.want()
        if number > 20:
            assert feed.take(20) == number - 21
            assert len(fetched) <= number - 21 + 1 + 4 + 1, "one may have been taken meanwhile"
    assert [feed.take(20) for _ in range(21)] == list(range(39, 60)) and service.asked == list(
        range(60)
    )
    assert all(first == here for first, here in at_asking)
    feed.end(60)
    assert left.is_set() and feed.take(1) is None


@pytest.mark.parametrize("line", range(10))
def test_an_item_that_an_interrupt_loses_is_not_waited_for_and_the_next_one_shows_it(
    line: int,
) -> None:
    """Ctrl-C before each line of `take`."""
    feed = feed_of(Service(57))
    lines = itertools.count()

    def interrupts(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not Prefetcher.take.__code__:
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return interrupts

    assert [feed.take(20), feed.take(20)] == [0, 1]
    sys.settrace(interrupts)
    try:
        with suppress(KeyboardInterrupt):
            assert feed.take(20) == 2
    finally:
        sys.settrace(None)
    found = list(all_of(feed))
    assert found == list(range(57))[-len(found) :] and len(found) in (54, 55)
    feed.end()


def test_a_fork_has_no_thread_that_fetches_and_says_so_at_once() -> None:
    feed = feed_of(Service(100, silent_from=0))
    child = os.fork()
    if child == 0:
        began = time.monotonic()
        try:
            feed.take(60)
        except LateError:
            os._exit(0 if not feed.alive and time.monotonic() - began < 30 else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    feed.end()
