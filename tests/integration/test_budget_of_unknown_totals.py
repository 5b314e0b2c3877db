"""The budget for bad records acts during a pass also where nobody knows how many records there are."""

from __future__ import annotations

from typing import Any

import pytest
from streaming import Train

from stoker.config.schema import Config


def job(budget: float, **params: Any) -> Config:
    return Config.model_validate(
        {
            "recipe": "uncertain:Unknown",
            "params": params,
            "data": {"block_records": 10, "bad_record_budget": budget, "shuffle": False},
            "train": {"epochs": 1, "batch_size": 10},
        }
    )


@pytest.mark.parametrize(
    ("first_bad", "said"),
    [
        (2000, r"none of the first [234]0 train records can be used; the first is"),
        (15, r"[12]\d of \d+ train records read so far cannot be used, more than"),
    ],
)
def test_a_source_with_too_many_bad_records_fails_long_before_its_end(
    first_bad: int, said: str, ray_cluster: None
) -> None:
    train = Train(job(0.0001, train_records=2000, first_bad=first_bad))
    try:
        with pytest.raises(AssertionError, match=said):
            list(train.steps("train", 0))
    finally:
        train.close()


def test_bad_records_at_the_start_are_no_false_alarm(ray_cluster: None) -> None:
    train = Train(job(0.05, train_records=200, first_bad=10))
    try:
        ids = [i for step in train.steps("train", 0) for i in step]
        assert len(ids) == 190
        assert train.reconcile("train", 0, ids)["quarantined"] == 10
    finally:
        train.close()
