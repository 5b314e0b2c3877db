"""Ranks that would each read a whole stream and keep a part of it have it read once, and each gets its part."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from alike import equal
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from stoker import DataLoader

pytestmark = pytest.mark.usefixtures("ray_cluster")
RANKS, RECORDS = 4, 230


class Numbers(IterableDataset[Any]):
    """Its records have random draws, and a file counts how many were made, and says by which process."""

    def __init__(self, folder: Path, draws: bool = True) -> None:
        self.file, self.draws, self.passes = folder / "made", draws, 0
        self.order = random.Random(3)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        self.passes += 1
        for number in range(first, RECORDS, step):
            with self.file.open("a") as file:
                file.write(f"{os.getpid()}\n")
            drawn = (random.random(), np.random.rand(), torch.rand(3)) if self.draws else ()
            yield self.passes, number, self.order.random(), *drawn

    def makers(self) -> list[int]:
        """The process of each record since the last call."""
        found = [*map(int, self.file.read_text().split())]
        self.file.unlink()
        return found


def plain(records: list[Any]) -> Any:
    return default_collate(records)


class Collating:
    """Has a state, and a generator of its own."""

    def __init__(self) -> None:
        self.calls, self.own = 0, np.random.default_rng(1)

    def __call__(self, records: list[Any]) -> Any:
        self.calls += 1
        return self.calls, self.own.random(), torch.rand(2), default_collate(records)


def by_content(records: list[Any]) -> Any:
    """Draws as many numbers as its records say."""
    return torch.rand(1 + records[0][1] % 5), default_collate(records)


def loader(
    dataset: Any, rank: int, collate: Any, ranks: int = RANKS, **options: Any
) -> DataLoader[Any]:
    options["generator"] = torch.Generator().manual_seed(0)
    split, drop_last = options.pop("split_batches", False), options.pop("drop_last", False)
    shard = IterableDatasetShard(dataset, 3 * ranks if split else 3, drop_last, ranks, rank, split)
    return DataLoader(shard, batch_size=3, drop_last=drop_last, collate_fn=collate, **options)


@pytest.fixture
def dataset(tmp_path: Path) -> Numbers:
    return Numbers(tmp_path)


def alone(
    monkeypatch: pytest.MonkeyPatch, dataset: Numbers, rank: int, *given: Any, **options: Any
) -> list[Any]:
    """What a rank without others gets in two epochs."""
    with monkeypatch.context() as patch:
        patch.setenv("STOKER_LOADER", "process")
        mine = loader(dataset, rank, *given, **options)
        found = [list(mine), list(mine)]
    dataset.makers()
    return found


def together(loaders: list[DataLoader[Any]]) -> list[list[Any]]:
    """What each rank gets in a pass."""
    steps = zip(*map(iter, loaders), strict=True)
    return [list(found) for found in zip(*steps, strict=True)]


@pytest.mark.parametrize(
    ("collate", "options"),
    [
        (Collating(), {"num_workers": 2}),
        (Collating(), {"num_workers": 2, "persistent_workers": True}),
        (plain, {"num_workers": 1, "split_batches": True, "drop_last": True}),
        (plain, {"num_workers": 0}),
        (Collating(), {"num_workers": 0, "split_batches": True}),
    ],
)
def test_a_stream_is_read_once_for_all_ranks_and_each_gets_its_part(
    dataset: Numbers, monkeypatch: pytest.MonkeyPatch, collate: Any, options: dict[str, Any]
) -> None:
    expected = [alone(monkeypatch, dataset, rank, collate, **options) for rank in range(RANKS)]
    loaders = [loader(dataset, rank, collate, **options) for rank in range(RANKS)]
    for epoch in range(2):
        found = together(loaders)
        assert equal(found, [each[epoch] for each in expected])
        assert len(dataset.makers()) == RECORDS


class Noting(Numbers):
    """Its `collate` uses what reading has noted."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for record in super().__iter__():
            self.read += 1
            yield list(record)

    def collate(self, records: list[Any]) -> Any:
        return self.read, records


def emptying(records: list[list[Any]]) -> Any:
    return [record.pop(1) for record in records if len(record) > 5]


