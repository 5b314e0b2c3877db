"""CPU task: reads pieces, or takes rows of a dataset of the recipe's own, and runs the chain on them."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, NamedTuple

from stoker.data.cache.reading import Reading
from stoker.data.cache.store import CacheSpec, HostCache
from stoker.data.engine.witness import Care, Guard, Witness
from stoker.data.preprocessing.chain import BlockReport, Chain
from stoker.data.sources.arrow import mask_of, values_of
from stoker.data.sources.base import BadRecord, Record, Source, record_id
from stoker.data.sources.rereading import FlakyReadError
from stoker.data.sources.seeding import seeded
from stoker.data.transport.server import columns_of

KEPT_SETUPS = 4
"""Chains and sources that a process keeps: two splits, and those of the attempt before a restart."""


@dataclass(frozen=True)
class EpochPlan:
    """Head → CPU task: all that makes one pass over one split what it is."""

    seed: int
    epoch: int
    """Seeds the order and the random transforms."""
    split: str
    shuffle: bool
    block_records: int
    homes: int = 0
    """Into how many parts the records are divided, each of which is permuted by itself; 0: not at all."""


class Work(NamedTuple):
    """Head → CPU task: a piece to read."""

    number: int
    """Its place in the epoch's order."""
    piece: bytes
    """The Piece, pickled."""
    skip: int = 0
    """Groups of its records that were consumed before."""
    store: bool = True
    """Whether the host keeps its records, where records are kept."""


class Setup(NamedTuple):
    """Head → CPU task: what all tasks of a split share."""

    source: Source | None
    chain: bytes
    """The Chain, pickled: unpickling it imports what its transforms need (torch, say), which only CPU
    tasks shall pay for."""
    cache: CacheSpec | None = None
    key: str = ""
    """Names what is kept of this split."""


class Reports(NamedTuple):
    """CPU task → head: what the blocks since the last reports are."""

    blocks: list[BlockReport]
    node: str
    usage: tuple[int, int] | None = None
    """Bytes that the host's cache holds and may hold."""


class Loaded(NamedTuple):
    """CPU task: what a process needs of a split."""

    source: Any
    chain: Chain
    cache: HostCache | None = None

    def reports(self, blocks: list[BlockReport], node: str) -> Reports:
        """CPU task: the reports of some blocks."""
        return Reports(blocks, node, self.cache.usage if self.cache else None)


_setups: dict[str, Loaded] = {}


def run_pieces(
    key: str, setup: list[Any], plan: EpochPlan, work: list[Work], per_report: int, care: Care
) -> Iterator[dict[str, Any] | Reports | None]:
    """CPU task: pieces → for each group of records its columns (None where all are bad), and after every
    `per_report` of them, and at the end, the Reports of those since the last.

    Args:
        key: names the setup in this process.
        setup: object references of the Setup and of the coordinator's handle, in a list so that Ray fetches
            them once per process, and only where they are needed.
        plan: which pass.
        work: what to read.
        per_report: blocks that share their reports: every object costs Ray a millisecond or two.
        care: what went wrong before.

    Raises:
        FlakyReadError: a record could not be read; where this is the last try, it is bad instead.
        OverError: the attempt has ended.
    """
    import ray

    witness, names = None, False
    retry = _starts_before()
    if retry or care.names:
        witness = Witness(ray.get(setup[1]), care, plan.split)
        names = witness.starts(retry)
    guard = Guard(care.known, witness if names else None) if care.known or witness else None
    loaded = _load(key, setup)
    node = ray.get_runtime_context().get_node_id()
    reports: list[BlockReport] = []
    for item in work:
        for columns, report in groups_of(loaded, plan, item, guard):
            if not care.last_try:
                _refuse_flaky(report)
            yield columns or None
            reports.append(report)
            if len(reports) == per_report:
                yield loaded.reports(reports, node)
                reports = []
    if reports:
        yield loaded.reports(reports, node)
    if witness:
        witness.ended()


def _starts_before() -> int:
    """How often Ray has started this task before: it does so whenever its process or host dies."""
    import ray

    worker = ray._private.worker.global_worker.core_worker
    return int(worker.get_current_task_attempt_number())


def _refuse_flaky(report: BlockReport) -> None:
    for bad in report.bad:
        if bad.passing:
            raise FlakyReadError(f"record {bad.key} {bad.reason}")


def _load(key: str, setup: list[Any]) -> Loaded:
    import ray

    if key not in _setups:
        content: Setup = ray.get(setup[0])
        while len(_setups) >= KEPT_SETUPS:
            del _setups[next(iter(_setups))]
        chain = pickle.loads(content.chain)  # noqa: S301 - written by the head
        _setups[key] = Loaded(content.source, chain, _cache_of(content))
    return _setups[key]


def _cache_of(setup: Setup) -> HostCache | None:
    import ray

    if setup.cache is None:
        return None
    node = ray.get_runtime_context().get_node_id()
    reserved = sum(
        int(n["Resources"].get("object_store_memory", 0)) for n in ray.nodes() if n["NodeID"] == node
    )
    return HostCache(setup.cache.root(), setup.key, setup.cache, reserved)


