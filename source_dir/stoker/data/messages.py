"""Every value that crosses a process, in the order of its travel.

source  →  Shard, EpochPlan, Work, Claim  →  chain worker  →  BlockReport  →  coordinator
coordinator  →  StepAssignment  →  train worker  →  DataCursor  →  checkpoint  →  coordinator
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

Record = dict[str, Any]
"""One record: columns by name, and its identity under "key"."""


# What is read


@dataclass(frozen=True)
class Shard:
    """Head → chain worker: what one task reads, of a file or a range of indices."""

    path: str
    start: int = 0
    stop: int = 0
    rows: int | None = None
    """How many records it holds, where that is known without reading it."""
    items: tuple[Any, ...] = ()
    home: str = ""
    """Records of shards with one home come from the same part of the data in every epoch, so what a host
    keeps of them it finds again; empty: they come from anywhere."""
    name: str | None = None
    """What it is called wherever the data lies: it seeds the order of its records. None: its path."""

    @property
    def called(self) -> str:
        return self.path if self.name is None else self.name


@dataclass(frozen=True)
class EpochPlan:
    """Head → chain worker: all that makes one pass over one split what it is."""

    seed: int
    epoch: int
    """Seeds the order and the random transforms."""
    split: str
    shuffle: bool
    block_records: int
    homes: int = 0
    """Into how many parts the records are divided, each of which is permuted by itself; 0: not at all."""


class Work(NamedTuple):
    """Head → chain worker: a shard to read."""

    number: int
    """Its place in the epoch's order."""
    shard: Shard
    skip: int = 0
    """Blocks of its records that were consumed before."""
    store: bool = True
    """Whether the host keeps its records, where records are kept."""


# What a chain worker is given


class Care(NamedTuple):
    """Head → chain worker: what went wrong before."""

    task: str = ""
    """What the head calls this task."""
    attempt: int = 0
    known: Mapping[str, str] = {}
    """Records that are quarantined unread: key → reason."""
    names: bool = False
    """Name each record before it is begun: the same work has hung before."""
    last_try: bool = True
    """What cannot be read now is bad; else the head has it read again elsewhere."""


class Claim(NamedTuple):
    """Head → chain worker: the work behind a ticket."""

    plan: EpochPlan
    work: list[Work]
    care: Care
    wait_s: float = 0.0
    """Wait so long before it is begun: the process has died at it."""
    blocks: int | None = None
    """End after so many blocks with rows."""


class Start(NamedTuple):
    """Coordinator → chain worker: how to begin."""

    wait_s: float
    names: bool
    """Whether to name each record before it is begun."""


# What records become


class BadRecord(NamedTuple):
    """Chain worker: a record that could not be read or preprocessed, and why."""

    key: str
    reason: str
    passing: bool = False
    """Whether it may well be read later, or on another host; it is bad only when that was tried."""


ID_COLUMN = "__id"

KEY_COLUMN = "__key"

HWC_SUFFIX = "__hwc"
"""Marks an image column packed height × width × channels, which the feed views as CHW for nothing."""

TEXT = "text"

OBJECT = "object"


class Column(NamedTuple):
    """Every host: what a column holds for one record."""

    dtype: str
    """NumPy's name of it; "text": strings; "object": anything, as only a batch stage can take it."""
    shape: tuple[int, ...] = ()
    """-1: any: of what goes to a batch stage, and the first number where batches pad the column."""

    @property
    def ragged(self) -> bool:
        """Whether its rows differ in length."""
        return self.shape[:1] == (-1,)

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}" if self.shape else self.dtype


class Pad(NamedTuple):
    """Every host: how a batch pads a column whose rows differ in length."""

    value: float
    multiple: int = 1
    """Of which the length of its rows is one."""


class Schema(NamedTuple):
    """Every host: the columns that all blocks of a split have."""

    columns: dict[str, Column]
    record: str = ""
    """Key of the record that they were found in."""
    pad: Mapping[str, Pad] = {}
    """How batches pad columns whose rows differ in length."""

    def difference(self, other: Schema) -> str:
        """Every host: how rows with other columns differ; empty where they do not."""
        if self.columns == other.columns:
            return ""
        there = f" in record {other.record}" if other.record else ""
        for name, column in self.columns.items():
            found = other.columns.get(name)
            if found != column:
                return f"column {name!r} is {found or 'absent'}{there}, {column} in record {self.record}"
        extra = next(name for name in other.columns if name not in self.columns)
        return f"column {extra!r} is {other.columns[extra]}{there}, absent in record {self.record}"

    def of_records(self) -> Schema:
        """Chain worker: the columns as records have them, before they are packed."""
        own = {
            n.removesuffix(HWC_SUFFIX): c for n, c in self.columns.items() if n not in (ID_COLUMN, KEY_COLUMN)
        }
        return Schema(own, self.record)


# What a chain worker tells


