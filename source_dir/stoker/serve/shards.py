"""CPU host: reads shards and runs the chain on their records, block by block."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.chain.chain import Chain, use_one_thread
from stoker.chain.columns import columns_of
from stoker.errors import StokerError, cause_of
from stoker.protocol import BadRecord, BlockReport, PassPlan, Record, Shard, Work
from stoker.read.arrow import is_image, mask_of, values_of
from stoker.read.host_cache import CachedReader, CacheSpec, HostCache
from stoker.read.sources import Source, listing_of, one_by_one, record_id, reread_wait_s, seeded

if TYPE_CHECKING:
    import numpy as np


SKIPS_S = 2.0
"""Interval at which a stream that is read again up to its place says that it still is."""


class DatasetSource(Source):
    """A recipe's `ray.data.Dataset`, None on chain workers: Ray Data executes it pass by pass for the head,
    and chain workers read its blocks.
    """

    random = False

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def shards(self, records: int, order: np.random.Generator | None) -> list[Shard]:
        """Empty; shards are unknown until the dataset runs, see `blocks`."""
        return []

    def blocks(self, seed: int | None, exact: bool) -> Iterator[Shard]:
        """Execute the dataset once; `seed` permutes its blocks, `exact` keeps their order in every run."""
        dataset = self.dataset if seed is None else self.dataset.randomize_block_order(seed=seed)
        let_wait(dataset)
        dataset.context.execution_options.preserve_order = exact
        first = 0
        for bundle in dataset.iter_internal_ref_bundles():
            for entry in bundle.blocks:
                if rows := entry.metadata.num_rows:
                    yield Shard("", first, first + rows, rows, (entry.ref,), name="rows")
                    first += rows

    def first_rows(self, count: int) -> list[Record]:
        let_wait(self.dataset)
        return as_records(self.dataset.take_batch(count, batch_format="pyarrow"))

    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        import ray

        records = as_records(ray.get(shard.items[0]))
        yield from (
            records if order is None else (records[i] for i in order.permutation(len(records)))
        )

    def count(self) -> int | None:
        """None, because counting would mean reading."""
        return None

    def for_workers(self) -> Source:
        return DatasetSource(None)

    def fingerprint(self) -> str:
        """A pipeline does not identify its records."""
        return type(self.dataset).__name__


def let_wait(dataset: Any) -> None:
    """Let a dataset's execution wait for as long as it must: leases do, and blocks while enough are ready.

    Ray 2.60 ends one in which no block moves for half an hour. Ray 2.54.0 asks for the state of each task
    that runs, which takes 40 s without a dashboard.
    """
    context = dataset.context
    context.enable_progress_bars = False
    context.execution_no_progress_timeout_s = -1
    context.raise_original_map_exception = True
    if (detectors := getattr(context, "issue_detectors_config", None)) is not None:
        detectors.detectors = []


def as_records(block: Any) -> list[Record]:
    """The rows of a block as records; rows without a key get one from their content.

    NULL becomes None and the other numbers keep their type: as an array, an integer column with a NULL would
    become float.
    """
    columns = columns_of(block)
    values: dict[str, Any] = {
        name: lambda row, column=column: _scalar(column[row]) for name, column in columns.items()
    }
    if hasattr(block, "schema"):
        for name in columns:
            mask = mask_of(block[name])
            if mask is not None:
                value = values_of(block[name])
                values[name] = lambda row, mask=mask, value=value: None if mask[row] else value(row)
            elif is_image(block[name].type):
                values[name] = values_of(block[name])
    count = len(next(iter(columns.values()))) if columns else 0
    rows = [{name: value(row) for name, value in values.items()} for row in range(count)]
    return [{**row, "key": _key(row)} for row in rows]


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _key(row: dict[str, Any]) -> str:
    """A row's `key` column, or a hash of its content: rows of a foreign dataset have no other identity."""
    if "key" in row:
        return str(row["key"])
    content = hashlib.blake2b(digest_size=16)
    for name, value in row.items():
        content.update(name.encode())
        content.update(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode())
    return content.hexdigest()


class Guard:
    """Keeps quarantined records (`known`: key → reason) out of the chain.

    `tell` calls a method of the service with each activity before it starts, so that the head knows it if the
    process dies; None: it need not.
    """

    def __init__(self, known: Mapping[str, str], tell: Callable[[str, str], Any] | None) -> None:
        self._known, self._tell = known, tell

    def refuses(self, key: str) -> str:
        """Why a record must not be started; empty: it may."""
        if reason := self._known.get(key, ""):
            return reason
        return str(self._tell("record_begins", key)) if self._tell else ""

    def read(self, source: Source, shard: Shard, order: Any) -> Iterator[Record | BadRecord]:
        """The records of a shard; skips reading quarantined ones if the source supports that."""
        listing = listing_of(source, shard)
        if listing is None:
            if self._tell and hasattr(source, "tell"):
                source.tell = partial(self._tell, "task_does")
            return source.read(shard, order)
        return one_by_one(source, listing, lambda key: None, self.refuses)

    def watch(
        self, records: Iterator[Record | BadRecord], alone: Callable[[Record], Any], first: int
    ) -> Iterator[Record | BadRecord]:
        for number in count():
            if self._tell:
                self._tell("task_does", f"reading record {number} of its shard")
            record = next(records, None)
            if record is None:
                return
            if isinstance(record, BadRecord):  # one that was bad before is not tried elsewhere
                yield record._replace(passing=record.passing and record.called not in self._known)
                continue
            if number < first:
                yield record
                continue
            key = record["key"]
            if reason := self.refuses(key):
                yield BadRecord(key, reason)
                continue
            if self._tell:
                with contextlib.suppress(Exception):  # the chain raises it again
                    alone(copy.deepcopy(record))
            yield record

    def together(self, block: Iterable[Record | BadRecord]) -> Iterable[Record | BadRecord]:
        if self._tell is None:
            return block
        block = list(block)
        keys = [record.key if isinstance(record, BadRecord) else record["key"] for record in block]
        self._tell("task_does", f"preprocessing the records {keys[0]} … {keys[-1]} together")
        return block