def groups_of(
    loaded: Loaded, plan: EpochPlan, work: Work, guard: Guard | None = None
) -> Iterator[tuple[dict[str, Any], BlockReport]]:
    """CPU task: the groups of a piece's records, preprocessed, each with its report.

    A quarantined record keeps its place in its group, so groups have the same numbers and records whatever
    a `guard` keeps out of the chain.
    """
    piece = pickle.loads(work.piece)  # noqa: S301 - written by the head

    def order() -> Any:
        name = f"{loaded.source.name_of(piece)}:{piece.start}"
        return order_of(plan.seed, plan.epoch, name) if plan.shuffle else None

    started = time.perf_counter()
    reading = None
    if loaded.cache:
        refuses = (guard.refuses,) if guard else ()
        reading = Reading(loaded.source, piece, order, loaded.cache, work.store, *refuses)
    if reading:
        records = iter(reading)
    elif guard:
        records = guard.read(loaded.source, piece, order())
    else:
        records = loaded.source.read(piece, order())
    if loaded.source.random:
        listing = loaded.source.listing(piece)
        keys = None if listing is None else [key for key, _ in listing]
        what = "read" if keys else f"piece/{work.number}"
        records = seeded(records, keys, f"{plan.seed}/{plan.epoch}/{what}")
    if guard:
        one = partial(_run_alone, loaded.chain, plan.epoch)
        records = guard.watch(records, one, work.skip * plan.block_records)
    keep = reading.keep if reading else None
    nth, following, bad = 0, next(records, None), 0
    while following is not None:
        group: Iterable[Record | BadRecord] = chain([following], islice(records, plan.block_records - 1))
        if nth < work.skip:
            deque(group, maxlen=0)
            following = next(records, None)
        else:
            if guard:
                group = guard.together(group)
            columns, report = run_chain(loaded.chain, group, plan.epoch, keep)
            following = next(records, None)
            bad += len(report.bad)
            report.piece, report.nth, report.last = work.number, nth, following is None
            report.seconds = time.perf_counter() - started
            yield columns, report
        started = time.perf_counter()
        nth += 1
    if reading:
        reading.finished(whole=not bad and not work.skip)


def _run_alone(stages: Chain, epoch: int, record: Record) -> None:
    run_chain(stages, [record], epoch)


def run_chain(
    stages: Chain,
    group: Iterable[Record | BadRecord],
    epoch: int,
    keep: Callable[[Record], int] | None = None,
) -> tuple[dict[str, Any], BlockReport]:
    """CPU task: one group through the chain, on one core."""
    use_one_thread()
    return stages.run(group, epoch, keep)


class RowsTask:
    """CPU task of a Ray Data execution: takes rows, runs the chain, reports, gives a block."""

    def __init__(self, plan: EpochPlan, stages: bytes, reporter: Any, books: tuple[int, str, int]) -> None:
        self.plan, self.stages, self.reporter, self.books = plan, stages, reporter, books
        self._run_of_task: tuple[str, int] = ("", 0)
        self._blocks_of_run = 0

    @cached_property
    def chain(self) -> Chain:
        """CPU task: the stages, unpickled once per process."""
        stages: Chain = pickle.loads(self.stages)  # noqa: S301 - written by the head
        return stages

    def of_rows(self, batch: Any) -> Iterator[dict[str, Any]]:
        """CPU task: rows → one block."""
        import ray

        group = as_records(batch)
        if self.plan.shuffle and group:
            order = order_of(self.plan.seed, self.plan.epoch, str(group[0]["key"]))
            group = [group[i] for i in order.permutation(len(group))]
        columns, report = run_chain(self.chain, group, self.plan.epoch)
        node = ray.get_runtime_context().get_node_id()
        call = self.reporter.block_done.remote(*self.books, self._block_name(), report, node)
        ray.get(call, timeout=120)
        if columns:
            yield columns

    def _block_name(self) -> str:
        """A task that Ray runs again has the same id, so a block is never counted twice."""
        import ray

        worker = ray._private.worker.global_worker.core_worker
        task = str(ray.get_runtime_context().get_task_id())
        run = (task, worker.get_current_task_attempt_number())
        self._blocks_of_run = self._blocks_of_run + 1 if run == self._run_of_task else 0
        self._run_of_task = run
        return f"{task}/{self._blocks_of_run}"


def as_records(block: Any) -> list[Record]:
    """CPU task: a block of a `ray.data.Dataset` as records; those without a key get one of their content.

    A NULL is None, and the numbers beside it stay what they are: as an array, a column of integers with a
    NULL would be of floats.
    """
    columns = columns_of(block)
    values: dict[str, Any] = {
        name: lambda row, column=column: _scalar(column[row]) for name, column in columns.items()
    }
    if hasattr(block, "schema"):
        for name in columns:
            mask = mask_of(block[name])
            if mask is not None:
                values[name] = partial(_or_none, mask, values_of(block[name]))
    count = len(next(iter(columns.values()))) if columns else 0
    rows = [{name: value(row) for name, value in values.items()} for row in range(count)]
    return [{**row, "key": _key(row)} for row in rows]


def _or_none(mask: Any, value: Callable[[int], Any], row: int) -> Any:
    return None if mask[row] else value(row)


def order_of(seed: int, epoch: int, what: str = "") -> Any:
    """Head and CPU task: the generator that permutes records, seeded by (seed, epoch, what)."""
    import numpy as np

    return np.random.default_rng(record_id(f"order/{seed}/{epoch}/{what}"))


def use_one_thread() -> None:
    """CPU task: one task per core, so the libraries must not start threads of their own."""
    import sys

    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _key(row: dict[str, Any]) -> str:
    """A row's own `key`, or its content: rows of a foreign dataset have no other identity."""
    if "key" in row:
        return str(row["key"])
    import hashlib

    content = hashlib.blake2b(digest_size=16)
    for name, value in row.items():
        content.update(name.encode())
        content.update(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode())
    return content.hexdigest()
