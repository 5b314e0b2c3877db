"""The books of records refuse to close when records were lost, doubled or exchanged."""

from __future__ import annotations

import pytest

from stoker.errors import DataError
from stoker.protocol import BadRecord, BlockReport
from stoker.read.sources import record_id
from stoker.serve.accounting import EpochAccount


def books_of(keys: list[str], bad: list[str] | None = None) -> EpochAccount:
    books = EpochAccount("train", 0)
    report = BlockReport(records=len(keys), id_sum=sum(map(record_id, keys)))
    for key in bad or []:
        report.bad.append(BadRecord(key, "broken"))
        report.bad_id_sum += record_id(key)
    assert books.take(report, "a")
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


def test_a_block_that_a_retried_task_reports_again_counts_once() -> None:
    books = books_of(["a", "b"])
    assert not books.take(BlockReport(records=2), "a")
    assert books.read == 2


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
