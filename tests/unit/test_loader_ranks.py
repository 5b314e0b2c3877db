"""A pass of `stoker.DataLoader` that continues on another number of ranks, each a loader in this process."""

from __future__ import annotations

import io
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loading import Records, Stream
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler

from stoker import DataLoader

pytestmark = pytest.mark.usefixtures("loader_in_this_process")

COUNT = 211


def distributed(ranks: int, rank: int, size: int | None = 4, epoch: int = 3, **options: Any) -> Any:
    sampler = DistributedSampler(range(COUNT), ranks, rank, seed=5, **options)
    sampler.set_epoch(epoch)
    return DataLoader(Records(count=COUNT), batch_size=size, sampler=sampler, num_workers=rank % 3)


def sharded(ranks: int, rank: int, size: int = 4, split: bool = False, **options: Any) -> Any:
    shards = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    order = RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(6))
    batches = BatchSampler(order, size * ranks if split else size, drop_last=False)
    if ranks > 1:  # Accelerate leaves the batches of a single process alone
        batches = shards(batches, ranks, rank, split, **options)
    return DataLoader(Records(count=COUNT), batch_sampler=batches)


def prepared(ranks: int, rank: int, size: int = 4, epoch: int = 2, seedable: bool = False) -> Any:
    prepare = pytest.importorskip("accelerate.data_loader").prepare_data_loader
    plain = DataLoader(
        Records(count=COUNT),
        batch_size=size,
        shuffle=True,
        generator=torch.Generator().manual_seed(8),
    )
    found = prepare(
        plain,
        num_processes=ranks,
        process_index=rank,
        use_seedable_sampler=seedable,
        data_seed=4,
        rng_types=[],
    )
    found.set_epoch(epoch)
    return found


def stream(
    ranks: int, rank: int, size: int = 4, split: bool = False, workers: int = 1, seed: int = 0
) -> Any:
    """Shuffled, with draws that only the records and batches make."""
    shard = pytest.importorskip("accelerate.data_loader").IterableDatasetShard
    dataset: Any = Stream(lambda worker, workers: shuffled(range(worker, COUNT, workers), seed))
    if ranks > 1:
        dataset = shard(dataset, size * ranks if split else size, False, ranks, rank, split)
    return DataLoader(dataset, batch_size=size, num_workers=workers)


def shuffled(records: Any, seed: int) -> list[int]:
    return random.Random(seed).sample(records, len(records))


KINDS: dict[str, Callable[..., Any]] = {
    "DistributedSampler": distributed,
    "records": lambda ranks, rank, *_: distributed(ranks, rank, None),
    "BatchSamplerShard": sharded,
    "parts of batches": lambda *case: sharded(*case, split=True),
    "uneven": lambda *case: sharded(*case, even_batches=False),
    "prepared by Accelerate": prepared,
    "prepared, seeded by itself": lambda *case: prepared(*case, seedable=True),
    "stream": stream,
    "parts of batches of a stream": lambda *case: stream(*case, split=True),
    "stream without workers": lambda *case: stream(*case, workers=0),
    "stream of two workers": lambda *case: stream(*case, workers=2),
}
RESUMES = [(8, 4), (3, 7), (5, 4), (1, 6)]
"""Ranks and batch sizes."""


def numbers(batches: Any) -> list[int]:
    return [int(n) for batch in batches for n in torch.as_tensor(batch).flatten()]


