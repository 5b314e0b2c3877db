"""Records that kill their process, mounts that hiccup, hosts that hang: named, and no record is lost."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from running import run_job
from streaming import Train, flat

from stoker.config.schema import Config
from stoker.errors import DataError
from stoker.read.sources import cut_indices, record_id
from stoker.serve.shards import order_of

RECORDS, SHARD, SEED = 120, 40, 3


def seeded(epoch: int, without: tuple[int, ...]) -> list[int]:
    shards = cut_indices(RECORDS, SHARD, order_of(SEED, epoch))
    return [i for shard in shards for i in shard.items if i not in without]


def params(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "train_records": RECORDS,
        "val_records": 5,
        "shard": SHARD,
        "folder": str(folder),
        **more,
    }


def test_a_record_that_kills_its_process_is_quarantined_in_every_epoch(
    ray_cluster: None, tmp_path: Path
) -> None:
    outcome = run_job(
        tmp_path,
        recipe="faults:Faulty",
        params=params(tmp_path, kills=[17]),
        data={"order": "exact", "block_records": 16, "bad_record_budget": 0.02},
        train={"epochs": 2, "batch_size": 10, "lr": 0.001},
        tracking={"record_ids": True, "tensorboard": False},
        seed=SEED,
    )
    assert outcome.code == 0, outcome.summary.error
    books = [e for e in outcome.summary.records.epochs if e["split"] == "train"]
    assert [(e["read"], e["trained"], e["quarantined"]) for e in books] == [(120, 119, 1)] * 2
    for epoch in range(2):
        path = outcome.run_dir / "records" / f"train-epoch-{epoch:03d}-rank-0.txt"
        assert [int(key) for key in path.read_text().split()] == seeded(epoch, (17,))
    lines = [
        json.loads(line) for line in (outcome.run_dir / "quarantine.jsonl").read_text().splitlines()
    ]
    assert [line["key"] for line in lines] == ["17"], "listed once, by the epoch that met it first"
    assert all("its process died 2 times" in line["reason"] for line in lines)
    deaths = len((tmp_path / "deaths").read_text())
    assert 4 <= deaths <= 8, (
        "four, and as many in a task of the next epoch that had been sent before"
    )
    again = [
        event["split"] for event in outcome.summary.events if event["event"] == "work_repeated"
    ]
    assert again == ["train"] * deaths, (
        "the work of a process that died is done again, and the run says so"
    )


def test_a_hiccup_a_hang_and_two_deadly_records_change_neither_order_nor_position(
    ray_cluster: None, tmp_path: Path
) -> None:
    order = seeded(0, ())
    flaky, hangs, kills = order[5], order[50], (order[20], order[100])
    config = Config.model_validate(
        {
            "recipe": "faults:Faulty",
            "params": params(tmp_path, kills=kills, flaky=flaky, hangs=hangs),
            "data": {
                "order": "exact", "block_records": 16, "bad_record_budget": 0.02, "stall_timeout_s": 200
            },
            "train": {"epochs": 1, "batch_size": 7},
            "seed": SEED,
        }
    )  # fmt: skip
    expected = [record_id(str(i)) for i in seeded(0, kills)]
    train = Train(config, workers=2)
    # To behind the first deadly record, within its group; then another run goes on there.
    steps = list(islice(train.steps("train", 0), 2))
    place = json.loads(json.dumps(train.position(0, 2, flat(steps))))
    assert next(iter(place["partial"].values())) == [1, 12]
    rest = list(train.steps("train", 0, 2))
    assert flat(steps + rest) == expected
    counts = train.reconcile("train", 0, flat(steps + rest))
    assert (counts["read"], counts["trained"], counts["quarantined"]) == (120, 118, 2)
    events = train.events("note")
    notes = [event["text"] for event in events]
    assert any(
        "Input/output error" in note and "retrying on this host (no other available) in 1 s" in note
        for note in notes
    ), notes
    late = [note for note in notes if "no result for" in note]
    assert late and all(
        note.startswith("host ") and "train shard number" in note for note in late
    ), notes
    train.close()

    resumed = Train(config, place=place)
    after = flat(list(resumed.steps("train", 0)))
    assert flat(steps) + after == expected
    assert resumed.reconcile("train", 0, after)["quarantined"] == 2
    resumed.close()


def test_deadly_records_count_against_the_budget_at_once(ray_cluster: None, tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "recipe": "faults:Faulty",
            "params": params(tmp_path, kills=tuple(range(RECORDS))),
            "seed": SEED,
        }
    )
    train = Train(config)
    with pytest.raises(DataError, match=r"1 of 120 train records cannot be used.*its process died"):
        list(train.steps("train", 0))
    assert len((tmp_path / "deaths").read_text()) <= 12
    train.close()
