"""Books of passes that were made anew replace those before, and repeats are counted beside them."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.errors import DataError
from stoker.events.console import books_text
from stoker.events.kinds import event_of
from stoker.events.sinks import Scalars
from stoker.events.summary import Records
from stoker.protocol import BlockReport, CarriedAccount
from stoker.read.sources import record_id
from stoker.serve.accounting import EpochAccount


def counts(split: str, epoch: int, read: int = 100, repeated: int = 0) -> dict[str, Any]:
    used = "trained" if split == "train" else "validated"
    books = {"quarantined": 0, "remainder": 0, "padded": 0, "repeated": repeated}
    return {"split": split, "epoch": epoch, "read": read, used: read, **books}


def test_epochs_that_are_trained_anew_without_a_checkpoint_count_once() -> None:
    # Train workers that were lost before the first checkpoint begin with epoch 0 and new weights.
    records = Records()
    for split, epoch in [("train", 0), ("val", 0), ("train", 1), ("train", 0), ("val", 0)]:
        records.add(counts(split, epoch))
    assert [(e["split"], e["epoch"]) for e in records.epochs] == [("train", 0), ("val", 0)]
    assert (records.read, records.trained, records.validated) == (100, 100, 100)


def test_a_validation_that_is_made_again_leaves_its_epochs_training_booked() -> None:
    records = Records()
    for split, epoch in [("train", 0), ("val", 0), ("val", 0)]:
        records.add(counts(split, epoch))
    assert (records.trained, records.validated) == (100, 100)


def test_repeats_are_counted_beside_the_books() -> None:
    books = EpochAccount("train", 0, carried=CarriedAccount(repeated=784))
    books.use(2022 + 1, 1, 0, [])
    books.read = 2022
    counted = books.reconcile()
    assert (counted["read"], counted["trained"], counted["repeated"]) == (2022, 2022, 785)
    records = Records()
    records.add({"split": "train", **counted})
    records.add(counts("train", 1))
    assert records.repeated == 785
    assert books_text(records).endswith("0 remaining; 785 repeated")
    scalars = Scalars()
    found = scalars.of(event_of({"event": "records", "split": "train", **counted}))
    assert found["data/repeated"] == 785


def test_rows_of_a_ray_dataset_that_changed_before_the_place_of_a_resume_are_found() -> None:
    # Such rows are read again from the first, and those that were trained before are skipped.
    def reconcile(first: str) -> dict[str, int]:
        before = CarriedAccount(trained=2, used_ids=record_id("a") + record_id("b"))
        books = EpochAccount("train", 0, carried=before)
        ids = sum(map(record_id, (first, "b", "c")))
        books.take(BlockReport(records=3, id_sum=ids), "a")
        books.use(1, 0, record_id("c"), [])
        return books.reconcile()

    assert reconcile("a")["trained"] == 3
    with pytest.raises(DataError, match="the data has changed since the checkpoint"):
        reconcile("x")


def test_books_without_repeats_say_nothing_of_them() -> None:
    records = Records()
    records.add(counts("train", 0))
    assert "repeated" not in books_text(records)
