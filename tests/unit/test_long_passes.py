"""However long a pass, the head needs memory for what is under way and not for what was."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from benchmarks import long_passes
from stoker.protocol import BlockReport, DataCursor, Plan
from stoker.serve import recipe_pass
from stoker.serve.cursor import Trail

EARLY, LATE = 3_000, 12_000


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