@dataclass
class StageCost:
    """Chain worker: what a stage cost in one block."""

    cpu_s: float = 0.0
    bytes_out: int = 0


@dataclass
class BlockReport:
    """Chain worker → coordinator: what became of the records of one block."""

    shard: int = -1
    """Number of the shard in the epoch's order; -1: the dataset has none."""
    nth: int = 0
    """Which block of the shard's records this is, from 0."""
    last: bool = False
    """Whether the shard ends with it."""
    rows: int = 0
    """Rows that leave the chain."""
    seconds: float = 0.0
    """Wall time of reading and preprocessing."""
    records: int = 0
    id_sum: int = 0
    bad: list[BadRecord] = field(default_factory=list)
    bad_id_sum: int = 0
    bytes_out: int = 0
    costs: dict[str, StageCost] = field(default_factory=dict)
    schemas: tuple[Schema, ...] = ()
    """The columns before each batch stage and, last, of the block; empty where every record is bad."""
    found: int = 0
    """Records that came from the host's cache."""
    kept: int = 0
    """Records that went into it."""
    kept_bytes: int = 0


Origin = tuple[str, int]
"""Where a block comes from: a task, and which of its blocks."""


class Told(NamedTuple):
    """Chain worker → head: what goes with each report."""

    node: str
    usage: tuple[int, int] | None = None
    """Bytes that the host's cache holds and may hold."""


class Failure(NamedTuple):
    """Chain worker → head: why it cannot do its work. An exception itself would lose where it was raised."""

    text: str
    """One line for people."""
    may_pass: bool = False
    """Whether it is worth another try, elsewhere."""
    tries: int = 0
    """How many more times at most, as far as the kind of the error tells."""


# What a train worker is given


class BlockSlice(NamedTuple):
    """Coordinator → train worker: rows start … stop-1 of a block."""

    block: Any
    """Object reference."""
    start: int
    stop: int
    node: str = ""
    """Ray node that holds it; empty: small or unknown, so it comes through Ray."""
    of: int = 0
    """How many rows the block has by its report."""


class Server(NamedTuple):
    """Coordinator → train worker: the block server of a host."""

    agent: Any
    """Handle of the actor that runs it."""
    address: str
    port: int


@dataclass
class StepAssignment:
    """Coordinator → train worker: rows of one step."""

    blocks: list[BlockSlice]
    padded: int = 0
    stop: str = ""
    """Why the run shall stop after this step; empty: it goes on."""
    checkpoint: bool = False
    """Whether a checkpoint shall be written after this step."""
    schema: Schema | None = None
    """Of the split; None: there are no rows."""


# Where a pass stands


class CarriedAccount(BaseModel):
    """Head: what the books of an epoch held for the records that were consumed before."""

    model_config = ConfigDict(frozen=True)

    read: int = 0
    read_ids: int = 0
    trained: int = 0
    used_ids: int = 0
    bad: int = 0
    bad_ids: int = 0
    repeated: int = 0
    """Records trained before the epoch began again: they are trained once more."""


class Plan(BaseModel):
    """Head: what fixes the order of an epoch's records, and of which records."""

    model_config = ConfigDict(frozen=True)

    seed: int
    shuffle: bool
    order: str
    block_records: int
    fingerprint: str
    unstable: str = ""
    """Why the fingerprint does not tell whether the records are the same; empty: it does."""
    homes: int = 0
    """Into how many parts the records are divided, each of which is permuted by itself."""
    bucket_by: str | None = None
    """Column by whose length the rows of a block are ordered."""


class DataCursor(BaseModel):
    """Head: a place inside an epoch, as a checkpoint keeps it."""

    model_config = ConfigDict(frozen=True)

    version: int = 1
    epoch: int
    rows: int = 0
    """Rows consumed of this epoch."""
    plan: Plan
    done: list[tuple[int, int]] = []
    """Shards that are consumed: ranges first … last + 1 of their numbers in the epoch's order, sorted."""
    partial: dict[int, tuple[int, int]] = {}
    """Other shards that were begun: number → (whole blocks, rows of the next block)."""
    by_row: bool = False
    """A dataset without shards: `rows` alone says where it stands."""
    again: bool = False
    """The place cannot be found again: the epoch starts from its beginning."""
    books: CarriedAccount = CarriedAccount()
    deadly: dict[str, str] = {}
    """Training records that were quarantined because they killed their process: key → reason. A run that
    goes on leaves them out as well, so that blocks keep their rows."""
    unvalidated: int | None = None
    """An epoch that was trained but not validated: its validation comes first."""

    def begun(self, shard: int) -> tuple[int, int] | None:
        """(whole blocks, rows of the next block) consumed of a shard; None where all of it is."""
        at = bisect_right(self.done, shard, key=lambda span: span[0]) - 1
        if at >= 0 and shard < self.done[at][1]:
            return None
        return self.partial.get(shard, (0, 0))
