"""CPU task: reads pieces, or takes rows of a dataset of the recipe's own, and runs the chain on them."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

from stoker.data.chain import BlockReport, Chain
from stoker.data.sources import BadRecord, Record, Source, record_id

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


class Work(NamedTuple):
    """Head → CPU task: a piece to read."""

    number: int
    """Its place in the epoch's order."""
    piece: bytes
    """The Piece, pickled."""
    skip: int = 0
    """Groups of its records that were consumed before."""


class Setup(NamedTuple):
    """Head → CPU task: what all tasks of a split share."""

    source: Source | None
    chain: bytes
    """The Chain, pickled: unpickling it imports what its transforms need (torch, say), which only CPU
    tasks shall pay for."""


class Reports(NamedTuple):
    """CPU task → head: what the blocks since the last reports are."""

    blocks: list[BlockReport]
    node: str


_setups: dict[str, tuple[Source | None, Chain]] = {}


def run_pieces(
    key: str, setup: list[Any], plan: EpochPlan, work: list[Work], per_report: int
) -> Iterator[dict[str, Any] | Reports | None]:
    """CPU task: pieces → for each group of records its columns (None where all are bad), and after every
    `per_report` of them, and at the end, the Reports of those since the last.

    Args:
        key: names the setup in this process.
        setup: object reference of the Setup, in a list so that Ray fetches it once per process only.
        plan: which pass.
        work: what to read.
        per_report: blocks that share their reports: every object costs Ray a millisecond or two.
    """
    import ray

    source, stages = _load(key, setup)
    node = ray.get_runtime_context().get_node_id()
    reports: list[BlockReport] = []
    for item in work:
        for columns, report in groups_of(source, stages, plan, item):
            yield columns or None
            reports.append(report)
            if len(reports) == per_report:
                yield Reports(reports, node)
                reports = []
    if reports:
        yield Reports(reports, node)


def _load(key: str, setup: list[Any]) -> tuple[Any, Chain]:
    import ray

    if key not in _setups:
        content: Setup = ray.get(setup[0])
        while len(_setups) >= KEPT_SETUPS:
            del _setups[next(iter(_setups))]
        _setups[key] = (content.source, pickle.loads(content.chain))  # noqa: S301 - written by the head
    return _setups[key]


def groups_of(
    source: Any, stages: Chain, plan: EpochPlan, work: Work
) -> Iterator[tuple[dict[str, Any], BlockReport]]:
    """CPU task: the groups of a piece's records, preprocessed, each with its report."""
    piece = pickle.loads(work.piece)  # noqa: S301 - written by the head
    order = order_of(plan.seed, plan.epoch, f"{piece.path}:{piece.start}") if plan.shuffle else None
    started = time.perf_counter()
    records = source.read(piece, order)
    nth, following = 0, next(records, None)
    while following is not None:
        group = chain([following], islice(records, plan.block_records - 1))
        if nth < work.skip:
            deque(group, maxlen=0)
            following = next(records, None)
        else:
            columns, report = run_chain(stages, group, plan.epoch)
            following = next(records, None)
            report.piece, report.nth, report.last = work.number, nth, following is None
            report.seconds = time.perf_counter() - started
            yield columns, report
        started = time.perf_counter()
        nth += 1


def run_chain(
    stages: Chain, group: Iterable[Record | BadRecord], epoch: int
) -> tuple[dict[str, Any], BlockReport]:
    """CPU task: one group through the chain, on one core."""
    use_one_thread()
    return stages.run(group, epoch)


class RowsTask:
    """CPU task of a Ray Data execution: takes rows, runs the chain, reports, gives a block."""

    def __init__(
        self, plan: EpochPlan, stages: bytes, reporter: Any, books: tuple[int, str, int]
    ) -> None:
        self.plan, self.stages, self.reporter, self.books = plan, stages, reporter, books
        self._run_of_task: tuple[str, int] = ("", 0)
        self._blocks_of_run = 0

    @cached_property
    def chain(self) -> Chain:
        """CPU task: the stages, unpickled once per process."""
        stages: Chain = pickle.loads(self.stages)  # noqa: S301 - written by the head
        return stages

    def of_rows(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
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


def as_records(batch: dict[str, Any]) -> list[Record]:
    """CPU task: columns of a `ray.data.Dataset` as records; those without a key get one of their content."""
    count = len(next(iter(batch.values()))) if batch else 0
    rows = [{name: _scalar(column[i]) for name, column in batch.items()} for i in range(count)]
    return [{**row, "key": _key(row)} for row in rows]


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
