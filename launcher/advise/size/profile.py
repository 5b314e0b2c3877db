"""Laptop: the cost of a job's chain per sample, measured on its own records with every core busy.

A vCPU is a hyper-thread: a chain costs less while the neighbouring thread idles than on a host full of
chain tasks. So one process per core runs the real chain, all at the same time.
"""

from __future__ import annotations

import math
import multiprocessing
import queue
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from stoker.chain.chain import Chain, ChainError
from stoker.chain.collating import CollateFn
from stoker.errors import UsageError
from stoker.hosts import machine
from stoker.messages import HWC_SUFFIX, ID_COLUMN, BlockReport, StageCost
from stoker.read.sources import Source
from stoker.serve.opening import Data

START_TIMEOUT_S = 90.0
GROUP_SECONDS = 0.5
"""Target duration of a group of records, which is one measurement; determines its size."""
KEPT_ROWS = 64
SMALLEST_SPREAD = 0.06
"""CPU time of the same work varies this much between runs on a shared machine (docs/performance.md)."""
MAX_BAD = 0.5


@dataclass(frozen=True)
class ChainProfile:
    """Laptop: the measurement of a chain."""

    cpu_s: float
    """CPU-seconds per sample: reading, every stage, and packing into a block."""
    spread: float
    """Half the width of the 95 % interval of `cpu_s`, as a share of it."""
    bytes_per_sample: float
    stages: list[dict[str, Any]]
    """As `chain` in summary.json: stage, cpu_ms_per_sample, bytes_out; in addition, random."""
    samples: int
    processes: int
    columns: dict[str, Any] = field(default_factory=dict, repr=False)
    """A few preprocessed rows as packed by the chain, for replay."""


@dataclass
class _Group:
    """One measurement in one process."""

    records: int
    cpu_s: float
    report: BlockReport


def measure_chain(data: Data, block_records: int, seconds: float) -> ChainProfile:
    """Laptop: run the training chain on real records for `seconds`, in one process per available core.

    Args:
        data: the job's data, opened.
        block_records: `data.block_records`; a group is never larger.
        seconds: how long all processes run at the same time.

    Raises:
        UsageError: the chain fails, or most records are bad.
    """
    source = data.sources["train"]
    count = machine.cores()
    answers = _run_everywhere(source, data.chains["train"], block_records, seconds, count)
    groups = [group for answer in answers for group in answer[0]]
    _refuse_bad(groups)
    columns = next((columns for _, columns in answers if columns), {})
    # Reading is deterministic; packing and everything else not listed must be repeated.
    fixed = {"read", *(stage.name for stage in data.chains["train"].stages if not stage.random)}
    return _summed(groups, count, columns, fixed)


def _run_everywhere(
    source: Source, chain: Chain, block_records: int, seconds: float, count: int
) -> list[tuple[list[_Group], dict[str, Any]]]:
    """One process per core; all begin together once every one has started."""
    from ray import cloudpickle

    payload = cloudpickle.dumps((source.for_workers(), source.shards(block_records, None), chain))
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    barrier = context.Barrier(count)
    workers = [
        context.Process(
            target=_work, args=(payload, number, count, block_records, seconds, barrier, answers), daemon=True
        )
        for number in range(count)
    ]
    for worker in workers:
        worker.start()
    found: list[tuple[list[_Group], dict[str, Any]]] = []
    deadline = time.monotonic() + START_TIMEOUT_S + 4 * seconds
    try:
        while len(found) < count:
            try:
                answer = answers.get(timeout=0.5)
            except queue.Empty:
                dead = [w.exitcode for w in workers if w.exitcode not in (None, 0)]
                if dead:
                    raise UsageError(f"size: a profile process died with exit code {dead[0]}") from None
                if time.monotonic() > deadline:
                    raise UsageError(f"size: the profile did not end within {deadline:.0f} s") from None
                continue
            if isinstance(answer, str):
                raise UsageError(f"size: the chain failed: {answer}")
            found.append(answer)
    finally:
        for worker in workers:
            worker.kill()
            worker.join(timeout=5)
    return found


