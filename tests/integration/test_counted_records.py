"""Data that is not what it was counted as, or of unknown count with too many bad records, fails the run."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from running import run_job
from streaming import Train

from stoker.config.schema import Config
from stoker.errors import DataError

DATA = {"bad_record_budget": 0.1, "block_records": 20, "shuffle": False, "order": "exact"}
TRAIN = {"epochs": 1, "batch_size": 10}
LOST = "the source counted 101 records before training, but gave"


def test_a_run_with_a_lost_record_fails_when_its_epoch_closes(
    ray_cluster: None, tmp_path: Path
) -> None:
    params = {"train_records": 101, "val_records": 10}
    outcome = run_job(tmp_path, recipe="uncertain:Short", params=params, data=DATA, train=TRAIN)
    assert (outcome.code, outcome.summary.status) == (1, "failed")
    assert outcome.summary.error == f"train epoch 1: {LOST} 100: the data has changed or is damaged"


@pytest.mark.parametrize(("more", "given"), [(-1, "100"), (1, "102"), (0, "")])
def test_what_an_earlier_run_consumed_counts_too(more: int, given: str, ray_cluster: None) -> None:
    """The epoch is interrupted after 30 rows, one bad record among those read, and closed by another run."""
    job: dict[str, Any] = {"recipe": "rows:Counting", "params": {"bad": (3,)}}
    if more:
        job = {"recipe": "uncertain:Short", "params": {"more": more}}
    job["params"]["train_records"] = 101
    train = Train(Config.model_validate({**job, "data": DATA, "train": TRAIN}))
    try:
        ids = [i for step in islice(train.steps("train", 0), 3) for i in step]
        train.again(1, 0, train.position(0, 3, ids))
        rest = [i for step in train.steps("train", 0) for i in step]
        if not more:
            assert train.reconcile("train", 0, rest)["read"] == 101
        else:
            with pytest.raises(DataError, match=f"{LOST} {given}"):
                train.reconcile("train", 0, rest)
    finally:
        train.close()


def job(budget: float, **params: Any) -> Config:
    data = {"block_records": 10, "bad_record_budget": budget, "shuffle": False}
    job = {"recipe": "uncertain:Unknown", "params": params, "data": data, "train": TRAIN}
    return Config.model_validate(job)


TOO_MANY = [
    (2000, r"none of the first [234]0 train records can be used; the first is"),
    (15, r"[12]\d of \d+ train records read so far cannot be used, more than"),
]


@pytest.mark.parametrize(("first_bad", "said"), TOO_MANY)
def test_a_source_with_too_many_bad_records_fails_long_before_its_end(
    first_bad: int, said: str, ray_cluster: None
) -> None:
    train = Train(job(0.0001, train_records=2000, first_bad=first_bad))
    try:
        with pytest.raises(DataError, match=said):
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
