"""Deadlines follow what blocks take; hosts that miss them are avoided; reads are tried again a few times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.read.sources import reread_wait_s
from stoker.serve.recovery import Patience, give_up_s, others


def test_a_deadline_is_twenty_times_what_such_blocks_take_and_doubles() -> None:
    patience = Patience()
    assert patience.deadline_s("train", "a", late=0, stall_s=600) == 300, "nobody knows how slow its chain is"
    for seconds in (9.0, 10.0, 500.0):
        patience.took("train", "a", seconds)
    assert patience.deadline_s("train", "a", late=0, stall_s=600) == 200
    assert patience.deadline_s("train", "a", late=2, stall_s=600) == 800
    assert patience.deadline_s("train", "new", late=0, stall_s=600) == 400
    assert patience.deadline_s("val", "a", late=0, stall_s=600) == 300, "another kind of work"
    for _ in range(200):
        patience.took("train", "a", 0.1)
    assert patience.deadline_s("train", "a", late=0, stall_s=600) == 60, (
        "a tenth of the stall time-out at least"
    )


@given(st.floats(0.001, 5), st.floats(1, 20))
def test_a_block_that_takes_twenty_times_as_long_is_waited_for(typical: float, times: float) -> None:
    patience = Patience()
    patience.took("train", "a", typical)
    assert patience.deadline_s("train", "a", late=0, stall_s=600) >= times * typical * 0.999


def test_the_run_gives_up_before_train_workers_do() -> None:
    patience = Patience()
    patience.took("train", "a", 1)
    spent = sum(patience.deadline_s("train", "a", late, 600) for late in range(3))
    assert spent < give_up_s(600) < 600, "three hosts are tried before"


def test_a_late_host_is_avoided_for_a_while_and_longer_each_time() -> None:
    patience = Patience()
    assert patience.avoid("a", now=0) == 120
    assert patience.avoided(119) == {"a"}
    assert patience.avoided(121) == set()
    assert patience.avoid("a", now=200) == 240
    assert patience.avoided(439) == {"a"}


def test_others_are_all_where_nothing_else_is_left() -> None:
    assert others({"a", "b"}, {"a"}) == {"b"}
    assert others({"a"}, {"a"}) == {"a"}


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (OSError(5, "Input/output error"), [1, 4, 16]),
        (TimeoutError(), [1, 4, 16]),
        (FileNotFoundError(2, "No such file"), [1]),
        (PermissionError(13, "Permission denied"), [1]),
    ],
)
def test_reads_are_tried_again_with_growing_waits_and_not_for_ever(
    error: OSError, waits: list[float]
) -> None:
    found = []
    while (wait := reread_wait_s(error, len(found))) is not None:
        found.append(wait)
    assert found == waits
