"""Ray Data's statistics of a long run: sums count every block, and memory does not grow with them."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.data.engine import statistics
from stoker.data.engine.ray_internals import Execution

ROWS, TASKS = 60, 3


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"] * 2}


def execution() -> tuple[str, list[statistics.Operator], list[int]]:
    """An execution that makes a block of each row: its text, its operators, the entries in memory."""
    import ray

    context = ray.data.DataContext.get_current().copy()
    context.target_max_block_size = 1
    with ray.data.DataContext.current(context):
        numbers = ray.data.range(ROWS, override_num_blocks=TASKS).map_batches(doubled, batch_size=1)
        ran = Execution(numbers)
        blocks = sum(1 for _ in ran.blocks())
        assert blocks == ROWS
        text, operators = ran.statistics()
        kept = [len(stats) for operator in ran._executor._topology for stats in operator.get_stats().values()]
        ran.shutdown()
    return text, operators, kept


def test_sums_count_every_block_and_only_recent_ones_stay_in_memory(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, whole, kept = execution()
    assert max(kept) == ROWS
    assert "leave out" not in text
    monkeypatch.setattr(statistics, "RECENT_BLOCKS", 5)
    text, summed, kept = execution()
    assert max(kept) < 10
    assert "all figures above leave out its first" in text
    exact = ("name", "tasks", "rows", "bytes")
    assert [[o[key] for key in exact] for o in summed] == [[o[key] for key in exact] for o in whole]  # type: ignore[literal-required]
    assert [(o["tasks"], o["rows"]) for o in summed] == [(TASKS, ROWS), (ROWS, ROWS)]
    assert all(o["cpu_s"] > 0 < o["wall_s"] for o in summed)
