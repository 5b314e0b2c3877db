"""Chain worker: runs a chain on a block of records and packs the results as columns."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, cast

from stoker.chain.collating import CollateFn, as_rows
from stoker.chain.columns import (
    Packed,
    bucketed,
    columns_of,
    finished_columns,
    pack_columns,
    schema_of,
    size_of,
)
from stoker.chain.decode import MOST_PIXELS, limit_pixels, sized
from stoker.chain.entries import fuse
from stoker.chain.joint import misfit
from stoker.chain.stages import Stage
from stoker.chain.transforms import DecodeImage
from stoker.errors import ChainError, where_raised
from stoker.protocol import BadRecord, BlockReport, Pad, Record, Schema, StageCost
from stoker.read.generators import HeldGenerators
from stoker.read.host_cache import KeptRecord
from stoker.read.sources import ID_MODULUS, record_id, seed_globals, seed_torch


class Segment(NamedTuple):
    number: int
    """Seeds its draws; independent of whether earlier stages are cached."""
    stages: list[Stage]
    is_prefix: bool = False
    """Whether its results are cached across epochs."""
    direct: list[Stage] | None = None
    """Replaces `stages` for a record that is never cached; None: the same."""


class SegmentRun:
    """The stages of a segment for some records of a block, and what they cost."""

    def __init__(
        self, stages: list[Stage], seed: str, report: BlockReport, held: HeldGenerators
    ) -> None:
        self.stages, self._seed, self._report, self._held = stages, seed, report, held
        self._costs = [report.costs.setdefault(s.name, StageCost(random=s.random)) for s in stages]
        self._generator = _generators(stages)
        self._passed, self._sizes = 0, list[int]()

    def take(self, record: Record) -> Record | None:
        """The record after the stages; None: it is quarantined."""
        clock, key, stage = time.thread_time, record["key"], self.stages[0]
        sizes: list[int] = []
        # The result must not depend on where a record is processed, so each record has its own seed.
        rng = self._generator(f"{self._seed}/{key}")
        self._held.seed(f"{self._seed}/{key}")
        spare = self._held.spare(record)
        before = clock()
        try:
            for stage, cost in zip(self.stages, self._costs, strict=True):
                record = stage.apply(record, rng)
                now = clock()
                cost.cpu_s += now - before
                before = now
                if not self._passed:
                    sizes.append(_size(record))
        except Exception as error:
            name = getattr(error, "stage", stage.name)
            text = " ".join(str(error).split())[:300] + _text_in(record, error)
            _quarantine(self._report, BadRecord(key, f"{name}: {type(error).__name__}: {text}"))
            return None
        if self._held.created():
            return self.take(cast(Record, spare))
        self._sizes, self._passed = sizes or self._sizes, self._passed + 1
        record["key"] = key
        return record

    def close(self) -> None:
        """Estimate the bytes that the stages made from those of the first record."""
        for size, cost in zip(self._sizes, self._costs, strict=True) if self._passed else ():
            cost.bytes_out += size * self._passed


@dataclass(eq=False)
class Chain:
    stages: list[Stage]
    seed: int
    with_keys: bool = False
    prefix: int = 0
    """Number of leading stages whose results are cached across epochs. They run separately from the others,
    so that a record is the same whether or not it was cached."""
    max_pixels: int = MOST_PIXELS
    pads: Mapping[str, Pad] = field(default_factory=dict)
    """Columns whose rows may differ in length, and how batches pad them."""
    bucket_by: str | None = None
    """Column whose length orders the rows of a block; None: keep their order."""
    collate: CollateFn | None = None
    """The recipe's; whole records leave the chain then, of any shape. None: batches stack columns."""
    schemas: tuple[Schema, ...] = ()
    """Schemas of the split, which every block must have; empty: each block reports its own."""
    _held: dict[tuple[int, ...], HeldGenerators] = field(default_factory=dict, init=False)
    share: float = 1.0
    """Share of the records that are cached, chosen by key; all stages of the others are fused."""

    def of(self, stages: list[Stage]) -> Chain:
        other = copy(self)
        other.__dict__.pop("_segments", None)
        other.stages, other._held = stages, {}
        return other

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": {}}

    def _held_by(self, stages: list[Stage]) -> HeldGenerators:
        """The generators of stages that draw, seeded as the global ones are."""
        if (key := tuple(map(id, stages))) not in self._held:
            self._held[key] = HeldGenerators(*(stage.apply for stage in stages if stage.random))
        return self._held[key]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickling imports what the transforms need, before any record is timed."""
        self.__dict__.update(state)
        limit_pixels(self.max_pixels)
        for stage in (stage for segment in self._segments for stage in segment.stages):
            getattr(stage.apply, "prepare", lambda: None)()

    def run(
        self,
        records: Iterable[Record | BadRecord],
        epoch: int,
        keep: Callable[[Record], int] | None = None,
    ) -> tuple[dict[str, Any], BlockReport]:
        limit_pixels(self.max_pixels)
        report = BlockReport(costs={"read": StageCost(random=False)})
        # Record by record, so that only one decoded image at a time is in memory, and it in the CPU's cache.
        keys: list[str] = []
        passing: Iterable[Record] = self._take(records, report, keys)
        for segment in self._segments:
            seed = f"{self.seed}/{epoch}/{segment.number}"
            if segment.stages[0].per == "record":
                passing = self._per_record(passing, segment, seed, report)
                if segment.is_prefix and keep is not None:
                    passing = _keep(passing, keep, report)
                continue
            passing = good = list(passing)
            for stage in segment.stages:
                passing = good = self._per_batch(good, stage, seed, report) if good else good
        good = []
        for record in passing:
            if text := misfit(record):
                _quarantine(report, BadRecord(record["key"], text))
            else:
                good.append(record)
        if self.bucket_by and good:
            good = bucketed(good, self.bucket_by, f"{self.seed}/{epoch}/bucket")
        columns = self._leave(good, report)
        if report.bad and not self.bucket_by:
            # Of equal keys, the first.
            places = {key: place for place, key in reversed([*enumerate(keys)])}
            report.bad = [bad._replace(place=places.get(bad.key, -1)) for bad in report.bad]
        return columns, report

    def _leave(self, records: list[Record], report: BlockReport) -> dict[str, Any]:
        packed = self._pack(records, report, "collate" if self.collate else "") if records else None
        if packed is None or not packed.records:
            report.schemas = ()
            return {}
        stages = report.schemas if self.collate else report.schemas[:-1]
        if self.collate:
            packed = packed._replace(columns=as_rows(packed.records))
        columns = finished_columns(packed, self.with_keys)
        report.rows = len(packed.records)
        report.bytes_out += sum(map(size_of, packed.columns.values()))
        report.schemas = (*stages, schema_of(columns, packed.schema.record, self.pads))
        return columns

    def _pack(self, records: list[Record], report: BlockReport, stage: str = "") -> Packed:
        at = len(report.schemas)
        expected = self.schemas[at].of_records() if self.schemas else None
        packed = pack_columns(records, expected, stage, self.pads)
        report.schemas += (packed.schema,)
        for bad in packed.bad:
            _quarantine(report, bad)
        return packed

    def caches(self, key: str) -> bool:
        """Whether hosts cache this record; the answer depends on nothing but its key and the share."""
        return self.share >= 1 or record_id(key) < self.share * ID_MODULUS

    def _take(
        self, records: Iterable[Record | BadRecord], report: BlockReport, keys: list[str]
    ) -> Iterator[Record]:
        # Stoker's decoder checks the header.
        decodes = bool(self.stages) and isinstance(self.stages[0].apply, DecodeImage)
        clock, cost = time.thread_time, report.costs["read"]
        size = read = 0
        started = clock()
        for record in records:
            record = sized(record, decodes)
            report.records += 1
            keys.append(record.key if isinstance(record, BadRecord) else record["key"])
            report.id_sum += record_id(keys[-1])
            if isinstance(record, BadRecord):
                _quarantine(report, record)
                continue
            if type(record) is KeptRecord:
                report.found += 1
            else:
                size, read = size or _size(record), read + 1
            cost.cpu_s += clock() - started
            yield record
            started = clock()
        cost.cpu_s += clock() - started
        cost.bytes_out = size * read

    @cached_property
    def _segments(self) -> list[Segment]:
        """Groups of adjacent stages of one kind, fused: record stages run record by record."""
        segments = []
        for number, (per, run) in enumerate(groupby(self.stages, key=lambda stage: stage.per)):
            stages = list(run)
            prefix = self.prefix if number == 0 else 0
            whole = fuse(stages) if per == "record" else stages
            if not 0 < prefix < len(stages):
                segments.append(Segment(number, whole, prefix > 0))
                continue
            segments.append(Segment(number, fuse(stages[:prefix]), True, direct=[]))
            segments.append(Segment(number, fuse(stages[prefix:]), direct=whole))
        return segments

    def _per_record(
        self, records: Iterable[Record], segment: Segment, seed: str, report: BlockReport
    ) -> Iterator[Record]:
        cached = direct = SegmentRun(segment.stages, seed, report, self._held_by(segment.stages))
        if self.share < 1 and segment.direct is not None:
            held = self._held_by(segment.direct)
            direct = SegmentRun(segment.direct, seed, report, held)
        return self._each(records, segment.is_prefix, cached, direct)

    def _each(
        self, records: Iterable[Record], is_prefix: bool, cached: SegmentRun, direct: SegmentRun
    ) -> Iterator[Record]:
        for record in records:
            run = cached if direct is cached or self.caches(record["key"]) else direct
            if not run.stages or (is_prefix and type(record) is KeptRecord):
                yield record
            elif (made := run.take(record)) is not None:
                yield made
        for run in {cached, direct}:
            run.close()

    def _per_batch(
        self, records: list[Record], stage: Stage, seed: str, report: BlockReport
    ) -> list[Record]:
        records, columns, _, _ = self._pack(records, report, stage.name)
        if not records:
            return []
        # Seed by all records of the block: another block may have the same first record.
        text = f"{seed}/{stage.name}/" + "\n".join(record["key"] for record in records)
        held = self._held_by([stage])
        if stage.random:
            seed_globals(text)
            held.seed(text)
            spare = held.spare(columns)
        started = time.thread_time()
        try:
            out = stage.apply(columns)
            if stage.random and held.created():
                seed_globals(text)
                out = stage.apply(spare)
        except Exception as error:
            raise ChainError(f"stage {stage.name}: {where_raised(error)}") from error
        cost = report.costs.setdefault(stage.name, StageCost())
        cost.cpu_s += time.thread_time() - started
        try:
            # Ray Data preprocessors return Arrow or pandas tables.
            out = {**(out if isinstance(out, dict) else columns_of(out))}
        except TypeError:
            raise ChainError(f"stage {stage.name}: did not return a dict of columns") from None
        for name, column in out.items():
            if len(column) != len(records):
                raise ChainError(
                    f"stage {stage.name}: column {name} has {len(column)} values for {len(records)}"
                    " records; a chain must keep every record"
                )
            if hasattr(column, "iloc"):
                rows = {label: row for row, label in enumerate(column.index)}
                if rows.keys() != {*range(len(records))}:
                    raise ChainError(
                        f"stage {stage.name}: column {name} is a pandas Series whose index has other labels"
                        " than 0, 1, 2, …; return an array in the order of the records"
                    )
                out[name] = column.iloc[[rows[i] for i in range(len(records))]].reset_index(
                    drop=True
                )
        cost.bytes_out += sum(getattr(column, "nbytes", 0) for column in out.values())
        return [
            {"key": record["key"], **{name: column[i] for name, column in out.items()}}
            for i, record in enumerate(records)
        ]


def _text_in(record: Record, error: Exception) -> str:
    names = [name for name, value in record.items() if isinstance(value, str) and name != "key"]
    return f" (columns of text: {', '.join(names)})" if names and type(error) is TypeError else ""


def _keep(
    records: Iterable[Record], keep: Callable[[Record], int], report: BlockReport
) -> Iterator[Record]:
    for record in records:
        if type(record) is not KeptRecord:
            started = time.thread_time()
            if size := keep(record):
                report.kept += 1
                report.kept_bytes += size
                cost = report.costs.setdefault("keep", StageCost())
                cost.cpu_s += time.thread_time() - started
        yield record


def _generators(stages: list[Stage]) -> Callable[[str], Any]:
    """Maps a record's name to its generator; seeds the global generators if a stage may use them."""
    import numpy as np

    if not any(stage.random for stage in stages):
        still = _NoGenerator()
        return lambda text: still
    uses_any = any(stage.random and stage.uses_random for stage in stages)
    uses_torch = any(stage.random and stage.uses_torch for stage in stages)

    def generator(text: str) -> Any:
        if uses_any:
            seed = seed_globals(text)
        else:
            seed = record_id(text)
            if uses_torch:
                seed_torch(seed)
        # The same numbers as default_rng(seed), at half the cost.
        return np.random.Generator(np.random.PCG64(seed))

    return generator


class _NoGenerator:
    """Passed to a transform with `random = False`, so that any draw is an error."""

    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"a transform that declares random = False uses rng.{name}")


def _quarantine(report: BlockReport, bad: BadRecord) -> None:
    report.bad.append(bad)
    report.bad_id_sum += record_id(bad.key)


def _size(record: Record) -> int:
    return sum(
        value.nbytes if hasattr(value, "nbytes") else len(value) if isinstance(value, bytes) else 8
        for name, value in record.items()
        if name != "key" and not getattr(value, "is_sparse", False)  # refused later
    )


def use_one_thread() -> None:
    """Run one task per core, so libraries must not start threads of their own."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)
