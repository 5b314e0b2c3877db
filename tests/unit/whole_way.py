"""Records → batches by everything between a source and the training loop, in one process and without Ray.

Opening, chain workers, the service's books, splitter, blocks and both ways to fetch them are the real ones.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.config.schema import Config
from stoker.protocol import BadRecord, BlockSlice, DataCursor, Directory, Server, Shard
from stoker.read.sources import Source, cut_indices
from stoker.recipe import Recipe
from stoker.serve.blocks.client import Transport
from stoker.serve.blocks.folder import BlockFolder, BlockServer
from stoker.serve.items import ReadyBlock
from stoker.serve.opening import open_data
from stoker.serve.passes import Passes, ServiceState
from stoker.serve.recipe_pass import RecipeAttempt
from stoker.serve.shards import LoadedSplit, blocks_of
from stoker.train.feed import as_tensors

SECRET = b"s" * 32


class Listed(Source):
    def __init__(self, records: list[dict[str, Any]], shard: int) -> None:
        self.records, self.shard = records, shard

    def count(self) -> int:
        return len(self.records)

    def shards(self, records: int, order: Any) -> list[Shard]:
        return cut_indices(len(self.records), self.shard, order)

    def read(self, shard: Shard, order: Any) -> Iterator[Any]:
        for index in shard.items:
            yield dict(self.records[index])


class Given(Recipe):
    source: Any = None

    @property
    def pad(self) -> dict[str, Any]:  # type: ignore[override] # a class attribute where it is constant
        return dict(HELD["pad"])

    def read(self, split: str) -> Any:
        return HELD["source"] if split == "train" else None

    def preprocess(self, split: str) -> list[Any]:
        return list(HELD["chain"])


HELD: dict[str, Any] = {"source": None, "chain": [], "pad": {}}


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = BlockFolder("test", "far")
        self.folder.roots = [folder]

    def add(self, columns: dict[str, Any]) -> str:
        return self.folder.write(columns)

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.folder.columns(name)

    def __setitem__(self, name: str, columns: dict[str, Any]) -> None:
        other = self.add(columns)
        self.folder.remove([name])
        (self.folder.roots[0] / other).rename(self.folder.roots[0] / name)


def never_moved(part: BlockSlice, missing: bool) -> str:
    return f"block {part.block} is nowhere"


class OtherHost:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.server = BlockServer("127.0.0.1", SECRET, store.folder)

    def transport(self, node: str) -> Transport:
        """Of a process on that host (`far`), or on another."""
        servers = {"far": Server(None, "127.0.0.1", self.server.port)}
        directory = Directory("test", SECRET, servers)
        transport = Transport(lambda: directory, never_moved, node, pinned=False, timeout_s=10)
        transport.folder = lambda: self.store.folder  # type: ignore[method-assign]
        return transport


@dataclass
class Way:
    store: Store
    other: OtherHost

    def batches(
        self,
        source: Source,
        chain: list[Any],
        *,
        block_records: int,
        batch_size: int,
        workers: int,
        direct: bool,
        pad: dict[str, Any] | None = None,
        delivery: Callable[[list[Any]], list[Any]] = lambda blocks: blocks,
        damage: Callable[[list[str], Store], None] = lambda names, store: None,
    ) -> tuple[list[list[dict[str, Any]]], list[BadRecord]]:
        """The batches, step by step and rank by rank, and what was quarantined.

        Raises:
            Exception: the run is refused, or fails.
        """
        HELD.update(source=source, chain=chain, pad=pad or {})
        config = Config.model_validate(
            {
                "recipe": "whole_way:Given",
                "data": {
                    "remainder": 1,
                    "block_records": block_records,
                    "shuffle": False,
                    "bad_record_budget": 0.99,
                },
                "train": {"batch_size": batch_size, "epochs": 1},
            }
        )
        data = open_data(config)
        packed = {split: pickle.dumps(chain) for split, chain in data.chains.items()}
        schemas = {split: chain.schemas for split, chain in data.chains.items()}
        passes = Passes(config, data.sources, packed, schemas=schemas)
        bad: list[BadRecord] = []
        start = DataCursor(epoch=0, plan=passes.identity(data.sources["train"].fingerprint()))
        shared = ServiceState(lambda *_, **__: None, 0, _books())
        attempt = RecipeAttempt(0, workers, passes, data.totals, start, shared)
        stream = attempt.open["train", 0]
        plan = passes.plan("train", 0, None)
        loaded = LoadedSplit(data.sources["train"].for_workers(), pickle.loads(packed["train"]))  # noqa: S301
        made = []
        rest = passes.rest(plan, None)
        shards = rest.take(rest.left)
        for work in shards:
            made += list(blocks_of(loaded, plan, work))
        references: list[str] = []
        for columns, report in delivery(made):
            name = self.store.add(columns) if columns else ""
            references.append(name)
            attempt.deliver(stream, ReadyBlock(report, "far", name))
            bad += report.bad
        attempt.produced(stream)
        damage(references, self.store)
        transport = self.other.transport("here" if direct else "far")
        steps = []
        for step in itertools.count():
            portions = [stream.portion(step, rank) for rank in range(workers)]
            if None in portions:
                assert portions == [None] * workers
                break
            batches = []
            for portion in portions:
                assert portion is not None and portion.schema is not None
                columns, ids, _, _ = as_tensors(
                    transport.fetch(portion.blocks, portion.schema).columns
                )
                batches.append({"__id": ids, **columns})
            steps.append(batches)
        assert not transport.bytes_by["own" if direct else "direct"]
        return steps, bad


def _books() -> dict[str, Any]:
    from stoker.serve.accounting import ChainCosts

    return {split: ChainCosts() for split in ("train", "val")}
