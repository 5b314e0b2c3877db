"""Head: the passes of a job: what to read in which order, and with which chain."""

from __future__ import annotations

import pickle
from collections import deque
from typing import Any

from stoker.bootstrap.topology import label
from stoker.data.cache.reading import homes_of
from stoker.data.cache.store import CacheSpec
from stoker.data.coordinator.cursor import Plan, Position
from stoker.data.engine.tasks import EpochPlan, RowsTask, Setup, Work, order_of
from stoker.data.preprocessing.columns import Schema, SchemaError
from stoker.data.sources.base import Piece, Source
from stoker.schema import Config

GROUP_LABEL = "stoker.group"
MAX_TASK_RETRIES = 4
"""A record that kills its process must not do so for ever."""


class Passes:
    """Head: (split, epoch) → its plan, and its pieces or its Ray Data execution."""

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

    def has_pieces(self, split: str) -> bool:
        """Whether a split is read by our own tasks; a `ray.data.Dataset` is executed by Ray Data."""
        return isinstance(self.sources[split], Source)

    def setup(self, split: str) -> Setup:
        """What the chain tasks of a split share."""
        cache = self.cache if split in self.kept else None
        return Setup(self.sources[split].for_tasks(), self.chains[split], cache, self.kept.get(split, ""))

    def plan(self, split: str, epoch: int, start: Position | None) -> EpochPlan:
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

    def pieces(self, plan: EpochPlan, start: Position | None) -> deque[tuple[int, Piece, int]]:
        """(number, piece, groups to skip) of what is left of a pass, in its order."""
        order = order_of(plan.seed, plan.epoch) if plan.shuffle else None
        left: deque[tuple[int, Piece, int]] = deque()
        source = self.sources[plan.split]
        for number, piece in enumerate(source.pieces_at_home(plan.block_records, order, plan.homes)):
            begun = start.begun(number) if start else (0, 0)
            if begun is not None:
                left.append((number, piece, begun[0]))
        return left

    def rows(self, plan: EpochPlan, books: tuple[int, str, int], reporter: Any) -> Any:
        """A lazy `ray.data.Dataset` of a pass's preprocessed blocks.

        Args:
            plan: which pass.
            books: attempt, split and epoch whose books the blocks belong to.
            reporter: actor that takes each block's report.
        """
        configure_ray_data(exact=self.config.data.order == "exact")
        source = self.sources[plan.split]
        if plan.shuffle:
            source = source.randomize_block_order(seed=plan.seed * 100_003 + plan.epoch)
        task = RowsTask(plan, self.chains[plan.split], reporter, books)
        options: dict[str, Any] = {"num_cpus": 1, "max_retries": MAX_TASK_RETRIES}
        if groups := [label(group) for group in self.config.data.preprocess_on]:
            options["label_selector"] = {GROUP_LABEL: f"in({','.join(groups)})"}
        # As its own blocks: converted to arrays, NULLs would be lost.
        return source.map_batches(task.of_rows, batch_size=plan.block_records, batch_format=None, **options)


def pack_work(pieces: list[tuple[int, Piece, int]], store: list[bool]) -> list[Work]:
    """Head: pieces as a chain task takes them, and whether its host keeps their records."""
    return [
        Work(number, pickle.dumps(piece), skip, keep)
        for (number, piece, skip), keep in zip(pieces, store, strict=True)
    ]


def configure_ray_data(exact: bool) -> None:
    """Head: how Ray Data runs in this process.

    Args:
        exact: blocks come in the order of the plan, not as they are ready.
    """
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = exact
