"""Where a step's time went: the parts of a wait, on the host and as a GPU felt them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.train.device import TERMS, HostClock, Stamps, StepTimes, exposed, on_device

moments = st.floats(0, 100, allow_nan=False)


def test_a_wait_is_put_down_to_what_happened_to_the_batch_meanwhile() -> None:
    stamps = Stamps(produced=3.0, arrived=5.0, collated=6.0)
    assert exposed(1.0, 7.0, stamps) == [2.0, 2.0, 1.0, 1.0]
    assert exposed(4.0, 6.0, stamps) == [0.0, 1.0, 1.0, 0.0]
    assert exposed(6.5, 7.0, stamps) == [0.0, 0.0, 0.0, 0.5]


@given(st.lists(moments, min_size=3, max_size=3), moments, moments)
def test_the_parts_add_up_to_the_wait(points: list[float], one: float, other: float) -> None:
    since, until = sorted((one, other))
    parts = exposed(since, until, Stamps(*sorted(points)))
    assert sum(parts) == pytest.approx(until - since) and min(parts) >= 0


def test_a_gpu_that_still_computed_did_not_feel_the_wait() -> None:
    waits = [0.4, 0.1, 0.0, 0.0]
    assert on_device(waits, idle=0.0, copy=0.0, step=1.0) == pytest.approx([0, 0, 0, 0, 1.0])
    # Half of the loop's wait lay behind the end of the device's work; the copy made it wait once more.
    assert on_device(waits, idle=0.25, copy=0.05, step=1.0) == pytest.approx(
        [0.2, 0.05, 0, 0.05, 0.7]
    )
    # Idle beyond the loop's wait was the loop's own work.
    assert on_device(waits, idle=0.8, copy=0.0, step=1.0) == pytest.approx([0.4, 0.1, 0, 0, 0.5])


def test_the_terms_of_steps_add_up_to_their_time() -> None:
    times = StepTimes()
    clock = HostClock(times)
    began = time.perf_counter()
    for _ in range(5):
        asked = time.perf_counter()
        time.sleep(0.004)
        now = time.perf_counter()
        clock.waited(asked, now, Stamps(asked + 0.001, asked + 0.003, now))
        time.sleep(0.002)
        clock.finished()
    elapsed = time.perf_counter() - began
    assert 5 * 0.006 <= sum(times.terms.values()) <= elapsed
    told = times.since_told()
    assert list(told) == list(TERMS)
    assert told["wait_production"] == pytest.approx(1.0, abs=0.01)
    assert told["wait_transfer"] == pytest.approx(2.0, abs=0.01)
    assert told["compute"] >= 2.0
    assert sum(times.since_told().values()) == 0
