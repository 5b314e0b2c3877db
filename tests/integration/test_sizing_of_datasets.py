"""What a `ray.data.Dataset` costs per row of its result, whatever of it was made ahead."""

from __future__ import annotations

from typing import Any

import pytest
from worked import Busy, work

from launcher.advise.size import dataset as sizing
from stoker.errors import UsageError


class BusyActor:
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        work(6 * len(batch["id"]))
        return batch


def is_even(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2 == 0)


def about(seconds: float) -> Any:
    """0.95 to 1.6 times as much: Ray Data's own work per block counts, too, and less than a factor of 2."""
    return pytest.approx(1.275 * seconds, abs=0.325 * seconds)


def test_an_execution_that_is_cut_short_counts_by_rows_of_its_result(ray_cluster: None) -> None:
    """Half of the rows are filtered away, and the others wait for a slower actor."""
    import ray

    even = ray.data.range(10_000, override_num_blocks=500).map(Busy(2)).filter(is_even)
    one = ray.data.ActorPoolStrategy(size=1)
    slow = even.map_batches(BusyActor, compute=one, num_cpus=0.5)
    tables, costs, whole = sizing.run_dataset(slow.limit(4_900), 3.0, 2)
    assert whole is None and sum(len(table) for table in tables) >= 10
    assert list(costs) == ["ReadRange->Map(Busy)->Filter(is_even)", "MapBatches(BusyActor)"]
    assert costs["ReadRange->Map(Busy)->Filter(is_even)"] == about(0.004)
    assert costs["MapBatches(BusyActor)"] == about(0.006)


def test_two_datasets_cost_by_their_shares(ray_cluster: None) -> None:
    import ray

    dear = ray.data.range(100, override_num_blocks=10).map(Busy(8))
    cheap = ray.data.range(300, override_num_blocks=10).map(Busy(2))
    _, costs, whole = sizing.run_dataset(dear.union(cheap), 60.0, 2)
    assert whole == 400
    assert list(costs) == ["ReadRange->Map(Busy)"]
    assert costs["ReadRange->Map(Busy)"] == about((0.008 + 3 * 0.002) / 4)


def test_a_shuffle_stands_beside_what_it_shuffles(ray_cluster: None) -> None:
    import ray

    shuffled = ray.data.range(200, override_num_blocks=4).map(Busy(2)).repartition(2, keys=["id"])
    _, costs, whole = sizing.run_dataset(shuffled, 60.0, 2)
    assert whole == 200
    assert costs.pop("ReadRange->Map(Busy)") == about(0.002)
    assert any(name.startswith("HashShuffleMap") and cost > 0 for name, cost in costs.items())


def test_a_dataset_at_hand_costs_nothing(ray_cluster: None) -> None:
    import ray

    _, costs, whole = sizing.run_dataset(ray.data.from_items([{"x": i} for i in range(90)]), 60.0, 2)
    assert (costs, whole) == ({}, 90)


def test_what_fails_or_never_comes_is_one_line(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def fails(row: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no such row")

    with pytest.raises(UsageError, match=r"^size: the dataset failed: ValueError: no such row$"):
        sizing.run_dataset(ray.data.range(10).map(fails), 1.0, 2)
    with pytest.raises(UsageError, match=r"^size: the dataset has no row$"):
        sizing.run_dataset(ray.data.range(10).filter(lambda row: row["id"] > 10), 1.0, 2)
    monkeypatch.setattr(sizing, "DEADLINE_S", 2.0)
    with pytest.raises(UsageError, match="the dataset yielded no row within 2 s; run the job"):
        sizing.run_dataset(ray.data.range(2, override_num_blocks=1).map(Busy(60_000)), 1.0, 2)
