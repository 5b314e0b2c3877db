"""Script: how ranks divide the order of an epoch, so that another number of ranks can divide what is left.

Samplers of ranks take turns: when each rank has had k batches, what all of them have had is the beginning of the
order that a single rank would have. So a division and a count say what is left, whatever the number of records.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

RECORDS, BATCHES, PARTS = "records", "batches", "parts"


@dataclass(frozen=True)
class Division:
    """One rank's part of the order.

    Args:
        rank: which part.
        ranks: how many parts there are.
        turns: what goes to one rank after the other: records (DistributedSampler), batches, or parts of a batch
            (Accelerate's BatchSamplerShard).
        batch_size: None: records are not batched.
        drop_last: whether an incomplete last batch is dropped.
        even: whether ranks come to the same number by repeating records; otherwise some are dropped, or ranks
            differ.
    """

    rank: int
    ranks: int
    turns: str
    batch_size: int | None
    drop_last: bool
    even: bool

    def taken(self, batches: int) -> int:
        """Records that all ranks have taken when each has so many batches."""
        return batches * (self.batch_size or 1) * (1 if self.turns == PARTS else self.ranks)

    def deal(self, records: Iterator[Any]) -> Iterator[Any]:
        """This rank's batches of the records, as the classes of torch and Accelerate make them."""
        if self.turns == RECORDS:
            left: Any = list(records)
            drops = not self.even
            turns = DistributedSampler[Any](left, self.ranks, self.rank, False, drop_last=drops)
            records = (left[place] for place in turns)
        if self.batch_size is None:
            return records
        batches = BatchSampler(records, self.batch_size, self.drop_last)
        if self.turns == RECORDS or self.ranks == 1:
            return iter(batches)
        shard = importlib.import_module("accelerate.data_loader").BatchSamplerShard
        return iter(shard(batches, self.ranks, self.rank, self.turns == PARTS, self.even))

    def is_like(self, other: Division) -> bool:
        """Whether the two are ranks of the same job."""
        return asdict(self) | {"rank": 0} == asdict(other) | {"rank": 0}


class Order:
    """The order that all ranks share, and this rank's part of it."""

    def __init__(self, division: Division, sampler: Any) -> None:
        self.division, self.sampler = division, sampler
        self.length = length(sampler.dataset if division.turns == RECORDS else sampler)

    def __iter__(self) -> Iterator[Any]:
        """All records, as one rank alone has them."""
        found = self.sampler
        if self.division.turns == RECORDS:
            found = DistributedSampler(found.dataset, 1, 0, found.shuffle, found.seed)
            found.set_epoch(self.sampler.epoch)
        yield from found


def order_of(sampler: Any, world: int) -> Order | None:
    """The order behind what gives a loader its indices; None: only the sampler can tell who reads what.

    Args:
        sampler: the loader's batch sampler, or its sampler if there is none.
        world: how many ranks torch.distributed knows.
    """
    ranks, rank, turns, even = 1, 0, BATCHES, True
    shard = of_accelerate("BatchSamplerShard")
    if shard and _reads_as(sampler, shard):
        ranks, rank, even = sampler.num_processes, sampler.process_index, sampler.even_batches
        turns, sampler = PARTS if sampler.split_batches else BATCHES, sampler.batch_sampler
    size, drop_last = None, False
    if _reads_as(sampler, BatchSampler):
        size, drop_last, sampler = sampler.batch_size, sampler.drop_last, sampler.sampler
    if ranks == 1 and _reads_as(sampler, DistributedSampler):
        even = not sampler.drop_last
        division = Division(sampler.rank, sampler.num_replicas, RECORDS, size, drop_last, even)
        return Order(division, sampler)
    alone = ranks == 1 and world > 1
    if size is None or alone or hasattr(sampler, "load_state_dict") or ranks_of(sampler):
        return None
    return Order(Division(rank, ranks, turns, size, drop_last, even), sampler)


def ranks_of(sampler: Any) -> tuple[int, int] | None:
    """How many ranks a sampler divides its order among, and which one is its own."""
    for many, own in (("num_replicas", "rank"), ("num_processes", "process_index")):
        found = getattr(sampler, many, None), getattr(sampler, own, None)
        if isinstance(found[0], int) and isinstance(found[1], int):
            return found  # type: ignore[return-value]
    return None


def of_accelerate(name: str) -> Any:
    return getattr(sys.modules.get("accelerate.data_loader"), name, None)


def length(counted: Any) -> int | None:
    try:
        return len(counted)
    except Exception:  # torch does not need a length either
        return None


def _reads_as(sampler: Any, kind: type[Any]) -> bool:
    """Whether a sampler is of the kind, and a subclass has not replaced the order."""
    return isinstance(sampler, kind) and type(sampler).__iter__ is kind.__iter__
