"""A job whose hosts keep decoded images trains on the same records, and leaves nothing behind."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from running import run_job
from streaming import Train

from stoker.config.schema import Config
from tests.waiting import until


def job(data: Path, **changes: Any) -> Config:
    return Config.model_validate(
        {
            "recipe": "ImageClassification",
            "params": {"data": str(data), "num_classes": 10, "image_size": 24},
            "data": {"order": "exact", "block_records": 64, **changes},
            "train": {"epochs": 3, "batch_size": 50},
            "seed": 3,
        }
    )


def pixels(train: Train) -> list[bytes]:
    return [batch["image__hwc"].tobytes() for batch in train.kept()]


def test_interrupted_with_a_cache_is_uninterrupted_without_one(
    ray_cluster: None, digits: Path, tmp_path: Path
) -> None:
    plain = Train(job(digits / "images"), keeps=True)
    expected = []
    for epoch in range(2):
        steps = list(plain.steps("train", epoch))
        expected.append((steps, pixels(plain)))
        plain.reconcile("train", epoch, [i for step in steps for i in step])
        plain.reconcile("val", epoch, [i for step in plain.steps("val", epoch) for i in step])
    plain.close()

    cached = Train(job(digits / "images", cache="disk", cache_folder=str(tmp_path)), keeps=True)
    assert list(cached.steps("train", 0)) == expected[0][0]
    assert pixels(cached) == expected[0][1]
    cached.reconcile("train", 0, [i for step in expected[0][0] for i in step])
    cached.reconcile("val", 0, [i for step in cached.steps("val", 0) for i in step])
    first = list(islice(cached.steps("train", 1), 9))
    place = cached.position(1, 9, [i for step in first for i in step])
    assert len(list(tmp_path.glob("stoker-cache-*/*"))) > 1
    ours = pixels(cached)
    cached.close()

    # Another process, whose cache is cold, goes on there.
    resumed = Train(job(digits / "images", cache="memory"), first_epoch=1, place=place, keeps=True)
    rest = list(resumed.steps("train", 1))
    assert first + rest == expected[1][0]
    assert b"".join(ours + pixels(resumed)) == b"".join(expected[1][1]), "to the pixel"
    assert resumed.reconcile("train", 1, [i for step in rest for i in step])["trained"] == 1437
    resumed.close()
    until(lambda: not [*tmp_path.glob("stoker-cache-*")])  # nothing is left on the disk


def test_a_job_says_what_its_hosts_kept(ray_cluster: None, digits: Path, tmp_path: Path) -> None:
    outcome = run_job(
        tmp_path,
        recipe="recipes.digits:Digits",
        params={"data": str(digits / "parquet")},
        data={"cache": "memory", "cache_gb": 0.003, "block_records": 64},
        train={"epochs": 3, "batch_size": 64, "lr": 0.01},
    )
    assert outcome.code == 0, outcome.summary.error
    cache = outcome.summary.cache
    assert cache is not None
    assert cache["kind"] == "memory"
    assert 40 < cache["hit_pct"] < 60, "3 MB hold 732 pages, one for each of some of the 1,437 digits"
    [host] = cache["hosts"]
    node = outcome.summary.cluster.hosts[0].model_dump()["node_id"]
    until(lambda: not [*Path("/dev/shm").glob(f"stoker-cache-*-{node[:12]}")])  # nor in shared memory
    assert host["bytes"] <= host["limit_bytes"] == 3_000_000
    events = [json.loads(line) for line in (outcome.run_dir / "events.jsonl").read_text().splitlines()]
    train = [e for e in events if e["event"] == "cache" and e["split"] == "train"]
    assert [e["found"] > 600 for e in train] == [False, True, True]
    [note] = [e["text"] for e in events if e["event"] == "note" and "data.cache" in e["text"]]
    assert "of the training records fit, 3.0 MB on 1 host of" in note
    said = (outcome.run_dir / "logs/console.log").read_text()
    assert "of the last epoch's records came from memory" in said


def test_a_cache_that_could_hold_nothing_is_refused(ray_cluster: None, digits: Path, tmp_path: Path) -> None:
    outcome = run_job(tmp_path, recipe="rows:Counting", data={"cache": "disk"}, train={"epochs": 2})
    assert outcome.code == 2
    assert "data.cache: the training chain is empty" in (outcome.summary.error or "")