def _work(
    payload: bytes, number: int, count: int, block_records: int, seconds: float, barrier: Any, answers: Any
) -> None:
    """Profile process: process its share of the shards repeatedly until the time is over."""
    import pickle

    from stoker.chain.chain import use_one_thread
    from stoker.errors import where_raised

    try:
        source, shards, chain = pickle.loads(payload)  # noqa: S301 - written by the parent
        records = _records(source, shards[number % len(shards) :] + shards[: number % len(shards)])
        # Imports, caches and lazily built tables are start-up, not the cost of a sample.
        columns, report = chain.run(list(islice(records, 2)), 0)
        if chain.collate and report.rows:
            _collated(chain.collate, columns, report)
        use_one_thread()
        barrier.wait(START_TIMEOUT_S)
        groups, columns, size = [], {}, 1
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            started, began = time.process_time(), time.monotonic()
            columns, report = chain.run(islice(records, size), 0)
            if chain.collate and report.rows:
                columns = _collated(chain.collate, columns, report)
            groups.append(_Group(report.records, time.process_time() - started, report))
            took = max(time.monotonic() - began, 1e-6)
            size = max(1, min(block_records, round(size * min(GROUP_SECONDS / took, 8))))
        # The first groups were small, to determine the group size.
        answers.put((groups[2:] or groups, _few(columns, chain) if number == 0 else {}))
    except ChainError as error:
        answers.put(str(error))
    except Exception as error:
        answers.put(where_raised(error))


def _records(source: Source, shards: list[Any]) -> Iterator[Any]:
    while True:
        for shard in shards:
            yield from source.read(shard, None)


def _collated(collate: CollateFn, columns: dict[str, Any], report: BlockReport) -> dict[str, Any]:
    """The batch of a group of records, as columns; adds its cost to the report.

    Raises:
        ChainError: it has lists, so `Replay` cannot repeat its rows.
    """
    import numpy as np

    from stoker.chain.collating import all_of, collated

    began = time.thread_time()
    batch = collated(collate, all_of([(columns, 0, report.rows)])[0], "size")
    report.costs["collate"] = StageCost(time.thread_time() - began)
    for name, values in batch.items():
        if isinstance(values, list | tuple) and not all(isinstance(each, str) for each in values):
            raise ChainError(
                f"collate returns a list as {name!r}, which cannot be replayed; run the job, then add"
                " --from RUN"
            )
    return {n: np.array(v, object) if isinstance(v, list | tuple) else v.numpy() for n, v in batch.items()}


def _few(columns: dict[str, Any], chain: Chain) -> dict[str, Any]:
    """Rows for replay, under the names that the recipe uses, padded like batches."""
    import numpy as np

    from stoker.chain.columns import Ragged, padded

    kept: dict[str, Any] = {}
    for name, column in columns.items():
        rows = column[:KEPT_ROWS]
        if isinstance(rows, Ragged):
            kept |= padded(name, [rows], chain.pads[name], np.empty)
        else:
            kept[name.removesuffix(HWC_SUFFIX)] = rows.copy()
    kept.pop(ID_COLUMN, None)
    return kept


def _refuse_bad(groups: list[_Group]) -> None:
    records = sum(group.records for group in groups)
    bad = [one for group in groups for one in group.report.bad]
    if not records:
        raise UsageError("size: the profile read no record")
    if len(bad) > MAX_BAD * records:
        raise UsageError(f"size: {len(bad)} of {records} records cannot be preprocessed: {bad[0].reason}")


def _summed(groups: list[_Group], processes: int, columns: dict[str, Any], fixed: set[str]) -> ChainProfile:
    samples = sum(group.records for group in groups)
    total = sum(group.cpu_s for group in groups)
    costs: dict[str, StageCost] = {}
    for group in groups:
        for name, cost in group.report.costs.items():
            mine = costs.setdefault(name, StageCost())
            mine.cpu_s += cost.cpu_s
            mine.bytes_out += cost.bytes_out
    known = sum(cost.cpu_s for cost in costs.values())
    costs["pack"] = StageCost(max(total - known, 0.0), sum(group.report.bytes_out for group in groups))
    mean = total / samples
    return ChainProfile(
        cpu_s=mean,
        spread=max(_spread([group.cpu_s / group.records for group in groups], mean), SMALLEST_SPREAD),
        bytes_per_sample=sum(group.report.bytes_out for group in groups) / samples,
        stages=[
            {
                "stage": name,
                "cpu_ms_per_sample": round(1000 * cost.cpu_s / samples, 4),
                "bytes_out": round(cost.bytes_out / samples),
                "random": name not in fixed,
            }
            for name, cost in costs.items()
        ],
        samples=samples,
        processes=processes,
        columns=columns,
    )


def _spread(values: list[float], mean: float) -> float:
    """Two standard errors of the mean, relative to the mean; large if there are few values."""
    if len(values) < 3:
        return 0.25
    return 2 * statistics.stdev(values) / math.sqrt(len(values)) / mean
