"""Head: the passes of a job: what to read, in which order, and with which chain."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from stoker.config.schema import Config
from stoker.errors import SchemaError
from stoker.messages import DataCursor, EpochPlan, Plan, Schema, Shard, Work
from stoker.read.host_cache import CacheSpec, homes_of
from stoker.read.sources import IndexedSource
from stoker.serve.datasets import DatasetSource
from stoker.serve.shards import Setup, order_of


class Passes:
    """Head: (split, epoch) → its plan and its shards."""

    def __init__(
        self,
        config: Config,
        sources: dict[str, Any],
        chains: dict[str, bytes],
        cache: CacheSpec | None = None,
        kept: dict[str, str] | None = None,
        schemas: dict[str, tuple[Schema, ...]] | None = None,
    ) -> None:
        self.config, self.sources, self.chains = config, sources, chains
        self.cache = cache
        self.kept = kept or {}
        """Splits cached across epochs → cache key of their results."""
        self.schemas = {split: found for split, found in (schemas or {}).items() if found}
        """Required schema of each split; for a split without one, the run's first block sets it."""

    def identity(self, fingerprint: str, unstable: str = "") -> Plan:
        """What determines which training records an epoch has and their order.

        Args:
            fingerprint: of the source.
            unstable: why that does not identify its records; empty: it does.
        """
        data = self.config.data
        return Plan(
            seed=self.config.seed,
            shuffle=data.shuffle,
            order=data.order,
            block_records=data.block_records,
            fingerprint=fingerprint,
            unstable=unstable,
            homes=self._homes("train"),
            bucket_by=data.bucket_by,
        )

    def _homes(self, split: str) -> int:
        if split not in self.kept:
            return 0
        return homes_of(self.sources[split].count(), self.config.data.block_records)

    def agree(self, split: str, found: tuple[Schema, ...]) -> Schema:
        """The schema that every block of a split must have; call with the coordinator's lock held.

        Raises:
            SchemaError: the block has a different one.
        """
        agreed = self.schemas.setdefault(split, found)
        for here, there in zip(agreed, found, strict=True):
            if difference := here.difference(there):
                raise SchemaError(
                    f"the {split} split has blocks with different columns: {difference}; make the chain give"
                    " every record the same columns"
                )
        return agreed[-1]

    def has_shards(self, split: str) -> bool:
        """Whether the shards of a split are known before reading; those of a `ray.data.Dataset` are not."""
        return not isinstance(self.sources[split], DatasetSource)

    def setup(self, split: str) -> Setup:
        """What all chain tasks of a split share."""
        cache = self.cache if split in self.kept else None
        key, source = self.kept.get(split, ""), self.sources[split].for_workers()
        return Setup(source, self.chains[split], cache, key)

    def plan(self, split: str, epoch: int, start: DataCursor | None) -> EpochPlan:
        """The parameters that define a pass."""
        config = self.config.data
        return EpochPlan(
            seed=self.config.seed,
            # Validation is the same in every epoch.
            epoch=epoch if split == "train" else 0,
            split=split,
            shuffle=config.shuffle and split == "train",
            # A resumed epoch keeps the block size and homes that it began with.
            block_records=start.plan.block_records if start else config.block_records,
            homes=start.plan.homes if start else self._homes(split),
        )

    def shards(self, plan: EpochPlan, start: DataCursor | None) -> deque[tuple[int, Shard, int]]:
        """(number, shard, blocks to skip) of the rest of a pass, in its order."""
        order = order_of(plan.seed, plan.epoch) if plan.shuffle else None
        left: deque[tuple[int, Shard, int]] = deque()
        source = self.sources[plan.split]
        homes = {"homes": plan.homes} if isinstance(source, IndexedSource) else {}
        for number, shard in enumerate(source.shards(plan.block_records, order, **homes)):
            begun = start.begun(number) if start else (0, 0)
            if begun is not None:
                left.append((number, shard, begun[0]))
        return left

    def blocks(self, plan: EpochPlan) -> Iterator[tuple[int, Shard, int]]:
        """Like `shards`, for a recipe's dataset: one by one while Ray Data executes it."""
        seed = plan.seed * 100_003 + plan.epoch if plan.shuffle else None
        exact = self.config.data.order == "exact"
        for number, shard in enumerate(self.sources[plan.split].blocks(seed, exact)):
            yield number, shard, 0


def pack_work(shards: list[tuple[int, Shard, int]], store: list[bool], stop: int | None = None) -> list[Work]:
    """Shards in the form that a chain worker takes, and whether its host caches their records.

    Args:
        shards: number, shard, and blocks to skip of each.
        store: for each.
        stop: blocks from here on are not made.
    """
    return [
        Work(number, shard, skip, keep, stop)
        for (number, shard, skip), keep in zip(shards, store, strict=True)
    ]
