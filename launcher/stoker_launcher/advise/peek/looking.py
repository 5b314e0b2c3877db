"""Run sample records of a split through its chain in this process and inspect each stage.

Each stage is watched, so stages that chain workers apply together run one by one here.
"""

from __future__ import annotations

import contextlib
import copy
import io
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from stoker.chain.chain import Chain, use_one_thread
from stoker.chain.collating import records_of
from stoker.chain.columns import Ragged
from stoker.chain.decode import depth_of
from stoker.chain.probing import fix_schemas
from stoker.chain.stages import Stage
from stoker.chain.transforms import DecodeImage
from stoker.config.schema import Config
from stoker.errors import ChainError, UsageError, where_raised
from stoker.figures import size
from stoker.protocol import (
    HWC_SUFFIX,
    ID_COLUMN,
    KEY_COLUMN,
    RECORD_COLUMN,
    BadRecord,
    PassPlan,
    Record,
    Work,
)
from stoker.read.sources import Source
from stoker.serve.blocks.folder import digest_of
from stoker.serve.opening import Data, refuse_absent_pads
from stoker.serve.shards import order_of, seeded_reading

SHARDS = 4
"""Number of shards to sample, because the first records of a sorted dataset are all alike."""
GROUP = 32
MOST_RECORDS = 512
SECONDS = 1.5
"""Start no further group after this time, once all records to show are read."""
COMPARED = 4
"""So many records run twice, to see whether the chain gives the same again."""


@dataclass
class ColumnStatistics:
    values: int = 0
    nulls: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """NumPy dtype name, or text, bytes or the Python class."""
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    """Shapes of arrays; lengths of text and bytes."""
    numbers: list[tuple[float, float]] = field(default_factory=list)
    """Least and largest finite number of each value."""
    nans: int = 0
    """Number of values that contain NaN or infinity."""

    def take(self, value: Any) -> None:
        import numpy as np

        self.values += 1
        array = None if isinstance(value, bytes | str) else as_array(value)
        if value is None:
            self.nulls += 1
        elif array is None or array.dtype == object:
            self.kinds["text" if isinstance(value, str) else type(value).__name__] += 1
            if isinstance(value, bytes | str):
                self.shapes.add((len(value),))
        else:
            self.kinds[array.dtype.name] += 1
            self.shapes.add(array.shape)
            finite = array[np.isfinite(array)] if array.dtype.kind in "biuf" else array[:0]
            self.nans += array.dtype.kind == "f" and finite.size < array.size
            if finite.size:
                self.numbers.append((float(finite.min()), float(finite.max())))

    def shape_text(self) -> str:
        """`32×32×3`, or the smallest and the largest of several."""
        if self.shapes <= {()}:
            return ""
        kind = next(iter(self.kinds))
        as_text = {"bytes": lambda shape: size(shape[0]), "text": lambda shape: f"{shape[0]} chars"}
        low, high = (as_text.get(kind, times)(end) for end in (min(self.shapes), max(self.shapes)))
        return low if low == high else f"{low} … {high}"

    def range_text(self) -> str:
        """Minimum and maximum of numbers."""
        texts = [f"{self.nans} with NaN/inf"] if self.nans else []
        if self.numbers:
            low, high = min(low for low, _ in self.numbers), max(high for _, high in self.numbers)
            texts.insert(0, f"{low:.4g} … {high:.4g}" if low < high else f"{low:.4g}")
        return ", ".join(texts)


def times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "number"


def as_array(value: Any) -> Any:
    """Convert numbers, arrays, tensors and lists of numbers to an array; else None."""
    import numpy as np

    if hasattr(value, "numpy") and hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        return value.numpy()
    if isinstance(value, np.ndarray | np.generic | bool | int | float):
        return np.asarray(value)
    if isinstance(value, list | tuple) and value and all(isinstance(v, int | float) for v in value):
        return np.asarray(value)
    return None


@dataclass
class ChainPoint:
    name: str
    columns: dict[str, ColumnStatistics] = field(default_factory=dict)
    records: int = 0
    ms: list[float] = field(default_factory=list)
    """Time per record; for a batch stage, averaged over each group."""

    def take(self, record: Record) -> None:
        self.records += 1
        for name, value in record.items():
            if name != "key":
                self.columns.setdefault(name, ColumnStatistics()).take(value)

    @property
    def ms_per_record(self) -> float | None:
        """The median, because the first record also pays for imports."""
        return statistics.median(self.ms) if self.ms else None


@dataclass
class Sample:
    key: str
    read: Record = field(default_factory=dict)
    made: Record | None = None
    reason: str = ""


@dataclass
class Inspection:
    split: str
    source: str
    points: list[ChainPoint]
    samples: list[Sample]
    bad: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    """Why a run with this data would be rejected or fail."""
    unstable: bool = False
    """Whether the chain gave another result when the same records ran again."""
    images: str = ""
    """What DecodeImage leaves out of them."""
    examined: int = 0


@dataclass
class Watched:
    """Applies a stage and notes what comes of it."""

    stage: Stage
    point: ChainPoint
    bad: dict[str, str]

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
            self.point.ms.append(took)
            self.point.take(out)
        elif isinstance(out, dict) and out:
            rows = min(map(len, out.values()))
            self.point.ms.append(took / max(rows, 1))
            for row in range(rows):
                self.point.take({name: column[row] for name, column in out.items()})
        return out


