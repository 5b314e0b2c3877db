"""A pass lists its shards as they are taken, in the order that it had when it listed all at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.config.schema import Config
from stoker.data import Shard, Source, cut_indices, read_range
from stoker.serve.passes import Passes


def cut_at_once(n: int, records: int, order: Any, homes: int) -> list[Shard]:
    """How shards were listed when checkpoints were first written; their cursors count on this order."""
    parts: list[tuple[str, list[int]]]
    if order is None:
        parts = [(str(i), list(range(i, min(i + records, n)))) for i in range(0, n, records)]
    elif homes < 2:
        indices = order.permutation(n).tolist()
        parts = [("", indices[i : i + records]) for i in range(0, n, records)]
    else:
        whole = np.random.default_rng(0).permutation(n)
        parts = []
        for home in range(homes):
            own = order.permutation(whole[home::homes]).tolist()
            parts += [(str(home), own[i : i + records]) for i in range(0, len(own), records)]
        parts = [parts[i] for i in order.permutation(len(parts))]
    return [Shard("", rows=len(part), items=tuple(part), home=home) for home, part in parts]


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(0, 500),
    records=st.integers(1, 60),
    seed=st.none() | st.integers(0, 2**64 - 1),
    homes=st.integers(0, 12),
)
def test_shards_of_numbered_records_are_those_of_before(
    n: int, records: int, seed: int | None, homes: int
) -> None:
    orders = [None if seed is None else np.random.default_rng(seed) for _ in range(3)]
    before = cut_at_once(n, records, orders[0], homes)
    assert cut_indices(n, records, orders[1], homes) == before
    if n:
        now = read_range(n).shards(records, orders[2], homes)  # type: ignore[call-arg]
        assert len(now) == len(before) and [*now] == before
        assert [now[at] for at in reversed(range(-len(now), len(now)))] == [*reversed(before * 2)]
        assert now[1:-1:2] == before[1:-1:2]
        with pytest.raises(IndexError):
            now[len(now)]
    draws = [
        order.random() for order in orders if order is not None and (n or order is not orders[2])
    ]
    assert len({*draws}) <= 1, "and as many numbers are drawn"


class Reordering(Source):
    random = False

    def __init__(self) -> None:
        self.all = [Shard(f"s{n}", rows=1) for n in range(50)]

    def shards(self, records: int, order: Any) -> list[Shard]:
        order.shuffle(self.all)
        return self.all

    def read(self, shard: Shard, order: Any) -> Any:
        raise NotImplementedError

    def count(self) -> int:
        return len(self.all)


def test_the_list_of_a_users_source_may_change_with_the_next_pass() -> None:
    passes = Passes(Config.model_validate({"recipe": "r"}), {"train": Reordering()}, {})
    plans = [passes.plan("train", epoch, None) for epoch in range(2)]
    first = passes.rest(plans[0], None)
    now = [work.shard.path for work in first.take(10)]
    passes.rest(plans[1], None)
    now += [work.shard.path for work in first.take(100)]
    assert len({*now}) == 50, "each record once, although the second pass was listed meanwhile"
