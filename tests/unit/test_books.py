"""The books of records refuse to close when records were lost, doubled or exchanged; repeats stand beside."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.errors import DataError
from stoker.events.console import books_text
from stoker.events.kinds import event_of
from stoker.events.sinks import Scalars
from stoker.events.summary import Records
from stoker.protocol import BadRecord, BlockReport, CarriedAccount, DataCursor, Plan
from stoker.read.sources import record_id
from stoker.serve.accounting import EpochAccount


def books_of(keys: list[str], bad: list[str] | None = None) -> EpochAccount:
    books = EpochAccount("train", 0)
    report = BlockReport(records=len(keys), id_sum=sum(map(record_id, keys)))
    for key in bad or []:
        report.bad.append(BadRecord(key, "broken"))
        report.bad_id_sum += record_id(key)
    books.take(report, "a")
    return books


def use(books: EpochAccount, keys: list[str]) -> None:
    books.trained, books.used_ids = len(keys), sum(map(record_id, keys))


def test_a_whole_epoch_closes() -> None:
    books = books_of(["a", "b", "c"], bad=["c"])
    use(books, ["b", "a"])
    assert books.reconcile()["quarantined"] == 1


def test_a_lost_record_is_named_by_the_figures() -> None:
    books = books_of(["a", "b", "c"])
    use(books, ["a", "b"])
    with pytest.raises(DataError, match=r"3 records were read, but 2 trained \+ 0 quarantined"):
        books.reconcile()


def test_an_exchanged_record_is_found_although_the_counts_agree() -> None:
    books = books_of(["a", "b", "c"])
    use(books, ["a", "b", "b"])
    with pytest.raises(DataError, match="record ids do not"):
        books.reconcile()


@pytest.mark.parametrize(
    ("made", "late", "expected"),
    [
        (
            [(3, 0, False)],
            (3, 0, False),
            "block 0 of shard number 3 arrived, but block 1 was the next one",
        ),
        (
            [(3, 0, False)],
            (3, 2, True),
            "block 2 of shard number 3 arrived, but block 1 was the next one",
        ),
        ([(3, 0, False), (3, 1, True)], (3, 1, True), "block 1 .* but none was to follow"),
        ([(3, 0, False), (3, 1, True)], (3, 2, True), "block 2 .* but none was to follow"),
        ([(2, 0, True), (4, 0, True)], (3, 1, True), "block 1 .* but block 0 was the next one"),
    ],
    ids=[
        "repeated",
        "one is missing",
        "repeated after the last",
        "one too many",
        "the first is missing",
    ],
)
def test_a_block_out_of_turn_ends_the_run(
    made: list[tuple[int, int, bool]], late: tuple[int, int, bool], expected: str
) -> None:
    books = EpochAccount("train", 0)
    for block in made:
        books.take(BlockReport(*block, records=2), "a")
    with pytest.raises(DataError, match=f"train epoch 1: {expected}"):
        books.take(BlockReport(*late, records=2), "a")


def test_a_block_of_what_an_earlier_run_consumed_ends_the_run() -> None:
    plan = Plan(seed=1, shuffle=True, order="any", block_records=4, fingerprint="f")
    start = DataCursor(epoch=0, plan=plan, done=[(0, 5)], partial={6: (2, 1)})
    for consumed in (BlockReport(4, 0), BlockReport(6, 1)):
        with pytest.raises(DataError, match="arrived, but"):
            EpochAccount.since("train", 0, start).take(consumed, "a")
    EpochAccount.since("train", 0, start).take(BlockReport(6, 2), "a")


def test_the_budget_is_checked_against_the_whole_split() -> None:
    books = books_of(["a", "b"], bad=["b"])
    books.check_budget(0.001, total=1000)
    with pytest.raises(
        DataError, match=r"1 of 999 train records cannot be used.*the first is b: broken"
    ):
        books.check_budget(0.001, total=999)


def test_a_chain_that_fails_on_all_of_its_first_records_is_no_matter_of_the_budget() -> None:
    keys = [str(n) for n in range(25)]
    books_of(keys[:19], bad=keys[:19]).check_budget(0.5, total=10_000)
    books_of(keys, bad=keys[1:]).check_budget(0.5, total=10_000)
    with pytest.raises(
        DataError, match=r"none of the first 25 train records can be used; the first is 0: br"
    ):
        books_of(keys, bad=keys).check_budget(0.5, total=10_000)
    books_of(keys, bad=keys).check_budget(1.0, total=10_000)


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
