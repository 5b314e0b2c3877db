"""Every value that crosses a process boundary, in order of travel.

source  →  Shard, PassPlan, Work, Claim  →  chain worker  →  BlockReport  →  service
service  →  StepAssignment  →  train worker  →  DataCursor  →  checkpoint  →  service
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

Record = dict[str, Any]
"""One record: columns by name, plus its identity under "key"."""
StepKey = tuple[int, bool, int]
"""(epoch, whether in the validation that follows its training, first batch of the step in its pass)."""
BlockPlace = tuple[int, int]
"""Number of a shard in its pass, and number of a block in the shard."""


# What is read


@dataclass(frozen=True)
class Shard:
    """Head → chain worker: the part of a file, or range of indices, that one task reads."""

    path: str
    start: int = 0
    stop: int = 0
    rows: int | None = None
    """Number of records, if known without reading it."""
    items: tuple[Any, ...] = ()
    home: str = ""
    """Shards with the same home read the same part of the data in every epoch, so a host finds their records
    in its cache again. Empty: their records come from anywhere."""
    name: str | None = None
    """Location-independent name that seeds the order of its records. None: use its path."""

    @property
    def called(self) -> str:
        return self.path if self.name is None else self.name


@dataclass(frozen=True)
class PassPlan:
    """Head → chain worker: everything that defines one pass over one split."""

    seed: int
    epoch: int
    """Seeds the order and the random transforms."""
    split: str
    shuffle: bool
    block_records: int
    homes: int = 0
    """Number of parts that the records are divided into and permuted within; 0: not divided."""
    exact: bool = False
    """Whether blocks are delivered in the order of their shards; then each is the same if it is made again."""

    @property
    def alike(self) -> str:
        """Names passes whose blocks take about as long: those of a split, or of a loader."""
        return self.split.partition("/")[0]


class Work(NamedTuple):
    """Head → chain worker: a shard to read."""

    number: int
    """Position in the epoch's order."""
    shard: Shard
    skip: int = 0
    """Number of its blocks that were already consumed."""
    store: bool = True
    """Whether the host caches its records, if caching is on."""
    stop: int | None = None
    """Index of the first block not to make; None: all are made."""


# What a chain worker is given


class RetryContext(NamedTuple):
    """Head → chain worker: what earlier tries at this work ran into."""

    task: str = ""
    """The head's name for this task."""
    known: Mapping[str, str] = {}
    """Records to quarantine without reading them: key → reason."""
    names: bool = False
    """Report each record before starting it, because the same work has hung before."""
    last_try: bool = True
    """Quarantine what cannot be read now; otherwise the head retries it on another host."""


class Claim(NamedTuple):
    """Service → chain worker: what to make."""

    number: int
    """Tells it from all other claims; reports on one that was taken back are refused."""
    plan: PassPlan
    work: list[Work]
    care: RetryContext
    wait_s: float = 0.0
    """Wait this long before starting, because the process died at this work."""


class Process(NamedTuple):
    """Chain worker → service: who calls."""

    worker: str
    """Id of its actor, which Ray restarts as it is."""
    node: str
    token: str
    """Another one in each process of the actor."""


class SplitSetup(NamedTuple):
    """Service → chain worker: how to open a split."""

    reference: Any
    """Ray's reference of its Setup."""
    needed: frozenset[str]
    """The splits that may be claimed again; others that it has open go."""
    where: Any = None
    """Of a script's loader: where and how it runs in this pass, packed."""


class Reply(NamedTuple):
    """Service → chain worker: what comes next."""

    claim: Claim | None = None
    setup: SplitSetup | None = None
    """For a claim of a split that it does not have open."""
    go_on: bool = True
    """Whether to continue with the work, or with the lease."""
    unused: Sequence[str] = ()
    """Blocks on its host that nobody needs any more: it removes them."""
    wait_s: float = 0.0


# What records become


class BadRecord(NamedTuple):
    """Chain worker: a record that could not be read or preprocessed, and why."""

    key: str
    reason: str
    passing: bool = False
    """Whether the failure may be transient; the record counts as bad only after retries elsewhere."""
    name: str = ""
    """By what it is refused, if not by its key."""
    place: int = -1
    """Records before it in its block; -1: not known, or rows have another order."""

    @property
    def called(self) -> str:
        return self.name or self.key


ID_COLUMN, KEY_COLUMN = "__id", "__key"

HWC_SUFFIX = "__hwc"
"""Marks an image column packed height × width × channels; the feed turns it into CHW without a copy."""

RECORD_COLUMN = "__record"

TEXT, OBJECT = "text", "object"


class Column(NamedTuple):
    """Every host: dtype and shape of a column in one record."""

    dtype: str
    """NumPy dtype name; "text": strings; "object": any object, which only a batch stage accepts."""
    shape: tuple[int, ...] = ()
    """-1: any length. Used before a batch stage, and as the first dimension of a padded column."""

    @property
    def ragged(self) -> bool:
        return self.shape[:1] == (-1,)

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}" if self.shape else self.dtype


class Pad(NamedTuple):
    """Every host: how batches pad a column whose rows differ in length."""

    value: float
    multiple: int = 1
    """Round the padded length up to a multiple of this."""


