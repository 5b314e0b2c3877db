"""A validation is tried on a few records before the first step, and these count nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from last_batches import images_of
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


def test_a_last_batch_of_one_is_refused_or_left_out_and_counted(
    ray_cluster: None, tmp_path: Path
) -> None:
    """19 images in batches of four on each of two train workers; on one: tests/unit/test_last_batch.py."""
    images_of(tmp_path / "data", 19)
    job: dict[str, Any] = {
        "recipe": "ImageClassification",
        "params": {"data": str(tmp_path / "data"), "model": "resnet10t", "image_size": 32},
        "train": {"epochs": 1, "batch_size": 4, "workers": 2, "threads": 1},
    }
    refused = run_job(tmp_path, **job)
    assert refused.code == 2 and "data.remainder=2" in (refused.summary.error or ""), (
        refused.summary.error
    )
    outcome = run_job(tmp_path, "data.remainder=2", run_dir=tmp_path / "again", **job)
    assert outcome.code == 0, outcome.summary.error
    records = outcome.summary.records
    assert (records.read, records.trained, records.remainder) == (19, 16, 3)
    assert outcome.summary.steps == 2


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
