"""A job whose hosts keep decoded images trains on the same records, and leaves nothing behind."""

from __future__ import annotations

import json
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from running import run_job
from streaming import Train, flat

from stoker.config.schema import Config
from stoker.errors import UsageError
from tests.waiting import until


def job(data: Path, **changes: Any) -> Config:
    job = {
        "recipe": "ImageClassification",
        "params": {"data": str(data), "num_classes": 10, "image_size": 24},
        "data": {"order": "exact", "block_records": 64, **changes},
        "train": {"epochs": 3, "batch_size": 50},
        "seed": 3,
    }
    return Config.model_validate(job)


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


def photos(folder: Path) -> Path:
    """100 photos, 36 MB decoded, whose crops depend on whether the whole photo was decoded."""
    rng = np.random.default_rng(0)
    for split, number in [*product(("train",), range(100)), ("val", 0), ("val", 1)]:
        path = folder / split / f"c{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        rough = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        rough.resize((400, 300)).save(path)
    return folder


def two_epochs(config: Config) -> tuple[bytes, float]:
    """All pixels, and the share of the records that is cached."""
    train, found = Train(config, keeps=True), b""
    for epoch in range(2):
        ids = flat(train.steps("train", epoch))
        found += b"".join(pixels(train))
        train.reconcile("train", epoch, ids)
        train.reconcile("val", epoch, flat(train.steps("val", epoch)))
    share = train.position(2, 0, [])["plan"]["cache_share"]
    train.close()
    return found, share


def test_what_is_cached_is_decided_once_whatever_room_there_is_after_an_interruption(
    ray_cluster: None, tmp_path: Path
) -> None:
    data = photos(tmp_path / "data")
    small, large = (job(data, cache="memory", cache_gb=gb, block_records=10) for gb in (0.02, 0.1))
    expected, share = two_epochs(small)
    assert 0.4 < share < 0.55, "20 MB of 36"
    other, all_fit = two_epochs(large)
    assert all_fit == 1
    assert other != expected, "otherwise this test shows nothing"

    begun = Train(small, keeps=True)
    first = flat(islice(begun.steps("train", 0), 1))
    place = begun.position(0, 1, first)
    ours = pixels(begun)
    begun.close()
    resumed = Train(large, place=place, keeps=True)
    for epoch in range(2):
        ids = flat(resumed.steps("train", epoch))
        ours += pixels(resumed)
        assert resumed.reconcile("train", epoch, ids)["trained"] == 100
        resumed.reconcile("val", epoch, flat(resumed.steps("val", epoch)))
    assert resumed.position(2, 0, [])["plan"]["cache_share"] == share
    resumed.close()
    assert b"".join(ours) == expected
    with pytest.raises(UsageError, match=r"resume: data.cache_share was 0\..*, now it is 0.9"):
        Train(job(data, cache="memory", cache_share=0.9, block_records=10), place=place)


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
    assert cache is not None and cache["kind"] == "memory"
    # 3 MB hold 732 pages, one for each of some of the 1,797 digits.
    assert 33 < cache["hit_pct"] < 44
    [host] = cache["hosts"]
    node = outcome.summary.cluster.hosts[0].model_dump()["node_id"]
    in_memory = f"stoker-cache-*-{node[:12]}"
    until(lambda: not [*Path("/dev/shm").glob(in_memory)])
    assert host["bytes"] <= host["limit_bytes"] == 3_000_000
    lines = (outcome.run_dir / "events.jsonl").read_text().splitlines()
    events = [*map(json.loads, lines)]
    train = [e for e in events if e["event"] == "cache" and e["split"] == "train"]
    assert [e["found"] > 450 for e in train] == [False, True, True]
    [note] = [e["text"] for e in events if e["event"] == "note" and "data.cache" in e["text"]]
    assert "% of the training records fit, " in note
    assert "the others are preprocessed in every epoch as without a cache" in note
    said = (outcome.run_dir / "logs/console.log").read_text()
    assert "of the last epoch's records came from memory" in said


def test_a_cache_that_could_hold_nothing_is_refused(
    ray_cluster: None, digits: Path, tmp_path: Path
) -> None:
    outcome = run_job(tmp_path, recipe="rows:Counting", data={"cache": "disk"}, train={"epochs": 2})
    assert outcome.code == 2
    assert "data.cache: the training chain is empty" in (outcome.summary.error or "")