def look(data: Data, split: str, config: Config, count: int) -> Inspection:
    source, chain = data.sources[split], data.chains[split]
    use_one_thread()
    seen = Inspection(split, type(source).__name__, [ChainPoint("read")], [])
    try:
        data.samples |= fix_schemas({split: source}, {split: chain}, config.data.block_records)
        refuse_absent_pads(chain.pads, [chain.schemas])
    except UsageError as error:
        seen.refused = str(error)
    watched = [Watched(stage, ChainPoint(stage.name), seen.bad) for stage in chain.stages]
    seen.points += [watch.point for watch in watched]
    chain = chain.of([replace(watch.stage, apply=watch) for watch in watched])
    chain.with_keys = True
    records = sampled(source, config, split, max(1, min(count, GROUP) // SHARDS))
    ends = time.monotonic() + SECONDS
    while seen.examined < count or (time.monotonic() < ends and seen.examined < MOST_RECORDS):
        began = time.perf_counter()
        group = list(islice(records, GROUP))
        if not group:
            break
        seen.points[0].ms.append(1000 * (time.perf_counter() - began) / len(group))
        if not seen.examined:
            seen.unstable = _unstable(data.chains[split], group[:COMPARED])
        taken = [_take(record, seen) for record in group]
        shown = max(count - seen.examined, 0)
        rows = _rows(chain, group, seen)
        seen.examined += len(group)
        for sample in taken:
            sample.made = rows.get(sample.key)
        seen.samples += taken[:shown]
    if not seen.examined:
        raise UsageError(f"peek: the {split} split has no records")
    seen.images = _left_out([sample.read for sample in seen.samples], data.chains[split].stages)
    for sample in seen.samples:
        sample.reason = seen.bad.get(sample.key, "" if sample.made else seen.refused)
    return seen


def _unstable(chain: Chain, records: list[Any]) -> bool:
    # One chain for both runs, since it knows in which state the generators of its stages were sent.
    own, digests = chain.of(chain.stages), set[int]()
    with contextlib.suppress(ChainError, UsageError):  # shown where all records run
        digests = {digest_of(own.run(copy.deepcopy(records), 0)[0]) for _ in range(2)}
    return len(digests) > 1


def _left_out(records: list[Record], stages: list[Stage]) -> str:
    """What DecodeImage leaves out of encoded images: bits and pages."""
    from PIL import Image

    deep = pages = 0
    content: Any
    decodes = any(isinstance(stage.apply, DecodeImage) for stage in stages)
    for content in [record["image"] for record in records if "image" in record] if decodes else ():
        with contextlib.suppress(Exception), Image.open(io.BytesIO(content)) as picture:
            deep += depth_of(content, picture) > 8
            pages += getattr(picture, "n_frames", 1) > 1
    count = len(records)
    lines = [f"{pages} of {count} hold several pictures or pages; the first is used"] * bool(pages)
    lines += [f"{deep} of {count} have more than 8 bits per channel; decoding keeps 8"] * bool(deep)
    return "; ".join(lines)


def sampled(
    source: Source, config: Config, split: str, at_once: int
) -> Iterator[Record | BadRecord]:
    """The first records of some shards, round-robin."""
    plan = PassPlan(config.seed, 0, split, config.data.shuffle, config.data.block_records)
    order = order_of(plan.seed, plan.epoch) if plan.shuffle and split == "train" else None
    shards = source.shards(plan.block_records, order)
    reader = source.for_workers()
    picked = sorted({number * len(shards) // SHARDS for number in range(SHARDS)}) if shards else []
    readers = [
        seeded_reading(
            reader, iter(reader.read(shards[number], None)), plan, Work(number, shards[number])
        )
        for number in picked
    ]
    while readers:
        for records in list(readers):
            part = list(islice(records, at_once))
            yield from part
            if not part:
                readers.remove(records)


def _take(record: Record | BadRecord, seen: Inspection) -> Sample:
    if isinstance(record, BadRecord):
        seen.bad[record.key] = f"read: {record.reason}"
        return Sample(record.key)
    seen.points[0].take(record)
    return Sample(record["key"], copy.deepcopy(record))


def _rows(chain: Chain, group: list[Any], seen: Inspection) -> dict[str, Record]:
    """Key → output of the chain; notes quarantined records, and what would end a run."""
    try:
        columns, report = chain.run(iter(group), 0)
    except (ChainError, UsageError) as error:
        seen.refused = seen.refused or str(error)
        return {}
    for bad in report.bad:
        seen.bad.setdefault(bad.key, bad.reason)
    keys = [str(key) for key in columns.get(KEY_COLUMN, ())]
    if not chain.collate or not columns:
        return {key: row_of(columns, number) for number, key in enumerate(keys)}
    made = [
        {name.removesuffix(HWC_SUFFIX): value for name, value in row.items() if name != "key"}
        for row in records_of(columns[RECORD_COLUMN])
    ]
    return dict(zip(keys, made, strict=True))


def row_of(columns: dict[str, Any], number: int) -> Record:
    found: Record = {}
    for name, column in columns.items():
        if name not in (ID_COLUMN, KEY_COLUMN):
            part = column[number : number + 1]
            found[name.removesuffix(HWC_SUFFIX)] = (
                part.values if isinstance(part, Ragged) else part[0]
            )
    return found
