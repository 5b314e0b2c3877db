"""Head: the passes of a job: what to read in which order, and with which chain."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from stoker.data.cache.reading import homes_of
from stoker.data.cache.store import CacheSpec
from stoker.data.engine.datasets import DatasetSource
from stoker.data.engine.shards import Setup, order_of
from stoker.data.messages import DataCursor, EpochPlan, Plan, Schema, Shard, Work
from stoker.data.sources.base import IndexedSource
from stoker.errors import SchemaError
from stoker.schema import Config

GROUP_LABEL = "stoker.group"


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
        """Splits whose records hosts keep across epochs → what names the results that they keep."""
        self.schemas = {split: found for split, found in (schemas or {}).items() if found}
        """What every block of a split must have; of the others the first block of the run says it."""

    def identity(self, fingerprint: str, unstable: str = "") -> Plan:
        """What fixes the order of the training records of an epoch, and which they are.

        Args:
            fingerprint: of the source.
            unstable: why that does not tell its records; empty: it does.
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
        """The schema of a split, which a block must have; the caller holds the coordinator's lock.

        Raises:
            SchemaError: it has another one.
        """
        agreed = self.schemas.setdefault(split, found)
        for here, there in zip(agreed, found, strict=True):
            if difference := here.difference(there):
                raise SchemaError(
                    f"the {split} split has blocks with different columns: {difference}; let the chain give"
                    " every record the same"
                )
        return agreed[-1]

    def has_shards(self, split: str) -> bool:
        """Whether the shards of a split are known before they are read; a `ray.data.Dataset`'s are not."""
        return not isinstance(self.sources[split], DatasetSource)

    def setup(self, split: str) -> Setup:
        """What the chain tasks of a split share."""
        cache = self.cache if split in self.kept else None
        return Setup(self.sources[split].for_workers(), self.chains[split], cache, self.kept.get(split, ""))

    def plan(self, split: str, epoch: int, start: DataCursor | None) -> EpochPlan:
        """What makes a pass what it is."""
        config = self.config.data
        return EpochPlan(
            seed=self.config.seed,
            # Validation is the same in every epoch.
            epoch=epoch if split == "train" else 0,
            split=split,
            shuffle=config.shuffle and split == "train",
            # An epoch that goes on is cut as it was when it began.
            block_records=start.plan.block_records if start else config.block_records,
            homes=start.plan.homes if start else self._homes(split),
        )

    def shards(self, plan: EpochPlan, start: DataCursor | None) -> deque[tuple[int, Shard, int]]:
        """(number, shard, blocks to skip) of what is left of a pass, in its order."""
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
        """As `shards`, of a dataset of the recipe's own, one by one while Ray Data executes it."""
        seed = plan.seed * 100_003 + plan.epoch if plan.shuffle else None
        exact = self.config.data.order == "exact"
        for number, shard in enumerate(self.sources[plan.split].blocks(seed, exact)):
            yield number, shard, 0


def pack_work(shards: list[tuple[int, Shard, int]], store: list[bool]) -> list[Work]:
    """Head: shards as a chain task takes them, and whether its host keeps their records."""
    return [
        Work(number, shard, skip, keep) for (number, shard, skip), keep in zip(shards, store, strict=True)
    ]
