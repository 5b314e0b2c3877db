"""Head: source and chain → one Ray Data execution per epoch, tasks on the hosts that shall work."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any

from stoker.data.chain import BlockReport, Chain
from stoker.data.position import Position
from stoker.data.sources import BadRecord, Record, Source, record_id

MAX_TASK_RETRIES = 4
"""Ray Data retries for ever by default; a record that kills its process would never be named."""


@dataclass(frozen=True)
class EpochPlan:
    """Head → CPU task: all that makes one pass over one split what it is."""

    chain: bytes
    """The split's Chain, pickled: unpickling it imports what its transforms need (torch, say), which only
    CPU tasks shall pay for."""
    seed: int
    epoch: int
    """Seeds the order and the random transforms."""
    split: str
    shuffle: bool
    block_records: int
    books: tuple[int, str, int]
    """Attempt, split and epoch whose books the blocks belong to."""


def epoch_dataset(
    plan: EpochPlan, source: Any, reporter: Any, remote_options: dict[str, Any], start: Position | None
) -> Any:
    """Head: a lazy `ray.data.Dataset` of one epoch's preprocessed blocks.

    Args:
        plan: which pass.
        source: a Source, or a Ray Dataset of the recipe's own.
        reporter: actor that takes each block's report.
        remote_options: Ray options of the tasks, e.g. `label_selector`.
        start: where in the epoch it begins; pieces consumed before are not read again.

    Returns:
        The dataset; None where nothing is left of the epoch.
    """
    import ray

    task = ChainTask(plan, source, reporter)
    options = {"num_cpus": 1, "max_retries": MAX_TASK_RETRIES, **remote_options}
    if isinstance(source, Source):
        order = order_of(plan.seed, plan.epoch) if plan.shuffle else None
        rows = []
        for number, piece in enumerate(source.pieces(plan.block_records, order)):
            begun = start.begun(number) if start else (0, 0)
            if begun is not None:
                rows.append({"piece": pickle.dumps(piece), "number": number, "skip": begun[0]})
        if not rows:
            return None
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
        return dataset.map_batches(task.of_pieces, batch_size=None, **options)
    if plan.shuffle:
        source = source.randomize_block_order(seed=plan.seed * 100_003 + plan.epoch)
    return source.map_batches(task.of_rows, batch_size=plan.block_records, **options)


def configure_ray_data(exact: bool) -> None:
    """Head: how Ray Data runs in this process.

    Args:
        exact: blocks come in the order of the plan, not as they are ready.
    """
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = exact


def order_of(seed: int, epoch: int, what: str = "") -> Any:
    """Head and CPU task: the generator that permutes records, seeded by (seed, epoch, what)."""
    import numpy as np

    return np.random.default_rng(record_id(f"order/{seed}/{epoch}/{what}"))


class ChainTask:
    """CPU task: reads pieces or takes rows, runs the chain, reports, yields blocks."""

    def __init__(self, plan: EpochPlan, source: Any, reporter: Any) -> None:
        self.plan, self.reporter = plan, reporter
        self.source = source.for_tasks() if isinstance(source, Source) else None
        self._run_of_task: tuple[str, int] = ("", 0)
        self._blocks_of_run = 0

    @cached_property
    def chain(self) -> Chain:
        """CPU task: the stages, unpickled once per process."""
        stages: Chain = pickle.loads(self.plan.chain)  # noqa: S301 - written by the driver
        return stages

    def of_pieces(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """CPU task: pieces → blocks of `block_records` records."""
        source: Any = self.source
        for content, number, skip in zip(batch["piece"], batch["number"], batch["skip"], strict=True):
            piece = pickle.loads(content)  # noqa: S301 - written by epoch_dataset on the head
            what = f"{piece.path}:{piece.start}"
            order = order_of(self.plan.seed, self.plan.epoch, what) if self.plan.shuffle else None
            records = source.read(piece, order)
            nth, following = 0, next(records, None)
            while following is not None:
                group = chain([following], islice(records, self.plan.block_records - 1))
                if nth < skip:
                    deque(group, maxlen=0)
                    following = next(records, None)
                else:
                    columns, report = self._run(group)
                    following = next(records, None)
                    report.piece, report.nth, report.last = int(number), nth, following is None
                    yield from self._deliver(columns, report)
                nth += 1

    def of_rows(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """CPU task: rows of the recipe's own dataset → one block."""
        count = len(next(iter(batch.values()))) if batch else 0
        rows = [{name: _scalar(column[i]) for name, column in batch.items()} for i in range(count)]
        group = [{**row, "key": _key(row)} for row in rows]
        if self.plan.shuffle and group:
            order = order_of(self.plan.seed, self.plan.epoch, str(group[0]["key"]))
            group = [group[i] for i in order.permutation(len(group))]
        yield from self._deliver(*self._run(group))

    def _run(self, group: Iterable[Record | BadRecord]) -> tuple[dict[str, Any], BlockReport]:
        stages = self.chain
        use_one_thread()
        return stages.run(group, self.plan.epoch)

    def _deliver(self, columns: dict[str, Any], report: BlockReport) -> Iterator[dict[str, Any]]:
        import ray

        node = ray.get_runtime_context().get_node_id()
        call = self.reporter.block_done.remote(*self.plan.books, self._block_name(), report, node)
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
