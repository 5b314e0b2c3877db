"""The books of records refuse to close when records were lost, doubled or exchanged."""

from __future__ import annotations

import pytest

from stoker.errors import DataError
from stoker.protocol import BadRecord, BlockReport, DataCursor, Plan
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
        ([(3, 0, False)], (3, 0, False), "block 0 of shard number 3 arrived, but block 1 was the next one"),
        ([(3, 0, False)], (3, 2, True), "block 2 of shard number 3 arrived, but block 1 was the next one"),
        ([(3, 0, False), (3, 1, True)], (3, 1, True), "block 1 .* but none was to follow"),
        ([(3, 0, False), (3, 1, True)], (3, 2, True), "block 2 .* but none was to follow"),
        ([(2, 0, True), (4, 0, True)], (3, 1, True), "block 1 .* but block 0 was the next one"),
    ],
    ids=["repeated", "one is missing", "repeated after the last", "one too many", "the first is missing"],
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
    with pytest.raises(DataError, match=r"1 of 999 train records cannot be used.*the first is b: broken"):
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
