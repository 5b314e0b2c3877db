"""A validation is tried on a few records before the first step, and these count nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import Outcome, run_job


def shaped(folder: Path, *kinds: str, **sections: Any) -> Outcome:
    folder.mkdir()
    job: dict[str, Any] = {
        "recipe": "shaped:Shaped",
        "params": {"kinds": list(kinds), "train_records": 64},
        "data": {"order": "exact"},
        "train": {"epochs": 1, "batch_size": 8, "workers": 2, "threads": 1},
    }
    return run_job(folder, **{**job, **sections})


def events(outcome: Outcome, kind: str) -> list[dict[str, Any]]:
    lines = (outcome.run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_a_validation_that_fails_costs_no_step(ray_cluster: None, tmp_path: Path) -> None:
    outcome = shaped(tmp_path / "broken", "accuracy", "broken")
    assert outcome.code == 1 and "Shaped.metrics: broken (Strange)" in (outcome.summary.error or "")
    assert outcome.summary.steps == 0 and not events(outcome, "step")


@pytest.mark.parametrize(
    ("records", "workers", "remainder", "trained", "left", "repeated"),
    [
        (9, 1, "drop", 8, 1, 0),
        (9, 1, "1", 9, 0, 0),
        (9, 1, "pad", 9, 0, 1),
        (10, 1, "drop", 10, 0, 0),
        (11, 2, "drop", 8, 3, 0),
        (11, 2, "pad", 11, 0, 1),
        (12, 2, "drop", 12, 0, 0),
    ],
)
def test_a_last_batch_of_one_record_is_left_out_counted_and_named_once(
    ray_cluster: None,
    tmp_path: Path,
    records: int,
    workers: int,
    remainder: str,
    trained: int,
    left: int,
    repeated: int,
) -> None:
    norm = "layer" if remainder == "1" else "batch"  # which cannot train on one record
    outcome = run_job(
        tmp_path,
        f"data.remainder={remainder}",
        recipe="last_batches:Normed",
        params={"train_records": records, "norm": norm},
        train={"epochs": 2, "batch_size": 4, "workers": workers, "threads": 1},
    )
    assert outcome.code == 0, outcome.summary.error
    books = [event for event in events(outcome, "records") if event["split"] == "train"]
    counts = [tuple(b[n] for n in ("read", "trained", "remainder", "repeated")) for b in books]
    assert counts == [(records, trained, left, repeated)] * 2
    notes = [e for e in events(outcome, "note") if "one record per train worker" in e["text"]]
    assert len(notes) == (left >= workers)


def test_a_rank_without_validation_records_mixes_nothing_up(
    ray_cluster: None, tmp_path: Path
) -> None:
    """One record on two ranks: a sea horse's number is 2, a dog's 1; record 0 is a cat, predicted as one."""
    outcome = shaped(
        tmp_path / "one",
        "auroc",
        "confusion",
        "accuracy",
        params={"kinds": ["auroc", "confusion", "accuracy"], "train_records": 64, "val_records": 1},
    )
    assert outcome.code == 0, outcome.summary.error
    (table,) = events(outcome, "table")
    assert table["values"] == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert outcome.summary.metrics.last["val/accuracy/cat"] == 1.0
    assert outcome.summary.records.validated == 1


def test_on_two_ranks_classes_are_counted_once_and_the_books_are_whole(
    ray_cluster: None, tmp_path: Path
) -> None:
    """37 records: the last batch leaves a rank with fewer; the trial's four count nowhere."""
    outcome = shaped(tmp_path / "fine", "accuracy", "confusion", "few")
    assert outcome.code == 1 and "few (Strange)" in (outcome.summary.error or ""), (
        "the whole split fails, too"
    )
    notes = [event["text"] for event in events(outcome, "note")]
    assert any("metric few: cannot be computed from the first records" in note for note in notes)
    outcome = shaped(tmp_path / "whole", "accuracy", "confusion")
    assert outcome.code == 0, outcome.summary.error
    (table,) = events(outcome, "table")
    counts = [[0] * 3 for _ in range(3)]
    for n in range(37):
        counts[n % 3][n % 7 % 3] += 1
    assert table["values"] == counts and table["rows"] == ["cat", "dog", "sea/horse"]
    last = outcome.summary.metrics.last
    assert abs(last["val/accuracy/dog"] - counts[1][1] / sum(counts[1])) < 1e-6
    assert (outcome.summary.records.trained, outcome.summary.records.validated) == (64, 37)
