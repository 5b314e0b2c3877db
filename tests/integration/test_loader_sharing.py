"""Ranks of one job that want the same batches have them made once, and never those of another rank."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from alike import equal
from torch.utils.data import Dataset, DistributedSampler, Sampler

from stoker import DataLoader
from stoker.hosts.raynode import free_port
from stoker.session import JOB_VARIABLE

pytestmark = pytest.mark.usefixtures("ray_cluster")
BATCHES = 60


class Counted(Dataset[Any]):
    """Its records have random draws, and a file counts how many were made."""

    def __init__(self, folder: Path, count: int = 4 * BATCHES) -> None:
        self.file, self.count = folder / "made", count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        with self.file.open("ab") as file:
            file.write(b".")
        # Of more than a page, and of more than what is mapped.
        return index, random.random(), np.random.rand(), torch.rand(70_000)

    def made(self) -> int:
        size = self.file.stat().st_size
        os.truncate(self.file, 0)
        return size


class OfRank(Sampler[int]):
    """Of a job with `num_replicas` ranks, all with these indices."""

    num_replicas, rank = 4, 0

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.count).tolist()


def loader(
    dataset: Counted, seed: int = 0, sampler: Any = None, collate: Any = None
) -> DataLoader[Any]:
    torch.manual_seed(seed)
    sampler = sampler or OfRank(len(dataset))
    return DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2, collate_fn=collate)


def opened(*arguments: Any) -> Iterator[Any]:
    """An iterator of a rank of its own, which has drawn its seeds."""
    return iter(loader(*arguments))


@pytest.fixture
def dataset(tmp_path: Path) -> Counted:
    return Counted(tmp_path)


@pytest.fixture
def alone(dataset: Counted, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a rank without others gets."""
    with monkeypatch.context() as patch:
        patch.setenv("STOKER_LOADER", "process")
        found = list(loader(dataset))
    assert dataset.made() == len(dataset)
    return found


def test_ranks_with_the_same_indices_have_each_batch_made_once(
    dataset: Counted, alone: list[Any]
) -> None:
    kept = []
    for first, *others, expected in zip(*[opened(dataset) for _ in range(4)], alone, strict=True):
        assert equal(first, expected)
        first[-1].zero_()  # what a rank does to its batch, no other sees
        kept.append(others)
    assert all(equal(list(rank), alone) for rank in zip(*kept, strict=True))
    assert dataset.made() == len(dataset)


def test_ranks_with_other_seeds_or_indices_share_nothing(
    dataset: Counted, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = [DistributedSampler(range(len(dataset)), 2, n, shuffle=False) for n in range(2)]
    order = [*range(len(dataset))]
    cases: list[list[tuple[Any, ...]]] = [
        [(0,), (1,)],
        [(0, shares[0]), (0, shares[1])],
        [(0, order), (1, order)],  # the same indices, other draws
    ]
    for case in cases:
        together = [*zip(*[opened(dataset, *each) for each in case], strict=True)]
        made = dataset.made()
        for rank, each in zip(zip(*together, strict=True), case, strict=True):
            with monkeypatch.context() as patch:
                patch.setenv("STOKER_LOADER", "process")
                assert equal(list(rank), list(loader(dataset, *each)))
        assert dataset.made() == made == sum(len(each[1]) if each[1:] else 240 for each in case)


def test_a_rank_that_comes_late_leaves_early_or_resumes_gets_its_own_batches(
    dataset: Counted, alone: list[Any]
) -> None:
    first = opened(dataset)
    found = [next(first) for _ in range(20)]
    late = opened(dataset)
    begun = [next(late) for _ in range(7)]
    del first
    assert equal(found, alone[:20])
    source = loader(dataset)
    part = [*itertools.islice(source, 11)]
    again = loader(dataset)
    again.load_state_dict(source.state_dict())
    beside, resumed = iter(source), iter(again)
    both = [*itertools.zip_longest(begun + list(late), part + list(resumed))]
    assert equal([mine for mine, _ in both], alone) and equal([other for _, other in both], alone)
    del beside


RANK = """
import os, signal, sys
from pathlib import Path
from dataclasses import dataclass
import torch
from torch.utils.data import default_collate
from test_loader_sharing import Counted, opened

# Classes of the script itself, which batches are of, too.
class Own(Counted):
    pass

@dataclass(slots=True)
class Fields:
    fields: list

@dataclass(slots=True)
class Batch(Fields):
    rank: str = "own"

def collate(records):
    return Batch(default_collate(records))

dataset = Own(Path(os.environ["MADE"]))
torch.distributed.init_process_group("gloo")
got, batches = [], opened(dataset, 0, None, collate)
for order in sys.stdin:
    if order == "end\\n":
        torch.save(got, dataset.file.with_suffix("." + os.environ["RANK"]))
        break
    batch = next(batches)
    assert type(batch) is Batch
    got.append(batch.fields)
    print(len(got), flush=True)
"""


class Process:
    """A rank under torchrun."""

    def __init__(self, rank: int, world: int, dataset: Counted, port: int) -> None:
        here = str(Path(__file__).parent)
        env = {
            "MADE": str(dataset.file.parent),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), here]),
            "RANK": str(rank),
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            "WORLD_SIZE": str(world),
            JOB_VARIABLE: str(dataset.file),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.file, self.count = dataset.file.with_suffix(f".{rank}"), 0

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()

    def has_next(self) -> None:
        assert self.process.stdout is not None
        self.count += 1
        assert self.process.stdout.readline() == f"{self.count}\n"

    def end(self) -> Any:
        self.tell("end")
        assert self.process.wait(60) == 0
        return torch.load(self.file)


