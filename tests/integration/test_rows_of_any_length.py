"""Rows that differ in length on a real cluster: the rows of a run that was interrupted, value by value."""

from __future__ import annotations

from itertools import islice

import numpy as np
from lengths import values
from streaming import Train, flat

from stoker.config.schema import Config


def job() -> Config:
    data = {"block_records": 16, "order": "exact", "bucket_by": "ids"}
    data |= {"cache": "memory", "cache_gb": 0.01}
    job = {"recipe": "lengths:Lengths", "data": data, "train": {"epochs": 4, "batch_size": 7}}
    return Config.model_validate(job | {"seed": 1})


def rows(train: Train) -> list[int]:
    found: list[int] = []
    for batch in train.kept():
        for i, index in enumerate(batch["index"].tolist()):
            own, n = values(index), int(batch["ids_length"][i])
            assert n == len(own) == batch["pairs_length"][i]
            assert batch["ids"][i].tolist() == own + [-1] * (batch["ids"].shape[1] - n)
            assert np.array_equal(batch["pairs"][i, :n], np.array([own, [-v for v in own]]).T)
            assert not batch["pairs"][i, n:].any()
        longest = int(batch["ids_length"].max())
        assert (batch["ids"].shape[1], batch["pairs"].shape[1]) == (longest, -(-longest // 4) * 4)
        found += batch["index"].tolist()
    return found


def test_interrupted_is_uninterrupted_with_rows_of_any_length_and_a_cache(
    ray_cluster: None,
) -> None:
    train = Train(job(), workers=2, keeps=True)
    expected = []
    for epoch in range(4):
        ids = flat(list(train.steps("train", epoch)))
        expected.append(rows(train))
        train.reconcile("train", epoch, ids)
    assert [sorted(numbers) for numbers in expected] == [list(range(300))] * 4
    # Passes overlap, so the second may read records that the first has not cached yet; the fourth begins
    # after the end of the first.
    assert train.events("cache")[-1]["found"] == 300, "the fourth epoch comes from the cache"
    # From step 5 of the first epoch on, with one train worker; batches begin within blocks.
    train.again(2, 0, None)
    begun = flat(list(islice(train.steps("train", 0), 5)))
    assert rows(train) == expected[0][:70]
    place = train.position(0, 5, begun)
    train.again(1, 0, place)
    rest = flat(list(train.steps("train", 0)))
    assert rows(train) == expected[0][70:]
    assert train.reconcile("train", 0, rest)["trained"] == 300
    train.close()
