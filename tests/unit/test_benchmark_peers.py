"""Benchmarks that sleep, and the S3 server of one: they find what is absent, double or altered; no timing."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import s3, slow_samples
from benchmarks.loaders.work import slope
from stoker.data import read_webdataset
from stoker.read.sources import ID_MODULUS, record_id

pytestmark = pytest.mark.unit


def test_the_rate_of_batches_that_come_in_waves_is_that_of_the_waves() -> None:
    """100 records each second, all at its end: whichever waves the window cuts, 100 records per second."""
    waves = [(float(second), 100.0 * second) for second in range(1, 101) for _ in range(4)]
    for first in (0.2, 0.21, 0.29):
        assert slope(waves, 10_000, (first, 0.9)) == pytest.approx(100)


@pytest.mark.parametrize("change", ["absent", "twice", "another one"])
def test_uneven_records_that_do_not_come_once_are_found(change: str) -> None:
    indices = list(range(slow_samples.TOTAL))
    slow_samples.taken(torch.tensor(indices).split(100))
    wrong = {"absent": indices[:-1], "twice": [*indices, 7], "another one": [*indices[:-1], 7]}[change]
    with pytest.raises(RuntimeError, match="of 2400"):
        slow_samples.taken(torch.tensor(wrong).split(100))


@pytest.mark.long
def test_shards_behind_the_link_are_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "SHARD_RECORDS", 50)
    monkeypatch.setattr(s3, "SHARDS", 3)
    monkeypatch.setattr(s3, "TOTAL", 150)
    crcs = s3.write(tmp_path / "shard.tar")
    with s3.served(tmp_path / "shard.tar"):
        source = read_webdataset(f"s3://{s3.BUCKET}", "train")
        assert source is not None
        source.check()
        records: list[Any] = [r for shard in source.shards(50, None) for r in source.read(shard, None)]
    assert "AWS_ENDPOINT_URL" not in os.environ
    sums = [int(crc) for crc in s3.Decode()({"bin": [r["bin"] for r in records]})["crc"]]
    ids = sum(record_id(record["key"]) for record in records) % ID_MODULUS
    s3.check(SimpleNamespace(rows=len(records), id_sum=ids), sums, crcs)
    with pytest.raises(RuntimeError, match="some are missing or repeated"):
        s3.check(SimpleNamespace(rows=len(records), id_sum=ids + 1), sums, crcs)
    with pytest.raises(RuntimeError, match="wrong contents"):
        s3.check(SimpleNamespace(rows=len(records), id_sum=ids), [*sums[:-1], 0], crcs)
