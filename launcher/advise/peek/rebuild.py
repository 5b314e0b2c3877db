"""Laptop: rebuild the batches of a step with the run's own code: chain, splitter, batch.

The run recorded which blocks arrived in which order. Those of the step are preprocessed again.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from launcher.advise.peek.history import Found
from stoker.chain.collating import all_of, collated, seed_of
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.messages import BadRecord, BlockReport, BlockSlice, DataCursor, Schema, Work
from stoker.recipe import Batch, code_digest
from stoker.serve.accounting import EpochAccount
from stoker.serve.blocks.batches import BatchBuilder, BufferPool
from stoker.serve.cursor import Trail, about, arrival, refuse_other_data
from stoker.serve.datasets import DatasetSource
from stoker.serve.items import ReadyBlock
from stoker.serve.opening import Data
from stoker.serve.passes import Passes
from stoker.serve.shards import Loaded, blocks_of
from stoker.serve.splitter import Splitter
from stoker.serve.streams import Stream
from stoker.serve.witness import Guard
from stoker.train.feed import as_tensors


@dataclass(frozen=True)
class Part:
    """Laptop: a batch of one train worker."""

    rank: int
    keys: list[str]
    batch: Batch
    """The input of `on_device`."""


class Reference(NamedTuple):
    """Laptop: a block as `arrival` recorded it, in place of the block itself."""

    shard: int
    nth: int
    rows: int
    ids: int

    def __str__(self) -> str:
        return f"block {self.nth} of shard {self.shard}"


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
        self.remainder = noted["remainder"]
        block_records = {"block_records": noted["block_records"]}
        self.config = config.model_copy(update={"data": config.data.model_copy(update=block_records)})
        start = found.attempt.start
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
        if unstable := start.plan.unstable or identity.unstable:
            raise UsageError(f"--step: {unstable}, so its batches cannot be rebuilt")
        plan = self.passes.identity(identity.text)
        try:
            refuse_other_data(start, plan)
        except UsageError as error:
            raise UsageError(f"--step: {str(error).removeprefix('resume: ')}") from None
        fresh = DataCursor(epoch=found.epoch, plan=plan)
        begins = start if start.epoch == found.epoch else fresh
        self.start = begins.model_copy(update={"unvalidated": None})
        self.plan = self.passes.plan("train", found.epoch, self.start)
        chain = pickle.loads(chains["train"])  # noqa: S301 - this process wrote it
        self.loaded = Loaded(data.sources["train"].for_workers(), chain)
        self.known = {**start.deadly, **found.attempt.bad.get(found.epoch, {})}
        self.ever = {**self.known, **found.bad_before}
        self.guard = Guard(self.known, None)
        self.shards = {number: shard for number, shard, _ in self.passes.shards(self.plan, None)}
        self._made: dict[Reference, tuple[dict[str, Any], Schema]] = {}
        self._named: dict[str, Reference] = {}

    @cached_property
    def feed_steps(self) -> range:
        """Batch numbers that form the step, per train worker, from the start of the attempt's pass."""
        first = self.found.window * self.accumulate
        return range(first, first + self.accumulate)

    def parts(self) -> list[Part]:
        """The batches of the step, from the blocks that the run recorded in order of arrival.

        Raises:
            UsageError: the run has not recorded the step's blocks, or they differ now.
        """
        epoch = self.found.epoch
        splitter = Splitter(self.workers, self.batch_size, equal=True, remainder=self.remainder)
        stream = Stream(splitter, EpochAccount("train", epoch), None, Trail(self.start))
        for block in starmap(Reference, self.found.attempt.blocks.get(epoch, [])):
            self._named[name := f"{block.shard}.{block.nth}"] = block
            stream.arrived(ReadyBlock(BlockReport(block.shard, rows=block.rows), "", name))
        if epoch in self.found.attempt.produced:
            splitter.end()
        parts = []
        for step in self.feed_steps if splitter.ready(self.feed_steps[-1]) else ():
            for rank in range(self.workers):
                portion = stream.portion(step, rank)
                if portion is not None and portion.blocks:
                    parts.append(self._part(rank, portion.blocks))
        if not parts:
            raise UsageError(
                "--step: events.jsonl lacks blocks of this step; the run may have ended before it"
            )
        return parts

    def _refuse_news(self, bad: BadRecord) -> None:
        if bad.key not in self.ever:
            raise UsageError(
                f"--step: record {bad.key} fails now ({bad.reason}) and did not in the run: the data or the"
                " recipe has changed"
            )

    def _make(self, block: Reference) -> tuple[dict[str, Any], Schema]:
        if block not in self._made:
            if block.shard not in self.shards:
                raise UsageError(f"--step: {block} is no longer in the data")
            work = Work(block.shard, self.shards[block.shard], block.nth, False)
            made = next(blocks_of(self.loaded, self.plan, work, self.guard), None)
            if made is None:
                raise UsageError(f"--step: {block} is no longer in the data")
            columns, report = made
            for bad in report.bad:
                self._refuse_news(bad)
            if Reference(*arrival(report)) != block:
                raise UsageError(f"--step: {block} has different records than in the run")
            self._made[block] = columns, report.schemas[-1]
        return self._made[block]

    def _part(self, rank: int, slices: list[BlockSlice]) -> Part:
        """Assemble a batch as the transport does."""
        made = [(part, *self._make(self._named[part.block])) for part in slices]
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
