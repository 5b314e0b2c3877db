"""What is trained more than once in an epoch is counted, and shown wherever the books are."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from rebuilding import rebuilt_as_recorded
from running import run_job
from streaming import Train, flat

from stoker.config.schema import Config


def job(order: str, block_records: int = 32) -> Config:
    return Config.model_validate(
        {
            "recipe": "rows:FromRay",
            "data": {"order": order, "block_records": block_records},
            "train": {"epochs": 2, "batch_size": 10},
            "seed": 3,
        }
    )


def interrupted(train: Train, steps: int) -> dict[str, Any]:
    seen = list(islice(train.steps("train", 0), steps))
    place: dict[str, Any] = json.loads(json.dumps(train.position(0, steps, flat(seen))))
    return place


def test_an_epoch_that_begins_again_counts_what_it_trains_once_more(ray_cluster: None) -> None:
    train = Train(job("any"))
    train.again(1, 0, interrupted(train, 4))
    train.again(1, 0, interrupted(train, 3))
    whole = flat(list(train.steps("train", 0)))
    counts = train.reconcile("train", 0, whole)
    assert (counts["read"], counts["trained"]) == (103, 103)
    assert counts["repeated"] == 40 + 30
    notes = [event["text"] for event in train.events("note")]
    assert "epoch 1 begins again" in notes[0] and "40 records are trained once more (40 repeated" in notes[0]
    assert "30 records are trained once more (70 repeated" in notes[1]
    # The next epoch has nothing to repeat.
    assert train.reconcile("train", 1, flat(list(train.steps("train", 1))))["repeated"] == 0
    train.close()


def test_rows_go_on_exactly_with_other_blocks_and_begin_again_in_another_order(ray_cluster: None) -> None:
    exact = Train(job("exact"))
    place = interrupted(exact, 4)
    exact.again(1, 0, None)
    whole = flat(list(exact.steps("train", 0)))
    exact.close()

    other_blocks = Train(job("exact", block_records=16), place=place)
    rest = flat(list(other_blocks.steps("train", 0)))
    assert rest == whole[40:]
    counts = other_blocks.reconcile("train", 0, rest)
    assert (counts["trained"], counts["repeated"]) == (103, 0)
    other_blocks.close()

    # Which rows were first is not known in another order, so none is left out.
    other_order = Train(job("any"), place=place)
    again = flat(list(other_order.steps("train", 0)))
    assert sorted(again) == sorted(whole)
    assert other_order.reconcile("train", 0, again)["repeated"] == 40
    other_order.close()


def test_padded_records_are_repeats_in_the_summary_and_on_the_screen(
    ray_cluster: None, tmp_path: Path
) -> None:
    outcome = run_job(
        tmp_path,
        recipe="rows:Counting",
        params={"train_records": 65, "val_records": 3},
        data={"remainder": "pad", "order": "exact", "block_records": 10},
        train={"epochs": 2, "workers": 2, "batch_size": 16},
        tracking={"record_ids": True, "tensorboard": False},
    )
    assert outcome.code == 0, outcome.summary.error
    assert outcome.summary.records.repeated == 2
    assert [e["repeated"] for e in outcome.summary.records.epochs if e["split"] == "train"] == [1, 1]
    assert outcome.summary.records.read == outcome.summary.records.trained == 130
    for epoch in range(2):
        ranks = (outcome.run_dir / "records").glob(f"train-epoch-{epoch:03d}-rank-*.txt")
        trained = Counter(key for rank in ranks for key in rank.read_text().split())
        assert sorted(trained.values()) == [1] * 64 + [2], "one of 65 is given to both workers"
    said = (outcome.run_dir / "logs/console.log").read_text()
    assert "130 read = 130 trained + 0 quarantined + 0 remaining; 2 repeated" in said
    assert "2 repeated" in (outcome.run_dir / "report.html").read_text()
    rebuilt_as_recorded(outcome.run_dir, 16, 3, range(1, 7))