@pytest.mark.parametrize(("world", "killed_after"), [(4, None), (2, 13)])
def test_ranks_in_processes_share_and_one_that_is_killed_costs_no_batch(
    dataset: Counted, alone: list[Any], world: int, killed_after: int | None
) -> None:
    """The first to begin is killed, which makes what both want."""
    port = free_port()
    ranks = [Process(rank, world, dataset, port) for rank in range(world)]
    for step in range(BATCHES):
        for rank in ranks:
            rank.tell("next")
            if step == 0:
                rank.has_next()
        for rank in ranks if step else ():
            rank.has_next()
        if step == killed_after:
            ranks[0].process.kill()
            assert ranks.pop(0).process.wait(60) == -signal.SIGKILL
    assert all(equal(rank.end(), alone) for rank in ranks)
    # Of what the killed rank was making, nothing is left.
    assert dataset.made() <= len(dataset) + 4 * (killed_after or 0)


@functools.cache
def cached_rank() -> tuple[int, int]:
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


ASKS = """
import os, sys
import torch.distributed as dist
from torch.utils.data import DataLoader as Torchs, Dataset, IterableDataset, get_worker_info
from stoker import DataLoader
from test_loader_sharing import OfRank, cached_rank

def by_group():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def by_environment():
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

class Stream(IterableDataset):
    def __init__(self, asks):
        self.asks = asks
    def __iter__(self):
        rank, world = self.asks()
        info = get_worker_info()
        part, parts = (rank * info.num_workers + info.id, world * info.num_workers) if info else (rank, world)
        yield from range(part, 60, parts)

class Records(Dataset):
    def __init__(self, asks):
        self.asks, self.mine = asks, None
    def __len__(self):
        return 80
    def __getitem__(self, index):
        if index > 40 and self.mine is None:
            self.mine = self.asks()
        return index, self.mine if index > 40 else None

dist.init_process_group("gloo")
for asks in (by_group, by_environment, cached_rank):
    for workers, persistent in ((0, False), (2, False), (2, True)):
        options = dict(num_workers=workers, persistent_workers=persistent)
        stream = dict(dataset=Stream(asks), batch_size=3)
        records = dict(dataset=Records(asks), batch_size=4, sampler=range(80), collate_fn=list)
        for given in (stream, records):
            loader, expected = DataLoader(**given, **options), Torchs(**given, **options)
            for epoch in range(2):
                found = [[*map(str, each)] for each in (loader, expected)]
                assert found[0] == found[1], (given, options, found)
print("equal", flush=True)
"""


def test_code_that_asks_for_its_rank_gets_that_of_its_script(tmp_path: Path) -> None:
    """As in torch's workers, which inherit the environment and the process group."""
    script = tmp_path / "asks.py"
    script.write_text(ASKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    paths = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parent)])
    env = {"PYTHONPATH": paths, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    ended = subprocess.run(
        [*torchrun, "--master-port", str(free_port()), str(script)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ended.returncode, ended.stdout.count("equal")) == (0, 2), ended.stderr[-3000:]
