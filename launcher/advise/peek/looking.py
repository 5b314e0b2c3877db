"""Laptop: run sample records of a split through its chain in this process and inspect each stage.

The records run twice: through the chain as chain workers run it, for its output, quarantine and cost; and
stage by stage, for the effect of each stage.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from launcher.advise.peek.columns import Column
from stoker.chain.chain import Chain, use_one_thread
from stoker.chain.collating import records_of
from stoker.chain.columns import Ragged
from stoker.chain.joint import moved_alone
from stoker.chain.probing import fix_schemas, remarks
from stoker.chain.stages import Stage
from stoker.config.schema import Config
from stoker.errors import ChainError, UsageError, where_raised
from stoker.messages import (
    HWC_SUFFIX,
    ID_COLUMN,
    KEY_COLUMN,
    RECORD_COLUMN,
    BadRecord,
    BlockReport,
    EpochPlan,
    Record,
    Work,
)
from stoker.read.sources import Source
from stoker.serve.datasets import DatasetSource
from stoker.serve.opening import Data, refuse_absent_pads
from stoker.serve.shards import order_of, seeded_reading

PLACES = 4
"""Number of shards to sample, because the first records of a sorted dataset are all alike."""
GROUP = 32
MOST_RECORDS = 512
FAILED_SHOWN = 4
"""So many failing records are on the contact sheet, if there are, wherever they were found."""
SECONDS = 1.5
"""Start no further group after this time, once all records to show are read."""


@dataclass
class Place:
    """Laptop: a point in the chain: after reading, or after a stage."""

    name: str
    per: str = "record"
    columns: dict[str, Column] = field(default_factory=dict)
    records: int = 0
    ms: list[float] = field(default_factory=list)
    """Time per record; for a batch stage, averaged over each group."""

    def take(self, record: Record) -> None:
        """Add one record."""
        self.records += 1
        for name, value in record.items():
            if name != "key":
                self.columns.setdefault(name, Column()).take(value)

    @property
    def ms_per_record(self) -> float | None:
        """The median, because the first record also pays for imports."""
        return statistics.median(self.ms) if self.ms else None


@dataclass
class Sample:
    """Laptop: a record on the contact sheet."""

    key: str
    read: Record = field(default_factory=dict)
    made: Record | None = None
    """Output of the chain; None if it failed."""
    so_far: Record | None = None
    """Output of the last stage that it passed."""
    reason: str = ""


@dataclass
class Look:
    """Laptop: the findings on a split."""

    split: str
    source: str
    totals: dict[str, int | None]
    places: list[Place]
    samples: list[Sample]
    bad: dict[str, str] = field(default_factory=dict)
    """Key → reason of each quarantined record."""
    refused: str = ""
    """Why a run with this data would be rejected or fail."""
    moved: list[tuple[str, bool]] = field(default_factory=list)
    """A line per stage that moves the image without its masks, and whether that ends a run."""
    notes: list[str] = field(default_factory=list)
    """What lies beside the records and is not read."""
    path_of: Callable[[str], str] = str
    """Key → where a user finds the record."""
    ms: float | None = None
    """Time to read and preprocess a record, as a chain worker does."""
    bytes_per_record: float = 0.0
    images: str = ""
    """A line on what decoding leaves out of them."""
    examined: int = 0


class Watched:
    """Laptop: wraps a stage to record its input, output and time."""

    def __init__(self, stage: Stage, place: Place, bad: dict[str, str], last: dict[str, Record]) -> None:
        self.stage, self.place, self.bad, self.last = stage, place, bad, last

    def __call__(self, *given: Any) -> Any:
        began = time.perf_counter()
        try:
            out = self.stage.apply(*given)
        except Exception as error:
            if self.stage.per == "record":
                self.bad[given[0]["key"]] = f"{self.stage.name}: {where_raised(error)}"
            raise
        took = 1000 * (time.perf_counter() - began)
        if self.stage.per == "record":
            self.place.ms.append(took)
            self.place.take(out)
            self.last[given[0]["key"]] = dict(out)
        elif isinstance(out, dict) and out:
            rows = min(map(len, out.values()))
            self.place.ms.append(took / max(rows, 1))
            for row in range(rows):
                self.place.take({name: column[row] for name, column in out.items()})
        return out


def look(data: Data, split: str, config: Config, count: int) -> Look:
    """Laptop: examine a split.

    Args:
        data: the job's, from `open_splits`.
        split: train or val.
        config: the job.
        count: number of records to show; more are examined if time allows.

    Raises:
        UsageError: the source has no records.
    """
    source, chain = data.sources[split], data.chains[split]
    use_one_thread()
    name = "a ray.data.Dataset" if isinstance(source, DatasetSource) else type(source).__name__
    seen = Look(split, name, data.totals, [Place("read")], [], notes=data.notes(), path_of=source.path_of)
    try:
        data.samples |= fix_schemas({split: source}, {split: chain}, config.data.block_records)
        refuse_absent_pads(chain.pads, [chain.schemas])
    except UsageError as error:
        seen.refused = str(error)
    seen.moved = [found for chain in data.chains.values() for found in moved_alone(chain.stages)]
    seen.places += [Place(stage.name, stage.per) for stage in chain.stages]
    cost = Cost()
    records = sampled(source, config, split, max(1, min(count, GROUP) // PLACES))
    ends, done, failed = time.monotonic() + SECONDS, 0, list[Sample]()
    while done < count or (time.monotonic() < ends and done < MOST_RECORDS):
        began = time.perf_counter()
        group = list(islice(records, GROUP))
        if not group:
            break
        seen.places[0].ms.append(1000 * (time.perf_counter() - began) / len(group))
        taken = [_take(record, seen) for record in group]
        shown = max(count - done, 0)
        done += len(group)
        last: dict[str, Record] = {}
        _try(_watched(chain, seen, last), copy.deepcopy(group), seen)
        rows = _rows(chain, group, seen, cost)
        for sample in taken:
            sample.made, sample.so_far = rows.get(sample.key), last.get(sample.key)
        seen.samples += taken[:shown]
        failed += [sample for sample in taken[shown:] if sample.key in seen.bad][: FAILED_SHOWN - len(failed)]
    if not done:
        raise UsageError(f"peek: the {split} split has no records")
    _show_failed(seen, failed)
    seen.images = remarks((sample.read for sample in seen.samples), chain.stages)
    for sample in seen.samples:
        sample.reason = seen.bad.get(sample.key, "" if sample.made else seen.refused)
    seen.examined = done
    seen.ms = 1000 * cost.cpu_s / cost.records + (seen.places[0].ms_per_record or 0) if cost.records else None
    seen.bytes_per_record = cost.bytes_out / max(cost.rows, 1)
    return seen


def _show_failed(seen: Look, failed: list[Sample]) -> None:
    """Let records that failed later take the places of the last ones that did not."""
    fine = [number for number, sample in enumerate(seen.samples) if sample.key not in seen.bad]
    lacking = FAILED_SHOWN - (len(seen.samples) - len(fine))
    places = fine[-min(lacking, len(failed)) :] if lacking > 0 and failed else []
    for place, sample in zip(places, failed, strict=False):
        seen.samples[place] = sample


@dataclass
class Cost:
    """Laptop: cost of the chain as chain workers run it."""

    cpu_s: float = 0.0
    records: int = 0
    rows: int = 0
    bytes_out: int = 0


def sampled(source: Source, config: Config, split: str, at_once: int) -> Iterator[Record | BadRecord]:
    """Laptop: the first records of some shards, round-robin.

    Args:
        source: of the split.
        config: the job.
        split: train or val.
        at_once: records to take from a shard before the next one.
    """
    plan = EpochPlan(config.seed, 0, split, config.data.shuffle, config.data.block_records)
    order = order_of(plan.seed, plan.epoch) if plan.shuffle and split == "train" else None
    shards = source.shards(plan.block_records, order)
    reader = source.for_workers()
    picked = sorted({number * len(shards) // PLACES for number in range(PLACES)}) if shards else []
    readers = [
        seeded_reading(reader, iter(reader.read(shards[number], None)), plan, Work(number, shards[number]))
        for number in picked
    ]
    while readers:
        for records in list(readers):
            part = list(islice(records, at_once))
            yield from part
            if not part:
                readers.remove(records)


def _take(record: Record | BadRecord, seen: Look) -> Sample:
    if isinstance(record, BadRecord):
        seen.bad[record.key] = f"read: {record.reason}"
        return Sample(record.key)
    seen.places[0].take(record)
    return Sample(record["key"], copy.deepcopy(record))


def _watched(chain: Chain, seen: Look, last: dict[str, Record]) -> Chain:
    """Wrap each stage of the chain; wrapped stages are not fused."""
    stages = [
        replace(stage, apply=Watched(stage, place, seen.bad, last))
        for stage, place in zip(chain.stages, seen.places[1:], strict=True)
    ]
    return chain.of(stages)


def _try(chain: Chain, group: list[Any], seen: Look) -> tuple[dict[str, Any], BlockReport]:
    """Run a group through a chain and record errors that would end a run."""
    try:
        return chain.run(iter(group), 0)
    except (ChainError, UsageError) as error:
        seen.refused = seen.refused or str(error)
        return {}, BlockReport()


def _rows(chain: Chain, group: list[Any], seen: Look, cost: Cost) -> dict[str, Record]:
    """Key → output of the chain; accumulates `cost` and the quarantined records."""
    with_keys = copy.copy(chain)
    with_keys.with_keys = True
    columns, report = _try(with_keys, group, seen)
    cost.cpu_s += sum(stage.cpu_s for stage in report.costs.values())
    cost.records, cost.rows = cost.records + report.records, cost.rows + report.rows
    cost.bytes_out += report.bytes_out
    for bad in report.bad:
        seen.bad.setdefault(bad.key, bad.reason)
    keys = columns.get(KEY_COLUMN, ())
    if chain.collate and columns:
        rows = records_of(columns[RECORD_COLUMN])
        return {
            str(key): {n.removesuffix(HWC_SUFFIX): v for n, v in row.items() if n != "key"}
            for key, row in zip(keys, rows, strict=True)
        }
    return {str(key): row_of(columns, number) for number, key in enumerate(keys)}


def row_of(columns: dict[str, Any], number: int) -> Record:
    """Laptop: one row of packed columns, with the recipe's column names."""
    found: Record = {}
    for name, column in columns.items():
        if name not in (ID_COLUMN, KEY_COLUMN):
            part = column[number : number + 1]
            found[name.removesuffix(HWC_SUFFIX)] = part.values if isinstance(part, Ragged) else part[0]
    return found
