"""No record is lost: read = trained + quarantined + remainder in every epoch; repeats are counted."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rebuilding import rebuilt_as_recorded
from running import NO_PROGRESS_S, Outcome, run_job
from streaming import Train, flat

from stoker.config.schema import Config
from stoker.events.console import books_text
from stoker.events.summary import Summary


def ids(outcome: Outcome, split: str, epoch: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in (outcome.run_dir / "records").glob(f"{split}-epoch-{epoch:03d}-rank-*.txt"):
        found.update(path.read_text().split())
    return found


def test_every_record_is_accounted_for(ray_cluster: None, tmp_path: Path) -> None:
    workers = 2
    # 1,003 records, 2 of them bad: not divisible by workers × batch, by blocks, nor by workers.
    outcome = run_job(
        tmp_path,
        recipe="rows:Counting",
        params={"train_records": 1003, "val_records": 37, "bad": [5, 400]},
        data={"block_records": 64, "bad_record_budget": 0.01},
        train={"epochs": 2, "workers": workers, "strategy": "fsdp", "batch_size": 32, "lr": 0.001},
        tracking={"record_ids": True, "tensorboard": False},
    )
    assert outcome.code == 0, outcome.summary.error
    everyone = {str(i) for i in range(1003)} - {"5", "400"}
    for epoch in range(2):
        passes = outcome.summary.records.epochs
        [books] = [e for e in passes if (e["split"], e["epoch"]) == ("train", epoch)]
        trained = ids(outcome, "train", epoch)
        assert books["read"] == 1003
        assert books["quarantined"] == 2
        assert books["remainder"] == 1001 % workers < workers
        assert books["trained"] == 1003 - 2 - books["remainder"] == sum(trained.values())
        assert set(trained.values()) == {1}, "no record twice"
        assert len(everyone - set(trained)) == books["remainder"]
        assert set(trained) <= everyone
        validated = Counter(str(i) for i in range(37))
        assert ids(outcome, "val", epoch) == validated, "validation is exact"
    assert outcome.summary.records.trained == 2 * (1001 - 1001 % workers)
    quarantined = (outcome.run_dir / "quarantine.jsonl").read_text().splitlines()
    assert len(quarantined) == 2, "each once, though both epochs have met them"
    rebuilt_as_recorded(outcome.run_dir, 32, 16, (1, 9, 16, 17, 32))
    assert '"key": "5"' in quarantined[0] or '"key": "400"' in quarantined[0]


@pytest.mark.parametrize("recipe", ["rows:Counting", "rows:FromRay"])
def test_a_pass_in_which_nothing_moves_for_as_long_as_ray_data_bears_goes_on(
    recipe: str, ray_cluster: None
) -> None:
    slow = {"slow_s": NO_PROGRESS_S + 3}
    job = {
        "recipe": recipe,
        "params": slow if recipe == "rows:FromRay" else {"train_records": 103},
        "data": {"order": "exact", "shuffle": False, "block_records": 8},
        "train": {"epochs": 2, "batch_size": 8},
    }
    train = Train(Config.model_validate(job))
    steps = train.steps("train", 0)
    first = list(islice(steps, 4))
    time.sleep(NO_PROGRESS_S + 3)
    assert len(set(flat([*first, *steps]))) == 103
    train.close()


def test_the_order_is_permuted_anew_in_every_epoch_and_the_same_in_every_run(
    ray_cluster: None,
) -> None:
    job = {
        "recipe": "rows:Counting",
        "params": {"train_records": 200, "val_records": 3},
        "data": {"order": "exact", "block_records": 32},
        "train": {"epochs": 2, "batch_size": 16},
    }
    orders = []
    for _ in range(2):
        train = Train(Config.model_validate(job))
        epochs = []
        for epoch in range(2):
            epochs.append([i for step in train.steps("train", epoch) for i in step])
            train.reconcile("train", epoch, epochs[-1])
            train.reconcile("val", epoch, [i for step in train.steps("val", epoch) for i in step])
        orders.append(epochs)
        train.close()
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    assert sorted(orders[0][0]) == sorted(orders[0][1])
    assert len(set(orders[0][0])) == 200


def booked(summary: Summary) -> list[tuple[int, int, int, int]]:
    """Read, trained, quarantined and remaining: of each training pass, then of the run."""
    passes = [books for books in summary.records.epochs if books["split"] == "train"]
    names = ("read", "trained", "quarantined", "remainder")
    total = summary.records.model_dump()
    return [tuple(int(books[name]) for name in names) for books in [*passes, total]]  # type: ignore[misc]


BAD = {"train_records": 203, "bad": [5], "shard": 50}
SOURCES: list[tuple[dict[str, Any], int | None]] = [
    ({"recipe": "rows:Counting", "params": BAD}, 203),
    ({"recipe": "rows:FromRay"}, 103),
    ({"recipe": "uncertain:Unknown", "params": {"train_records": 203, "first_bad": 0}}, None),
]


@pytest.mark.parametrize(("source", "records"), SOURCES)
def test_an_epoch_that_max_steps_ends_is_booked_like_any_other(
    source: dict[str, Any], records: int | None, ray_cluster: None, tmp_path: Path
) -> None:
    def job(steps: int) -> Outcome:
        data = {"order": "exact", "bad_record_budget": 0.1, "block_records": 16}
        more: dict[str, Any] = {"data": data, "export": ["safetensors"]}
        train = {"epochs": 3, "batch_size": 8, "lr": 0.001, "max_steps": steps}
        outcome = run_job(tmp_path, run_dir=tmp_path / "run", train=train, **source, **more)
        assert outcome.code == 0, outcome.summary.error
        said = (outcome.run_dir / "logs/console.log").read_text()
        row = re.findall(r"records: (.*)|records +(\d.*)", said)[-1]
        assert "".join(row).startswith(books_text(outcome.summary.records).split(" (")[0]), said
        return outcome

    first_start = job(5).summary
    begun = booked(first_start)
    (read, trained, bad, left), total = begun
    assert trained == 40 and read == 40 + bad + left and left > 0
    assert read <= (records or 203)
    assert total == begun[0]

    if source["recipe"] == "rows:Counting":
        again = job(5).summary
        assert booked(again) == begun and again.records.validated == first_start.records.validated
        assert again.epochs == 1 and "train/loss" in again.metrics.last

    whole = (records or 203) - bool(source.get("params", {}).get("bad"))
    per_epoch = -(-whole // 8)
    # Within a block, so that some rows of what was surely read are left.
    further = job(per_epoch + 5).summary
    first, second, total = booked(further)
    assert first == (records or 203, whole, (records or 203) - whole, 0)
    assert second[1] == 40 and second[0] == 40 + second[2] + second[3] and second[3] > 0
    assert total == tuple(map(sum, zip(first, second, strict=True)))
    assert further.records.verb == "planned"

    if source["recipe"] == "rows:Counting":
        # A limit that is the end of an epoch leaves nothing of it.
        whole_run = tuple(2 * count for count in first)
        assert booked(job(2 * per_epoch).summary) == [first, first, whole_run]


def job(order: str, block_records: int = 32) -> Config:
    data = {"order": order, "block_records": block_records}
    job = {"recipe": "rows:FromRay", "data": data, "train": {"epochs": 2, "batch_size": 10}}
    return Config.model_validate(job | {"seed": 3})


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
    assert "epoch 1 begins again" in notes[0]
    assert "40 records are trained once more (40 repeated" in notes[0]
    assert "30 records are trained once more (70 repeated" in notes[1]
    # The next epoch has nothing to repeat.
    assert train.reconcile("train", 1, flat(list(train.steps("train", 1))))["repeated"] == 0
    train.close()


def test_rows_go_on_exactly_with_other_blocks_and_begin_again_in_another_order(
    ray_cluster: None,
) -> None:
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
    assert outcome.summary.records.repeated == 6
    passes = [books for books in outcome.summary.records.epochs if books["split"] == "train"]
    assert [books["repeated"] for books in passes] == [3, 3]
    assert outcome.summary.records.read == outcome.summary.records.trained == 130
    for epoch in range(2):
        ranks = (outcome.run_dir / "records").glob(f"train-epoch-{epoch:03d}-rank-*.txt")
        trained = Counter(key for rank in ranks for key in rank.read_text().split())
        assert sorted(trained.values()) == [1] * 64 + [4], "both workers get one of 65 twice"
    said = (outcome.run_dir / "logs/console.log").read_text()
    assert "130 read = 130 trained + 0 quarantined + 0 remaining; 6 repeated" in said
    assert "6 repeated" in (outcome.run_dir / "report.html").read_text()
    rebuilt_as_recorded(outcome.run_dir, 16, 3, range(1, 7))
