"""CPU host: reads shards and runs the chain on their records, block by block."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

from stoker.chain.chain import Chain, use_one_thread
from stoker.errors import FlakyReadError
from stoker.messages import BadRecord, BlockReport, PassPlan, Record, Shard, Work
from stoker.read.host_cache import CachedReader, CacheSpec, HostCache
from stoker.read.sources import Source, listing_of, record_id, seeded
from stoker.serve.witness import Guard


class Setup(NamedTuple):
    """Head → chain worker: what all tasks of a split share."""

    source: Source | None
    chain: bytes
    """The pickled Chain. Unpickling imports what its transforms need (such as torch), a cost that only CPU
    tasks should pay."""
    cache: CacheSpec | None = None
    key: str = ""
    """Cache key of this split."""


class Loaded(NamedTuple):
    """Chain worker: the per-process state of a split."""

    source: Any
    chain: Chain
    cache: HostCache | None = None


def refuse_flaky(report: BlockReport) -> None:
    """Chain worker: retry a shard on another host if a record cannot be read here and now.

    Raises:
        FlakyReadError: names the record.
    """
    for bad in report.bad:
        if bad.passing:
            raise FlakyReadError(f"record {bad.key} {bad.reason}")


def load(setup: Any) -> Loaded:
    """Chain worker: open a split for the whole run.

    Args:
        setup: reference of its Setup.
    """
    import ray

    content: Setup = ray.get(setup)
    chain = pickle.loads(content.chain)  # noqa: S301 - written by the head
    return Loaded(content.source, chain, _cache_of(content))


def _cache_of(setup: Setup) -> HostCache | None:
    import ray

    if setup.cache is None:
        return None
    node = ray.get_runtime_context().get_node_id()
    reserved = sum(
        int(n["Resources"].get("object_store_memory", 0)) for n in ray.nodes() if n["NodeID"] == node
    )
    return HostCache(setup.cache.root(), setup.key, setup.cache, reserved)


def blocks_of(
    loaded: Loaded, plan: PassPlan, work: Work, guard: Guard | None = None
) -> Iterator[tuple[dict[str, Any], BlockReport]]:
    """Chain worker: the preprocessed blocks of a shard, each with its report.

    A quarantined record keeps its place in its block, so blocks keep their numbers and records whatever a
    `guard` keeps out of the chain.
    """
    shard, order = work.shard, partial(order_within, plan, work.shard)
    started = time.perf_counter()
    reading = None
    if loaded.cache:
        refuses = (guard.refuses,) if guard else ()
        reading = CachedReader(loaded.source, shard, order, loaded.cache, work.store, *refuses)
    if reading:
        records = iter(reading)
    elif guard:
        records = guard.read(loaded.source, shard, order())
    else:
        records = loaded.source.read(shard, order())
    records = seeded_reading(loaded.source, records, plan, work)
    if guard:
        one = partial(_run_alone, loaded.chain, plan.epoch)
        records = guard.watch(records, one, work.skip * plan.block_records)
    keep = reading.keep if reading else None
    nth, following, bad = 0, next(records, None), 0
    while following is not None and nth != work.stop:
        block: Iterable[Record | BadRecord] = chain([following], islice(records, plan.block_records - 1))
        if nth < work.skip:
            deque(block, maxlen=0)
            following = next(records, None)
        else:
            if guard:
                block = guard.together(block)
            columns, report = run_chain(loaded.chain, block, plan.epoch, keep)
            following = next(records, None)
            bad += len(report.bad)
            report.shard, report.nth, report.last = work.number, nth, following is None
            report.seconds = time.perf_counter() - started
            yield columns, report
        started = time.perf_counter()
        nth += 1
    if reading:
        reading.finished(whole=following is None and not bad and not work.skip)


def order_within(plan: PassPlan, shard: Shard) -> Any:
    """Chain worker: the generator that permutes the records of a shard; None: they stay as they are."""
    return order_of(plan.seed, plan.epoch, f"{shard.called}:{shard.start}") if plan.shuffle else None


def seeded_reading(
    source: Source, records: Iterator[Record | BadRecord], plan: PassPlan, work: Work
) -> Iterator[Record | BadRecord]:
    """Chain worker: the records of a shard, with the generators seeded for each where reading draws."""
    if not source.random:
        return records
    listing = listing_of(source, work.shard)
    keys = None if listing is None else [key for key, _ in listing]
    what = "read" if keys else f"shard/{work.number}"
    return seeded(records, keys, f"{plan.seed}/{plan.epoch}/{what}")


def _run_alone(stages: Chain, epoch: int, record: Record) -> None:
    run_chain(stages, [record], epoch)


def run_chain(
    stages: Chain,
    block: Iterable[Record | BadRecord],
    epoch: int,
    keep: Callable[[Record], int] | None = None,
) -> tuple[dict[str, Any], BlockReport]:
    """Chain worker: run one block through the chain, on one core."""
    use_one_thread()
    return stages.run(block, epoch, keep)


def order_of(seed: int, epoch: int, what: str = "") -> Any:
    """Head and chain worker: the generator that permutes records, seeded by (seed, epoch, what)."""
    import numpy as np

    return np.random.default_rng(record_id(f"order/{seed}/{epoch}/{what}"))
