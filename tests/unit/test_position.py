"""Positions in a pass: what they are compared with, and how little of the pass they keep."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import long_passes
from stoker.protocol import BlockReport, DataCursor, Plan
from stoker.serve import recipe_pass
from stoker.serve.cursor import Trail, refuse_other_data
from stoker.serve.items import Numbers
from tests.refusals import refused

PLAN = Plan(seed=1, shuffle=True, order="any", block_records=4, fingerprint="f")


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "g"},
        {"seed": 2},
        {"shuffle": False},
        {"bucket_by": "ids"},
        {"cache_share": 0.25},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_data_or_another_order_are_refused(change: dict[str, object]) -> None:
    plan = PLAN.model_copy(update={"cache_share": 0.5})
    with refused("resume", code=2):
        refuse_other_data(DataCursor(epoch=0, plan=plan), plan.model_copy(update=change))


def test_other_validation_data_is_refused_where_the_checkpoint_names_its_own() -> None:
    saved = DataCursor(epoch=0, plan=PLAN.model_copy(update={"validation": "v~1"}))
    earlier = DataCursor.model_validate(
        {"epoch": 0, "plan": PLAN.model_dump(exclude={"validation"})}
    )
    for now in ("w~1", "v~2", ""):
        plan = PLAN.model_copy(update={"validation": now})
        refuse_other_data(earlier, plan)
        with refused("resume", code=2):
            refuse_other_data(saved, plan)
    refuse_other_data(saved, saved.plan.model_copy(update={"validation": "v~1~2"}))


def test_what_may_differ_between_the_two_runs() -> None:
    other = PLAN.model_copy(update={"order": "exact", "block_records": 9, "cache_share": 0.5})
    refuse_other_data(DataCursor(epoch=0, plan=PLAN), other)


@given(st.lists(st.integers(0, 50)))
def test_delivered_shards_take_memory_for_their_gaps_only(numbers: list[int]) -> None:
    kept = Numbers()
    for number in numbers:
        kept.add(number)
    assert {number for number in range(-1, 53) if number in kept} == set(numbers)
    assert [n for first, stop in kept.ranges for n in range(first, stop)] == sorted(set(numbers))
    assert all(stop < first for (_, stop), (first, _) in pairwise(kept.ranges)), "no two that touch"


EARLY, LATE = 3_200, 12_800
"""Multiples of what a loader submits at once, so that as much is under way at both."""


@pytest.mark.parametrize("drive", [long_passes.recipe, long_passes.loader])
def test_the_heads_memory_does_not_grow_with_the_batches_of_a_pass(
    drive: Callable[[int], Iterator[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_pass, "KEPT_STEPS", 100)
    monkeypatch.setattr(long_passes, "BATCH", 2)
    monkeypatch.setattr(long_passes, "SHARD", 8)
    held = {}
    tracemalloc.start()
    try:
        for batch in drive(LATE + 1000):  # to the end of the pass, whose account closes
            if batch in (EARLY, LATE):
                gc.collect()  # also what other tests have left
                held[batch] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held[LATE] - held[EARLY] < 2 * (LATE - EARLY), "less than any number for each batch"


def test_a_position_before_those_that_can_be_asked_for_is_refused() -> None:
    plan = Plan(seed=1, shuffle=True, order="any", block_records=4, fingerprint="f")
    trail = Trail(DataCursor(epoch=0, plan=plan))
    for nth in range(3):
        trail.report(BlockReport(7, nth, nth == 2, 4, records=4))
        trail.arrive(7, 4)
    whole = trail.after(6, 0)
    trail.leave(5)
    assert trail.after(6, 0) == whole and whole.partial == {7: (1, 2)}
    assert trail.after(12, 0).done == [(7, 8)] and trail.after(12, 0).books.read == 12
    with pytest.raises(ValueError, match="after 4 rows is no longer known, only from 5 on"):
        trail.after(4, 0)
