"""The books of records refuse to close when records were lost, doubled or exchanged; repeats stand beside."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from stoker.events.console import books_text
from stoker.events.kinds import event_of
from stoker.events.sinks import Scalars
from stoker.events.summary import Records
from stoker.protocol import BadRecord, BlockReport, CarriedAccount, DataCursor, Plan
from stoker.read.sources import record_id
from stoker.serve.accounting import EpochAccount
from tests.refusals import refused


def books_of(keys: list[str], bad: list[str] | None = None) -> EpochAccount:
    books = EpochAccount("train", 0)
    report = BlockReport(records=len(keys), id_sum=sum(map(record_id, keys)))
    for key in bad or []:
        report.bad.append(BadRecord(key, "broken"))
        report.bad_id_sum += record_id(key)
    books.take(report, "a")
    return books


@pytest.mark.parametrize(
    ("used", "key"),
    [("ba", ""), ("a", "account.counts"), ("aa", "account.ids"), ("abc", "account.counts")],
)
def test_an_epoch_closes_only_if_each_record_was_used_once(used: str, key: str) -> None:
    books = books_of(["a", "b", "c"], bad=["c"])
    books.use(len(used), 0, sum(map(record_id, used)), [])
    with refused(key) if key else nullcontext():
        assert books.reconcile()["quarantined"] == 1


@pytest.mark.parametrize(
    ("made", "late"),
    [
        pytest.param([(3, 0, False)], (3, 0, False), id="repeated"),
        pytest.param([(3, 0, False)], (3, 2, True), id="one is missing"),
        pytest.param([(3, 0, True)], (3, 0, True), id="repeated after the last"),
        pytest.param([(3, 0, True)], (3, 1, True), id="one too many"),
        pytest.param([(2, 0, True)], (3, 1, True), id="the first is missing"),
        pytest.param([], (4, 0, True), id="consumed before this start"),
        pytest.param([], (6, 1, True), id="consumed in part"),
    ],
)
def test_a_block_out_of_turn_ends_the_run(
    made: list[tuple[int, int, bool]], late: tuple[int, int, bool]
) -> None:
    plan = Plan(seed=1, shuffle=True, order="any", block_records=4, fingerprint="f")
    start = DataCursor(epoch=0, plan=plan, done=[(4, 6)], partial={6: (2, 1)})
    books = EpochAccount.since("train", 0, start)
    for block in [*made, (6, 2, False)]:
        books.take(BlockReport(*block, records=2), "a")
    with refused("account.order"):
        books.take(BlockReport(*late, records=2), "a")


@pytest.mark.parametrize(
    ("read", "bad", "budget", "total", "refuses"),
    [
        pytest.param(2, 1, 0.001, 1000, False, id="of the whole split"),
        pytest.param(2, 1, 0.001, 999, True, id="above the budget"),
        pytest.param(19, 19, 0.5, 10_000, False, id="too few to tell"),
        pytest.param(25, 24, 0.5, 10_000, False, id="not all"),
        pytest.param(25, 25, 0.5, 10_000, True, id="all of the first"),
        pytest.param(25, 25, 1.0, 10_000, False, id="no budget"),
    ],
)
def test_the_budget_of_bad_records(
    read: int, bad: int, budget: float, total: int, refuses: bool
) -> None:
    keys = [str(n) for n in range(read)]
    books = books_of(keys, bad=keys[:bad])
    with refused("data.bad_record_budget") if refuses else nullcontext():
        books.check_budget(budget, total)


def counts(split: str, epoch: int, read: int = 100, repeated: int = 0) -> dict[str, Any]:
    used = "trained" if split == "train" else "validated"
    books = {"quarantined": 0, "remainder": 0, "padded": 0, "repeated": repeated}
    return {"split": split, "epoch": epoch, "read": read, used: read, **books}


@pytest.mark.parametrize(
    ("passes", "validated"),
    [
        pytest.param([("train", 0), ("val", 0), ("val", 0)], 100, id="validated again"),
        # Train workers that were lost before the first checkpoint begin with epoch 0.
        pytest.param(
            [("train", 0), ("val", 0), ("train", 1), ("train", 0), ("val", 0)], 100, id="anew"
        ),
    ],
)
def test_epochs_that_are_done_again_count_once(
    passes: list[tuple[str, int]], validated: int
) -> None:
    records = Records()
    for split, epoch in passes:
        records.add(counts(split, epoch))
    assert [(e["split"], e["epoch"]) for e in records.epochs] == [("train", 0), ("val", 0)]
    assert (records.read, records.trained, records.validated) == (100, 100, validated)
    assert "repeated" not in books_text(records)


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
    with refused("account.ids"):
        reconcile("x")
