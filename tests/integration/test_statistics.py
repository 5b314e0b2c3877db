"""Ray Data's statistics of a long run: sums count every block, and memory does not grow with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stoker.serve import statistics
from stoker.serve.ray_internals import Execution

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


def test_a_task_counts_once_however_its_blocks_mix_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RECENT_BLOCKS", 2)
    monkeypatch.setattr(statistics, "FAR", 3)
    blocks = statistics.RecentBlocks()
    # Task 3 makes none, and the first one goes on to the end.
    for task in (1, 0, 2, 1, 0, 4, 4, 5, 0, 6, 7, 6, 8, 0):
        blocks.extend(
            [
                SimpleNamespace(
                    exec_stats=SimpleNamespace(task_idx=task, cpu_time_s=1.0, wall_time_s=1.0),
                    num_rows=1,
                    size_bytes=1,
                )
            ]
        )
    assert blocks.tasks == 8
    assert blocks.rows + len(blocks) == 14 and len(blocks) < 4 and len(blocks._beyond) <= 3
