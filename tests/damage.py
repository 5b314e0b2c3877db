"""Data on disk that tests damage, and records as sources and chains make them of it."""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ray import cloudpickle

from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.config.loading import load
from stoker.data import read_any
from stoker.entry import driver
from stoker.protocol import BadRecord, BlockReport, PassPlan, Shard, Work
from stoker.read.host_cache import HostCache
from stoker.read.sources import Source
from stoker.serve.opening import Data
from stoker.serve.shards import LoadedSplit, blocks_of

DAMAGES = int(os.environ.get("STOKER_FUZZ", "250"))
"""Damages per format; STOKER_FUZZ raises the number."""
SEED = int(os.environ.get("STOKER_FUZZ_SEED", "12"))


def tar_of(members: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    """A tar as Python writes it: ustar, GNU or PAX."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=form) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


Opened = driver.Opened


def records(root: Path | str, split: str = "train") -> list[Any]:
    return read_all(read_any(str(root), split))


def checked(source: Source | None) -> Source:
    """As a run opens it."""
    assert source is not None
    source.check()
    return source


def read_all(source: Source | None, records: int = 100, seed: int | None = None) -> list[Any]:
    """All records of a source, as a run reads them: checked first, then shard by shard, by what is sent."""
    source = checked(source)
    reader = cloudpickle.loads(cloudpickle.dumps(source.for_workers()))
    found: list[Any] = []
    for shard in source.shards(records, None if seed is None else np.random.default_rng(seed)):
        found += reader.read(shard, None if seed is None else np.random.default_rng(seed))
    # The books of an epoch compare these when they close.
    assert source.count() in (None, len(found)), f"counted {source.count()}, read {len(found)}"
    return found


def opened(root: Path | str, **params: Any) -> Opened:
    given = {"data": str(root), "image_size": 16, "augment": "none", **params}
    return opened_job({"params": given})


def opened_job(job: Any, *overrides: str) -> Opened:
    """Configuration and data of a job: a mapping or a file, and words of the command line."""
    return driver.open_all(load(job, overrides))


def preprocessed(
    data: Data, split: str = "train", records: int = 100
) -> Iterator[tuple[Any, BlockReport]]:
    source = data.sources[split]
    for shard in source.shards(records, None):
        yield data.chains[split].run(source.for_workers().read(shard, None), epoch=0)


def chained(
    records: Iterable[Any], *entries: Any, epoch: int = 0, seed: int = 0, **options: Any
) -> tuple[dict[str, Any], BlockReport]:
    """Records through a chain of these entries, as a chain worker runs it."""
    return Chain(as_stages([*entries]), seed, **options).run(records, epoch)


def blocks(
    source: Source,
    chain: Chain,
    shards: Iterable[Shard],
    cache: HostCache | None = None,
    *,
    epoch: int = 0,
    seed: int = 1,
    shuffle: bool = False,
    block_records: int = 10,
    first: int = 0,
    **work: Any,
) -> Iterator[tuple[dict[str, Any], BlockReport]]:
    """What a chain worker makes of these shards of a pass, block by block; `first` is their number in it."""
    plan = PassPlan(seed, epoch, "train", shuffle, block_records)
    loaded = LoadedSplit(source.for_workers(), chain, cache)
    for number, shard in enumerate(shards, first):
        yield from blocks_of(loaded, plan, Work(number, shard, **work))


def reasons(report: BlockReport) -> list[str]:
    """Why records were quarantined."""
    return [bad.reason for bad in report.bad]


@dataclass(frozen=True)
class Damage:
    """What happened to a file: one byte is another, or the rest is missing."""

    at: int
    byte: int | None

    def __call__(self, content: bytes) -> bytes:
        if self.byte is None:
            return content[: self.at]
        return content[: self.at] + bytes([content[self.at] ^ self.byte]) + content[self.at + 1 :]


def damages(size: int, what: str) -> list[Damage]:
    """Seeded: four bytes of five are changed, every fifth file is cut short."""
    chance = random.Random(f"{SEED}/{what}")
    return [
        Damage(chance.randrange(size), None if n % 5 == 4 else chance.randrange(1, 256))
        for n in range(DAMAGES)
    ]


class Attack:
    """Makes a file as it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def keys(found: list[Any]) -> list[str]:
    return [record.key if isinstance(record, BadRecord) else record["key"] for record in found]
