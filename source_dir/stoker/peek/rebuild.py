"""Laptop: rebuild the batches of a step with the run's own code: order, chain, splitter, batch.

Blocks before the step are only counted. Blocks of the step are preprocessed again.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from stoker.data.coordinator.accounting import ChainCosts
from stoker.data.coordinator.attempt import Attempt as Producing
from stoker.data.coordinator.cursor import about, refuse_other_data
from stoker.data.engine.datasets import DatasetSource
from stoker.data.engine.passes import Passes
from stoker.data.engine.shards import Loaded, blocks_of, order_within, seeded_reading
from stoker.data.engine.suspects import Suspects
from stoker.data.engine.witness import Guard
from stoker.data.feed.feed import as_tensors
from stoker.data.messages import (
    KEY_COLUMN,
    BadRecord,
    BlockReport,
    BlockSlice,
    DataCursor,
    Schema,
    Shard,
    Work,
)
from stoker.data.opening import Data
from stoker.data.preprocessing.collating import all_of, collated, seed_of
from stoker.data.sources.base import listing_of
from stoker.data.transport.batches import BatchBuilder
from stoker.data.transport.buffers import BufferPool
from stoker.errors import UsageError
from stoker.peek.history import Found
from stoker.recipe import Batch, code_digest
from stoker.schema import Config


@dataclass(frozen=True)
class Part:
    """Laptop: a batch of one train worker."""

    rank: int
    keys: list[str]
    batch: Batch
    """The input of `on_device`."""


class Reference(NamedTuple):
    """Laptop: a reference from which a block can be produced."""

    work: Work
    """Its shard, up to it."""

    def hex(self) -> str:
        return f"{self.work.number}/{self.work.skip}"


class Rebuild:
    """Laptop: the data of a run at a step.

    Args:
        config: the run's configuration, with discovered parameters.
        data: opened with keys.
        found: the step.
        own: parameters from the command line, which may name another location of the same data.
        code: folder of the run's code.

    Raises:
        UsageError: the data or its order differs from the run's.
    """

    def __init__(self, config: Config, data: Data, found: Found, own: set[str], code: Path) -> None:
        self.found, self.data = found, data
        noted = found.attempt.about
        self.workers, self.batch_size = int(noted["workers"]), int(noted["batch_size"])
        self.accumulate = int(noted["accumulate_steps"])
        if isinstance(data.sources["train"], DatasetSource):
            raise UsageError("--step: the recipe reads a ray.data.Dataset, whose rows cannot be rebuilt")
        start = found.attempt.start
        train = config.train.model_copy(update={"batch_size": self.batch_size})
        settings = {"remainder": noted["remainder"], "order": start.plan.order}
        settings["block_records"] = start.plan.block_records
        self.config = config.model_copy(
            update={"train": train, "data": config.data.model_copy(update=settings)}
        )
        now = about(start, self.workers, config)["params"]
        for name in sorted({*now, *noted["params"]} - own):
            if now.get(name) != noted["params"].get(name):
                raise UsageError(f"--step: params.{name} differs from the run's at this step")
        if noted.get("code") != code_digest(code):
            raise UsageError("--step: the code of the run has changed since it trained this step")
        chains = {split: pickle.dumps(chain) for split, chain in data.chains.items()}
        kept = {split: "" for split, chain in data.chains.items() if chain.prefix}
        self.passes = Passes(self.config, data.sources, chains, None, kept)
        identity = data.identity("train")
        plan = self.passes.identity(identity.text, identity.unstable)
        try:
            refuse_other_data(start, plan)
        except UsageError as error:
            raise UsageError(f"--step: {str(error).removeprefix('resume: ')}") from None
        fresh = DataCursor(epoch=found.epoch, plan=plan)
        begins = start if start.epoch == found.epoch else fresh
        self.start = begins.model_copy(update={"unvalidated": None})
        self.plan = self.passes.plan("train", found.epoch, self.start)
        self.loaded = Loaded(data.sources["train"].for_workers(), pickle.loads(chains["train"]))  # noqa: S301
        self.known = {**start.deadly, **found.attempt.bad.get(found.epoch, {})}
        self.ever = {**self.known, **found.bad_before}
        self.guard = Guard(self.known, None)
        self._made: dict[Reference, tuple[dict[str, Any], Schema]] = {}

    @cached_property
    def feed_steps(self) -> range:
        """Batch numbers that form the step, per train worker, from the start of the attempt's pass."""
        first = self.found.window * self.accumulate
        return range(first, first + self.accumulate)

    def exact(self) -> list[Part]:
        """The batches with `data.order: exact`, a function of seed, epoch and sizes only."""
        changed = threading.Condition()
        costs = {split: ChainCosts() for split in ("train", "val")}
        producing = Producing(
            0, self.workers, self.passes, self.data.totals, self.start, changed, changed, costs,
            lambda *_, **__: None, None, Suspects(),
        )  # fmt: skip
        stream = producing.streams["train", self.found.epoch]
        for reference, report in self._reports(self.start):
            producing.deliver(stream, reference, report, "")
            if stream.splitter.ready(self.feed_steps[-1]):
                break
        else:
            stream.splitter.end()
        if producing.failure:
            raise UsageError(f"--step: {producing.failure}")
        parts = []
        for step in self.feed_steps:
            for rank in range(self.workers):
                portion = stream.portion(step, rank)
                if portion is not None and portion.blocks:
                    parts.append(self._part(rank, portion.blocks))
        if not parts:
            raise UsageError("--step: the epoch ends before this step, so the data differs from the run's")
        return parts

    def recorded(self, run_dir: Path) -> list[Part]:
        """The batches with `data.order: any`, from the ids that the run recorded.

        Raises:
            UsageError: no ids were recorded, or only those of another attempt.
        """
        wanted = [(rank, keys) for rank in range(self.workers) for keys in self._recorded_keys(run_dir, rank)]
        rows = self._rows_of({key for _, keys in wanted for key in keys})
        return [self._part(rank, [rows[key] for key in keys]) for rank, keys in wanted if keys]

    def _recorded_keys(self, run_dir: Path, rank: int) -> list[list[str]]:
        keys = recorded_ids(run_dir, self.found.epoch, rank)
        steps = self.found.steps
        if keys is None or steps is None:
            raise UsageError(
                "--step: with data.order=any a batch can be rebuilt only from recorded ids; for the next run"
                " set tracking.record_ids=true (written at the end of each epoch) or data.order=exact"
            )
        # Ids of the previous attempt at the epoch come first, unless the number of train workers changed.
        most = steps * self.accumulate * self.batch_size
        least = (steps - 1) * self.accumulate * self.batch_size
        fitting = [c for c in {0, self.start.rows // self.workers} if least < len(keys) - c <= most]
        if len(fitting) != 1:
            raise UsageError(
                "--step: the ids recorded for this epoch belong to another attempt than the step"
            )
        at = [fitting[0] + step * self.batch_size for step in self.feed_steps]
        return [keys[first : first + self.batch_size] for first in at]

    def _rows_of(self, wanted: set[str]) -> dict[str, BlockSlice]:
        """Find records by key."""
        rows: dict[str, BlockSlice] = {}
        size = self.plan.block_records
        for number, shard, _ in self.passes.shards(self.plan, None):
            places = {i // size for i, key in enumerate(self._keys(number, shard)) if key in wanted}
            for nth in sorted(places):
                reference = Reference(Work(number, shard, nth, False))
                columns, _ = self._make(reference, None)
                count = len(columns[KEY_COLUMN])
                for row, key in enumerate(map(str, columns[KEY_COLUMN])):
                    rows[key] = BlockSlice(reference, row, row + 1, of=count)
            if wanted <= rows.keys():
                return rows
        lost = sorted(wanted - rows.keys())
        raise UsageError(f"--step: record {lost[0]} of the run is no longer in the data")

    def _reports(self, start: DataCursor) -> Iterator[tuple[Reference, BlockReport]]:
        """The blocks of the pass in order, counted but not produced."""
        size = self.plan.block_records
        for number, shard, skip in self.passes.shards(self.plan, start):
            good = self._good(number, shard)
            blocks = [good[first : first + size] for first in range(0, len(good), size)]
            for nth, block in enumerate(blocks[skip:], skip):
                report = BlockReport(number, nth, nth == len(blocks) - 1, sum(block), records=len(block))
                yield Reference(Work(number, shard, nth, False)), report

    def _good(self, number: int, shard: Shard) -> list[bool]:
        """For each record of a shard, whether it was trained."""
        if shard.rows is not None and not self.known:
            return [True] * shard.rows
        return [key not in self.known for key in self._keys(number, shard)]

    def _keys(self, number: int, shard: Shard) -> Iterator[str]:
        """The keys of a shard in order; reads the records only if necessary."""
        source = self.loaded.source
        listing = listing_of(source, shard)
        if listing is not None:
            yield from (key for key, _ in listing)
            return
        records = source.read(shard, order_within(self.plan, shard))
        for record in seeded_reading(source, records, self.plan, Work(number, shard)):
            if isinstance(record, BadRecord):
                self._refuse_news(record)
                yield record.key
            else:
                yield record["key"]

    def _refuse_news(self, bad: BadRecord) -> None:
        if bad.key not in self.ever:
            raise UsageError(
                f"--step: record {bad.key} fails now ({bad.reason}) and did not in the run: the data or the"
                " recipe has changed"
            )

    def _make(self, reference: Reference, rows: int | None) -> tuple[dict[str, Any], Schema]:
        if reference not in self._made:
            made = next(blocks_of(self.loaded, self.plan, reference.work, self.guard), None)
            if made is None:
                raise UsageError(f"--step: block {reference.hex()} is no longer in the data")
            columns, report = made
            for bad in report.bad:
                self._refuse_news(bad)
            self._made[reference] = columns, report.schemas[-1]
        columns, schema = self._made[reference]
        if rows is not None and len(columns[KEY_COLUMN]) != rows:
            raise UsageError(f"--step: block {reference.hex()} has different bad records than in the run")
        return columns, schema

    def _part(self, rank: int, slices: list[BlockSlice]) -> Part:
        """Assemble a batch as the transport does."""
        made = [(part, *self._make(part.block, part.of)) for part in slices]
        collate = self.loaded.chain.collate
        if collate:
            records, ids, keys = all_of((columns, part.start, part.stop) for part, columns, _ in made)
            seed = seed_of(self.config.seed, "train", self.found.epoch, ids)
            return Part(rank, keys, collated(collate, records, seed))
        batch = BatchBuilder(BufferPool(pinned=False), sum(p.stop - p.start for p in slices), made[0][2])
        at = 0
        for part, columns, _ in made:
            batch.take(part, columns, at)
            at += part.stop - part.start
        tensors, _, keys, _ = as_tensors(batch.finish())
        return Part(rank, list(map(str, keys)), tensors)


def recorded_ids(run_dir: Path, epoch: int, rank: int) -> list[str] | None:
    """Laptop: keys that a train worker trained in an epoch, in order; None if not recorded."""
    path = run_dir / "records" / f"train-epoch-{epoch:03d}-rank-{rank}.txt"
    return path.read_text().splitlines() if path.is_file() else None


def refuse_contradiction(run_dir: Path, found: Found, parts: list[Part]) -> bool:
    """Laptop: compare rebuilt batches with recorded ids; returns whether ids were recorded.

    Raises:
        UsageError: they differ.
    """
    compared = False
    for part in parts if found.steps is not None else []:
        keys = recorded_ids(run_dir, found.epoch, part.rank)
        if keys is None:
            continue
        size, first = len(part.keys), part.keys[0]
        compared = True
        if not any(keys[i : i + size] == part.keys for i, key in enumerate(keys) if key == first):
            raise UsageError(
                f"--step: train worker {part.rank} recorded different records: data or code has changed"
                " since the run"
            )
    return compared
