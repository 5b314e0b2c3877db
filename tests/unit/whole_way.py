"""Records → batches by everything between a source and the training loop, in one process and without Ray.

Opening, chain workers, the coordinator's books, splitter and both transports are the real ones. What Ray
would do stands here: it keeps blocks, brings them, and brings calls to another host's block server.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from stoker.chain.columns import columns_of, to_table
from stoker.config.schema import Config
from stoker.messages import BadRecord, DataCursor, Server, Shard
from stoker.read.sources import Source, cut_indices
from stoker.recipe import Recipe
from stoker.serve.attempt import Attempt
from stoker.serve.blocks.client import Transport
from stoker.serve.blocks.connections import DirectHosts
from stoker.serve.blocks.server import BlockServer
from stoker.serve.items import ReadyBlock
from stoker.serve.opening import open_data
from stoker.serve.passes import Passes, pack_work
from stoker.serve.shards import Loaded, blocks_of
from stoker.serve.suspects import Suspects
from stoker.train.feed import as_tensors

SECRET = b"s" * 32
_numbers = itertools.count()


class Listed(Source):
    """Records as they stand in a list."""

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
    """Reads whatever source the test has put here."""

    source: Any = None

    @property
    def pad(self) -> dict[str, Any]:  # type: ignore[override] # a class attribute where it is constant
        return dict(HELD["pad"])

    def read(self, split: str) -> Any:
        return HELD["source"] if split == "train" else None

    def preprocess(self, split: str) -> list[Any]:
        return list(HELD["chain"])


HELD: dict[str, Any] = {"source": None, "chain": [], "pad": {}}


@dataclass(frozen=True)
class Reference:
    """A block as Ray names it."""

    number: int = field(default_factory=lambda: next(_numbers))

    def hex(self) -> str:
        return f"{self.number:x}"


class Store(dict[Reference, Any]):
    """Ray's object store: `get` brings blocks by their references."""

    def get(self, references: list[Reference], timeout: float | None = None) -> list[Any]:
        return [to_table(self[reference]) for reference in references]


class OtherHost:
    """A host that serves blocks over a real socket, and the train worker's connections to it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.server = BlockServer("127.0.0.1", SECRET)
        self.hold = self  # the agent's `hold.remote(…)`
        entry = Server(self, "127.0.0.1", self.server.port)
        self.hosts = DirectHosts(lambda: (SECRET, {"far": entry}), lambda text: None)
        self.hosts._own_node = "here"  # what Ray would say

    def remote(self, worker: bytes, references: list[Reference]) -> None:
        for reference in references:
            block = to_table(self.store[reference])
            self.server.hold(worker, reference.hex(), columns_of(block))


@dataclass
class Way:
    """Opens a job and gives the batches of its first training epoch."""

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
        damage: Callable[[list[Reference], Store], None] = lambda references, store: None,
    ) -> tuple[list[list[dict[str, Any]]], list[BadRecord]]:
        """The batches, step by step and rank by rank, and what was quarantined.

        Raises:
            Exception: the run is refused, or fails.
        """
        HELD.update(source=source, chain=chain, pad=pad or {})
        config = Config.model_validate(
            {
                "recipe": "whole_way:Given",
                "data": {"block_records": block_records, "shuffle": False, "bad_record_budget": 0.99},
                "train": {"batch_size": batch_size, "epochs": 1},
            }
        )
        data = open_data(config)
        packed = {split: pickle.dumps(chain) for split, chain in data.chains.items()}
        schemas = {split: chain.schemas for split, chain in data.chains.items()}
        passes = Passes(config, data.sources, packed, schemas=schemas)
        bad: list[BadRecord] = []
        start = DataCursor(epoch=0, plan=passes.identity(data.sources["train"].fingerprint()))
        changed = threading.Condition()
        shared = (changed, changed, _books(), lambda *_, **__: None, None, Suspects())
        attempt = Attempt(0, workers, passes, data.totals, start, *shared)
        stream = attempt.streams["train", 0]
        plan = passes.plan("train", 0, None)
        loaded = Loaded(data.sources["train"].for_workers(), pickle.loads(packed["train"]))  # noqa: S301
        made = []
        shards = list(passes.shards(plan, None))
        for work in pack_work(shards, [False] * len(shards)):
            made += list(blocks_of(loaded, plan, work))
        references = []
        for columns, report in delivery(made):
            reference = Reference()
            self.store[reference] = columns
            references.append(reference)
            attempt.deliver(stream, ReadyBlock(report, "far", reference))
            bad += report.bad
        attempt.produced(stream)
        _raise(attempt.failure)
        damage(references, self.store)
        transport = Transport(None, pinned=False, timeout_s=10)
        transport.direct = self.other.hosts if direct else None
        steps = []
        for step in itertools.count():
            portions = [stream.portion(step, rank) for rank in range(workers)]
            if None in portions:
                assert portions == [None] * workers
                break
            batches = []
            for portion in portions:
                assert portion is not None and portion.schema is not None
                # Blocks this small would come through Ray in either case.
                parts = [part._replace(node="far" if direct else "") for part in portion.blocks]
                columns, ids, _, _ = as_tensors(transport.fetch(parts, portion.schema).columns)
                batches.append({"__id": ids, **columns})
            steps.append(batches)
        if direct:
            assert transport.bytes_by["ray"] == 0
        self.store.clear()
        return steps, bad


def _books() -> dict[str, Any]:
    from stoker.serve.accounting import ChainCosts

    return {split: ChainCosts() for split in ("train", "val")}


def _raise(failure: str) -> None:
    from stoker.errors import DataError

    if failure:
        raise DataError(failure)