def saved(loader: Any) -> Any:
    """As a script saves a state and loads it."""
    torch.save(loader.state_dict(), file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_what_ranks_leave_of_an_epoch_any_other_number_of_ranks_has_once(kind: str) -> None:
    """8, 3, then 5 ranks, stopped after random steps."""
    for seed in range(50 if kind == "DistributedSampler" else 16):
        each_its_own = bool(seed % 4 // 2)  # otherwise, all ranks load the state of rank 0
        draws = random.Random(seed)
        found: list[int] = []
        states: list[Any] = []
        for ranks, size in RESUMES[: 3 + seed % 2]:
            last = ranks == (1 if seed % 2 else 5)
            most = (COUNT - len(found)) // (ranks * (1 if kind == "records" else size))
            steps = 10**6 if last else draws.randrange(most + 1)
            loaders = [KINDS[kind](ranks, rank, size) for rank in range(ranks)]
            for rank, loader in enumerate(loaders):
                if states:
                    loader.load_state_dict(states[rank % len(states) * each_its_own])
                found += numbers(itertools.islice(iterator := iter(loader), steps))
                del iterator
            if not last:
                states = [saved(loader) for loader in loaders]
        counted = Counter(found)
        assert counted.keys() == set(range(COUNT)), "none is lost"
        padding = len(found) - COUNT
        workers = 2 if "two workers" in kind else 1
        assert padding < ranks * size * workers, "torch and Accelerate fill up the last step"
        assert not padding or kind != "uneven"


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_load_the_state_of_rank_0_continue_as_if_nothing_had_happened(kind: str) -> None:
    ranks, steps = 4, 5
    whole = [numbers(KINDS[kind](ranks, rank)) for rank in range(ranks)]
    first = KINDS[kind](ranks, 0)
    taken = numbers(itertools.islice(iterator := iter(first), steps))
    state = saved(first)
    del iterator
    for rank in range(ranks):
        loader = KINDS[kind](ranks, rank)
        loader.load_state_dict(state)
        assert numbers(loader) == whole[rank][len(taken) :]


class Strided(Sampler[int]):
    """Divides its order among ranks in a way of its own."""

    def __init__(self, num_replicas: int, rank: int, start: int = 0) -> None:
        self.num_replicas, self.rank, self.start = num_replicas, rank, start

    def __iter__(self) -> Any:
        return iter(range(self.start + self.rank, COUNT, self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, COUNT, self.num_replicas))


def strided(ranks: int, rank: int) -> Any:
    return DataLoader(Records(count=COUNT), batch_size=4, sampler=Strided(ranks, rank))


def bucketed(ranks: int, rank: int) -> Any:
    shards = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    buckets = type(
        "Buckets", (BatchSampler,), {"__iter__": lambda self: BatchSampler.__iter__(self)}
    )
    batches = buckets(range(COUNT), 4, drop_last=False)
    return DataLoader(Records(count=COUNT), batch_sampler=shards(batches, ranks, rank))


def refused(loader: Any, state: Any) -> str:
    with pytest.raises(ValueError) as refusal:
        loader.load_state_dict(state)
        next(iter(loader))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("make", "key"),
    [(strided, "sampler=Strided"), (bucketed, "sampler=Buckets")],
)
def test_what_only_a_sampler_can_divide_is_refused_by_its_name(make: Any, key: str) -> None:
    loader = make(4, 0)
    next(iter(loader))
    state = saved(loader)
    assert key in (text := refused(make(3, 0), state)) and "(here 3)" in text
    assert key in (text := refused(make(4, 2), state)) and "rank 0 (here 2)" in text
    assert "each rank has a state of its own" in text


def test_another_order_is_refused_on_other_ranks() -> None:
    for make in (distributed, prepared):
        loader = make(8, 0, 4)
        next(iter(loader))
        state = loader.state_dict()
        assert "generators" in refused((prepared, distributed)[make is prepared](3, 1), state)
        assert make is prepared or "set_epoch" in refused(distributed(3, 1, epoch=4), state)
    next(iter(first := distributed(8, 0)))
    state = first.state_dict()
    shorter = DataLoader(
        Records(count=COUNT - 1), sampler=DistributedSampler(range(COUNT - 1), 3, 0)
    )
    assert f"records {COUNT} (here {COUNT - 1})" in refused(shorter, state)
    other = stream(3, 1, seed=1)
    next(iter(first := stream(4, 0)))
    other.load_state_dict(saved(first))
    with pytest.raises(RuntimeError, match="first 1 batches are not those delivered before"):
        next(iter(other))
    divided_twice = distributed(3, 1)
    divided_twice.load_state_dict(state)
    next(iter(divided_twice))
    assert "sampler=Strided" in refused(strided(3, 1), divided_twice.state_dict())


def test_a_stream_that_divides_itself_is_refused_on_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    loader = DataLoader(Stream(lambda *_: range(40)), batch_size=2)
    next(iter(loader))
    state = loader.state_dict()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    text = refused(loader, state)
    assert "world_size 4 (here 3)" in text and "dataset=Stream" in text


def test_a_state_costs_the_same_at_any_number_of_records_and_any_step() -> None:
    """What it holds is measured, not its time, which depends on the machine."""
    sizes = []
    for count, steps in ((100, 1), (100_000, 1), (100_000, 900)):
        sampler = DistributedSampler(Records(count=count), 2, 1)
        loader = DataLoader(Records(count=count), batch_size=50, sampler=sampler)
        list(itertools.islice(iterator := iter(loader), steps))
        torch.save(loader.state_dict(), file := io.BytesIO())
        sizes.append(file.tell())
        del iterator
    assert max(sizes) - min(sizes) < 200
