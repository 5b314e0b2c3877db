"""Work that kills its process, fails or hangs is bounded, and the record that does it is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import DataError
from stoker.read.sources import reread_wait_s
from stoker.serve.recovery import Patience, give_up_s
from stoker.serve.suspects import NAMED_DEATHS, UNNAMED_DEATHS, Suspects
from tests.refusals import refused


def run(
    suspects: Suspects,
    keys: Sequence[str],
    kills: Callable[[str], bool],
    task: str = "task",
    start: int = 0,
    before: Callable[[int], bool] = lambda number: False,
) -> tuple[list[str], int]:
    """A task that Ray starts again whenever its process dies: what it gives, and how often it was started."""
    number = start
    while True:
        names = False
        if number:
            names = suspects.starts(task, "train", number)[1]
        if before(number):
            number += 1
            continue
        good = []
        for key in keys:
            if names and suspects.begins(task, "train", key):
                continue
            if kills(key):
                break
            good.append(key)
        else:
            if number:
                suspects.ended(task)
            return good, number
        number += 1


@pytest.mark.long
@given(
    st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1),
    st.sets(st.sampled_from("abcdefgh")),
)
def test_exactly_the_deadly_records_are_quarantined(keys: list[str], deadly: set[str]) -> None:
    suspects = Suspects()
    good, deaths = run(suspects, keys, lambda key: key in deadly)
    assert good == [key for key in keys if key not in deadly]
    assert set(suspects.of("train")) == deadly & set(keys)
    assert deaths == (2 + NAMED_DEATHS * len(deadly & set(keys)) if deadly & set(keys) else 0)
    # Blocks that a lost host takes along are made again, and are the same.
    assert run(suspects, keys, lambda key: key in deadly, start=deaths + 1)[0] == good


def test_one_death_at_a_record_may_be_chance() -> None:
    suspects, left = Suspects(), [3]

    def kills(key: str) -> bool:
        left[0] -= key == "b" and left[0] > 0
        return key == "b" and left[0] > 0

    assert run(suspects, "abc", kills)[0] == ["a", "b", "c"]
    assert not suspects.of("train")


def test_a_death_by_chance_is_forgotten_once_the_work_is_complete() -> None:
    suspects, starts = Suspects(), 0

    def kills_once(key: str) -> bool:
        nonlocal starts
        starts += key == "b"
        return starts <= 3 and key == "b"  # its third start is the first to name records

    for epoch in range(5):
        starts = 0
        assert run(suspects, "abc", kills_once, task=f"epoch {epoch}") == (["a", "b", "c"], 3)
    assert not suspects.of("train")
    assert suspects.starts("another", "train", 1) == Suspects().starts("another", "train", 1)


def test_deaths_that_no_record_is_to_blame_for_end_the_run() -> None:
    with refused("chain_worker.died"):
        run(Suspects(), "abc", lambda key: False, before=lambda number: True)
    suspects, waits = Suspects(), list[float]()
    with pytest.raises(DataError, match="the last time reading record 7"):
        for number in range(1, UNNAMED_DEATHS + 1):
            waits.append(suspects.starts("x", "train", number)[0])
            suspects.does("x", "reading record 7")
    assert waits == sorted(waits) and waits[-1] > waits[0] and not suspects.of("train")


def test_a_late_task_names_its_records_from_its_first_start() -> None:
    suspects = Suspects()
    assert suspects.starts("x", "train", 0) == (0.0, True)
    assert suspects.begins("x", "train", "cat/1.jpg") == ""
    assert suspects.doing("x") == "at record cat/1.jpg"
    assert suspects.doing("another") == ""


def test_lost_hosts_blame_nobody_once_the_work_is_done() -> None:
    suspects = Suspects()
    for number in range(1, 30):  # after it had ended: its blocks were lost with their host
        assert run(suspects, "abc", lambda key: False, start=number) == (["a", "b", "c"], number)
    assert not suspects.of("train")


def test_a_deadline_is_twenty_times_what_such_blocks_take_and_doubles() -> None:
    patience = Patience()
    unknown = patience.deadline_s("train", "a", late=0, stall_s=600)
    assert unknown == 300, "nobody knows how slow its chain is"
    for seconds in (9.0, 10.0, 500.0):
        patience.took("train", "a", seconds)
    assert patience.deadline_s("train", "a", late=0, stall_s=600) == 200
    assert patience.deadline_s("train", "a", late=2, stall_s=600) == 800
    assert patience.deadline_s("train", "new", late=0, stall_s=600) == 400
    assert patience.deadline_s("val", "a", late=0, stall_s=600) == 300, "another kind of work"
    for _ in range(200):
        patience.took("train", "a", 0.1)
    least = patience.deadline_s("train", "a", late=0, stall_s=600)
    assert least == 60, "a tenth of the stall time-out"


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
    assert patience.avoid("a", now=440 + 3599) == 480
    assert patience.avoid("a", now=4039 + 480 + 3601) == 120, "an hour without is forgiven"


WAITS: list[tuple[OSError, list[float]]] = [
    (OSError(5, "Input/output error"), [1, 4, 16]),
    (TimeoutError(), [1, 4, 16]),
    (FileNotFoundError(2, "No such file"), [1]),
    (PermissionError(13, "Permission denied"), [1]),
]


@pytest.mark.parametrize(("error", "waits"), WAITS)
def test_reads_are_tried_again_with_growing_waits_and_not_for_ever(
    error: OSError, waits: list[float]
) -> None:
    found = []
    while (wait := reread_wait_s(error, len(found))) is not None:
        found.append(wait)
    assert found == waits