def ending(records: list[list[Any]]) -> Any:
    if records[0][1] == 48:
        raise StopIteration
    return records


def asking(records: list[list[Any]]) -> Any:
    return records, os.environ["RANK"] if records[0][1] > 100 else ""


@pytest.mark.parametrize("kind", ["draws", "notes", "empties records", "ends", "asks"])
def test_ranks_read_alone_what_may_differ_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    dataset = Noting(tmp_path)
    collate = {
        "draws": by_content,
        "notes": dataset.collate,
        "empties records": emptying,
        "ends": ending,
        "asks": asking,
    }[kind]
    expected, passes = [], []
    for rank in range(RANKS):
        monkeypatch.setenv("RANK", str(rank))
        expected.append(alone(monkeypatch, dataset, rank, collate, num_workers=1))
    for rank in range(RANKS):
        monkeypatch.setenv("RANK", str(rank))
        passes.append(iter(loader(dataset, rank, collate, num_workers=1)))
    steps = itertools.zip_longest(*passes)
    found = [[batch for batch in rank if batch is not None] for rank in zip(*steps, strict=True)]
    assert equal(found, [each[0] for each in expected])
    assert len(dataset.makers()) > RECORDS


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_come_late_leave_early_or_resume_get_their_own_batches(
    dataset: Numbers, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    options = {"num_workers": workers}
    expected = [alone(monkeypatch, dataset, rank, plain, **options)[0] for rank in range(RANKS)]
    loaders = [loader(dataset, rank, plain, **options) for rank in range(RANKS)]
    passes: list[Any] = [iter(each) for each in loaders[:3]]
    begun = [[next(each) for _ in range(3)] for each in passes]  # they do not wait for ever
    last = iter(loaders[3])
    begun.append([next(last) for _ in range(3)])
    states = [each.state_dict() for each in loaders]
    del passes[0], loaders[0]  # leaves
    rest = [list(each) for each in zip(*zip(*passes, last, strict=True), strict=True)]
    assert equal([a + b for a, b in zip(begun[1:], rest, strict=True)], expected[1:])
    assert equal(begun[0], expected[0][:3])
    dataset.makers()
    resumed = [loader(dataset, rank, plain, **options) for rank in range(RANKS)]
    for each, state in zip(resumed, states, strict=True):
        each.load_state_dict(state)
    assert equal(together(resumed), [each[3:] for each in expected])
    # What the passes before were reading is among them.
    assert len(dataset.makers()) < 2 * RECORDS
    fewer = [loader(dataset, rank, plain, ranks=2, **options) for rank in range(2)]
    for each in fewer:
        each.load_state_dict(states[1])
    found = sorted(int(n) for rank in together(fewer) for batch in rank for n in batch[1])
    left = {*range(RECORDS)} - {int(n) for rank in begun for batch in rank for n in batch[1]}
    assert {*found} == left and len(found) < len(left) + 2 * 3 * max(workers, 1)


def test_a_process_that_is_lost_costs_no_rank_a_batch(
    dataset: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [alone(monkeypatch, dataset, rank, plain, num_workers=2)[0] for rank in range(RANKS)]
    passes = [iter(loader(dataset, rank, plain, num_workers=2)) for rank in range(RANKS)]
    steps = [[next(each) for each in passes] for _ in range(4)]
    psutil.Process(dataset.makers()[-1]).send_signal(signal.SIGKILL)
    steps += list(zip(*passes, strict=True))
    assert equal([list(rank) for rank in zip(*steps, strict=True)], expected)


def test_a_rank_that_takes_nothing_does_not_hold_up_the_others_for_ever(
    dataset: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torch, where each rank reads for itself; here one takes its batches after all the others."""
    options = {"num_workers": 1, "stall_timeout_s": 8.0}
    expected = [alone(monkeypatch, dataset, rank, plain, **options)[0] for rank in range(RANKS)]
    passes = [iter(loader(dataset, rank, plain, **options)) for rank in range(RANKS)]
    first = [[next(each)] for each in passes]
    rest = [list(each) for each in itertools.chain(passes[1:], passes[:1])]
    found = [a + b for a, b in zip([*first[1:], first[0]], rest, strict=True)]
    assert equal(found, [*expected[1:], expected[0]])