class Schema(NamedTuple):
    """Every host: the columns that all blocks of a split have."""

    columns: dict[str, Column]
    record: str = ""
    """Key of the record that the columns were found in."""
    pad: Mapping[str, Pad] = {}

    def difference(self, other: Schema) -> str:
        """Every host: how the columns of other rows differ; empty if they match."""
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
        """Chain worker: the columns of the records before packing."""
        own = {
            n.removesuffix(HWC_SUFFIX): c
            for n, c in self.columns.items()
            if n not in (ID_COLUMN, KEY_COLUMN)
        }
        return Schema(own, self.record)


# What a chain worker reports


@dataclass
class StageCost:
    """Chain worker: cost of one stage for one block."""

    cpu_s: float = 0.0
    bytes_out: int = 0
    random: bool = True
    """False: each record has the same result in every epoch, so it may be cached."""


@dataclass
class BlockReport:
    """Chain worker → service: what happened to the records of one block."""

    shard: int = -1
    """Position of the shard in the epoch's order; -1: a stream is still being read again up to its place."""
    nth: int = 0
    """Index of this block within the shard, from 0."""
    last: bool = False
    rows: int = 0
    """Rows that left the chain."""
    seconds: float = 0.0
    """Wall time of reading and preprocessing."""
    records: int = 0
    id_sum: int = 0
    bad: list[BadRecord] = field(default_factory=list)
    bad_id_sum: int = 0
    bytes_out: int = 0
    own: bool = False
    """Whether it depends on the rank that wanted it."""
    digest: int = 0
    """Of its columns, if the order is exact."""
    costs: dict[str, StageCost] = field(default_factory=dict)
    schemas: tuple[Schema, ...] = ()
    """Columns before each batch stage and, last, of the block; empty if every record is bad."""
    found: int = 0
    """Records read from the host's cache, and written to it."""
    kept: int = 0
    kept_bytes: int = 0


class Made(NamedTuple):
    """Chain worker → service: a block, and where it is."""

    report: BlockReport
    file: str = ""
    """Name of the block in its host's folder; empty: it has no rows."""
    cache_usage: tuple[int, int] | None = None
    """Size and limit of the host's cache in bytes."""


# What a train worker is given


class BlockSlice(NamedTuple):
    """Service → train worker: rows start … stop-1 of a block."""

    block: str
    """Name of the block's file."""
    start: int
    stop: int
    node: str = ""
    """Ray node that holds it; empty: it was lost, and is being made again."""
    of: int = 0
    """Rows in the block, according to its report."""


class Server(NamedTuple):
    """Service → train worker: the block server of a host."""

    agent: Any
    address: str
    port: int


class Directory(NamedTuple):
    """Service → consumers: where blocks are served."""

    run: str
    """Names the folders of the run's blocks."""
    secret: bytes
    servers: dict[str, Server]
    """By Ray node; none if the head is the only one."""


@dataclass
class StepAssignment:
    """Service → train worker: the rows of one step."""

    blocks: list[BlockSlice]
    padded: int = 0
    schema: Schema | None = None
    """Schema of the split; None: there are no rows."""


# Where a pass stands


class CarriedAccount(BaseModel):
    """Head: account of the records of an epoch that an earlier run consumed."""

    model_config = ConfigDict(frozen=True)

    read: int = 0
    read_ids: int = 0
    trained: int = 0
    used_ids: int = 0
    bad: int = 0
    bad_ids: int = 0
    repeated: int = 0
    """Records trained before the epoch restarted and therefore trained again."""


class Plan(BaseModel):
    """Head: what determines which records an epoch has and their order."""

    model_config = ConfigDict(frozen=True)

    seed: int
    shuffle: bool
    order: str
    block_records: int
    fingerprint: str
    validation: str | None = None
    """The same of the validation split; empty: there is none; None: not compared."""
    homes: int = 0
    bucket_by: str | None = None
    """Column whose length orders the rows of a block."""
    cache_share: float | None = None
    """Share of the records that are cached; None: no cache."""


class DataCursor(BaseModel):
    """Head: a position inside an epoch, as saved in a checkpoint."""

    model_config = ConfigDict(frozen=True)

    epoch: int
    rows: int = 0
    """Rows of this epoch consumed so far."""
    plan: Plan
    done: list[tuple[int, int]] = []
    """Fully consumed shards: sorted ranges first … last + 1 of positions in the epoch's order."""
    partial: dict[int, tuple[int, int]] = {}
    """Partly consumed shards: number → (whole blocks, rows of the next block)."""
    quarantined: dict[int, dict[str, str]] = {}
    """The bad records of those next blocks, name → reason: they stay bad, or the rows would move."""
    digests: dict[int, int] = {}
    """The digests of those next blocks, if the order is exact."""
    by_row: bool = False
    """The dataset has no shards: `rows` alone is the position."""
    again: bool = False
    """The position cannot be restored: the epoch restarts from its beginning."""
    books: CarriedAccount = CarriedAccount()
    deadly: dict[str, str] = {}
    """Records that killed their process: key → reason. A resumed run skips them: blocks stay equal."""
    unvalidated: int | None = None
    """Epoch that was trained but not validated: its validation runs first."""

    def begun(self, shard: int) -> tuple[int, int] | None:
        """(whole blocks, rows of the next block) consumed of a shard; None if all of it is."""
        at = bisect_right(self.done, shard, key=lambda span: span[0]) - 1
        if at >= 0 and shard < self.done[at][1]:
            return None
        return self.partial.get(shard, (0, 0))