class Setup(NamedTuple):
    """Head → chain worker: what all tasks of a split share."""

    source: Source | None
    chain: bytes
    """The pickled Chain. Unpickling imports what its transforms need (such as torch), a cost that only CPU
    tasks should pay."""
    cache: CacheSpec | None = None
    key: str = ""


class LoadedSplit(NamedTuple):
    source: Any
    chain: Chain
    cache: HostCache | None = None


def open_split(setup: Any) -> LoadedSplit:
    import ray

    content: Setup = ray.get(setup)
    chain = pickle.loads(content.chain)  # noqa: S301 - written by the head
    cache = None
    if content.cache is not None:
        cache = host_cache(content.cache, content.key)
    return LoadedSplit(content.source, chain, cache)


def host_cache(spec: CacheSpec, key: str) -> HostCache:
    """This host's cache; whoever opens it first fixes how much it may take."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    own = [n["Resources"] for n in ray.nodes() if n["NodeID"] == node]
    reserved = sum(int(resources.get("object_store_memory", 0)) for resources in own)
    return HostCache(spec.root(), key, spec, reserved)


def blocks_of(
    loaded: LoadedSplit, plan: PassPlan, work: Work, guard: Guard | None = None
) -> Iterator[tuple[dict[str, Any], BlockReport]]:
    """The preprocessed blocks of a shard, each with its report.

    A quarantined record keeps its place in its block, so blocks keep their numbers and records whatever a
    `guard` keeps out of the chain. While a stream is read again up to its place, reports without a shard.
    """
    shard, nth = work.shard, 0
    # A stream may wait for what its script does with a batch: nothing is read ahead, and its end is a batch.
    stays = getattr(loaded.source, "stays", False)
    if stays:
        shard, nth = loaded.source.begun_at(shard, work.skip)
    shuffled = partial(order_of, plan.seed, plan.epoch, f"{shard.called}:{shard.start}")
    order: Callable[[], Any] = shuffled if plan.shuffle else lambda: None
    started = time.perf_counter()
    reading = None
    if loaded.cache:
        refuses = (guard.refuses,) if guard else ()
        reading = CachedReader(
            loaded.source, shard, order, loaded.cache, work.store, loaded.chain.caches, *refuses
        )
    if reading:
        records = iter(reading)
    elif guard:
        records = guard.read(loaded.source, shard, order())
    else:
        records = loaded.source.read(shard, order())
    records = seeded_reading(loaded.source, records, plan, work)
    if guard:
        alone = partial(run_chain, loaded.chain, plan.epoch)
        records = guard.watch(
            records, lambda record: alone([record]), work.skip * plan.block_records
        )
    keep = reading.keep if reading else None
    following, bad, told = next(records, None), 0, started
    while following is not None and nth != work.stop:
        block: Iterable[Record | BadRecord] = chain(
            [following], islice(records, plan.block_records - 1)
        )
        if nth < work.skip:
            deque(block, maxlen=0)
            following = next(records, None)
            if stays and time.perf_counter() - told > SKIPS_S:
                told = time.perf_counter()
                yield {}, BlockReport(nth=nth)
        else:
            if guard:
                block = guard.together(block)
            columns, report = run_chain(loaded.chain, plan.epoch, block, keep)
            if not stays:
                following = next(records, None)
                report.last = following is None
            bad += len(report.bad)
            report.shard, report.nth = work.number, nth
            report.seconds = time.perf_counter() - started
            yield columns, report
        started = time.perf_counter()
        nth += 1
        if stays and nth > work.skip and nth != work.stop:
            following = next(records, None)
    if reading:
        reading.finished(whole=following is None and not bad and not work.skip)


def seeded_reading(
    source: Source, records: Iterator[Record | BadRecord], plan: PassPlan, work: Work
) -> Iterator[Record | BadRecord]:
    """The records of a shard, with the generators seeded for each where reading draws."""
    if not source.random:
        return records
    listing = listing_of(source, work.shard)
    keys = None if listing is None else [key for key, _ in listing]
    what = "read" if keys else f"shard/{work.number}"
    return seeded(records, keys, f"{plan.seed}/{plan.epoch}/{what}", source.held)


def run_chain(
    stages: Chain,
    epoch: int,
    block: Iterable[Record | BadRecord],
    keep: Callable[[Record], int] | None = None,
) -> tuple[dict[str, Any], BlockReport]:
    use_one_thread()  # a stage may just have imported a library that has several
    return stages.run(block, epoch, keep)


def order_of(seed: int, epoch: int, what: str = "") -> Any:
    import numpy as np

    return np.random.default_rng(record_id(f"order/{seed}/{epoch}/{what}"))


def retries(error: BaseException) -> int:
    """How often to try work again that ended with this error."""
    cause: BaseException | None = cause_of(error)
    while cause is not None and not isinstance(cause, OSError | StokerError):
        cause = cause.__cause__
    if not isinstance(cause, OSError):
        return 0
    return next(n for n in range(100) if reread_wait_s(cause, n) is None)
