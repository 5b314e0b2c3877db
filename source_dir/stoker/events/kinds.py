"""Anywhere: the events of a run, one class for each kind; docs/events.md describes their fields.

    StepLogged(epoch=0, step=10, …).record()      # a line of events.jsonl
    event_of(record)                              # the event of a line

A kind or a field of a later version is kept as it is: `event_of` returns an `Event` of that kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from time import time
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator

MetricValues = dict[str, float | None]


KINDS: dict[str, type[Event]] = {}
KIND = re.compile(r'\{"time": [^",]+, "event": "(\w+)"')
"""The kind in a line as `Event.record` leads it."""


def now() -> float:
    return round(time(), 3)


class Event(BaseModel):
    """What happened, and when; also one of a kind that this version does not know."""

    model_config = ConfigDict(extra="allow", frozen=True)
    of_class: ClassVar[str] = ""

    time: FiniteFloat = Field(default_factory=now)
    event: str = Field("", validate_default=True)

    def __init_subclass__(cls, kind: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if kind:
            cls.of_class, KINDS[kind] = kind, cls

    @field_validator("event")
    @classmethod
    def _known(cls, event: str) -> str:
        return cls.of_class or event

    def received(self) -> Self:
        """The event at the time of this host, because the clocks of hosts differ."""
        return self.model_copy(update={"time": now()})

    def values(self) -> dict[str, Any]:
        """The fields that were given, without time and kind."""
        return self.model_dump(exclude_unset=True, exclude={"time", "event"}, by_alias=True)

    def record(self) -> dict[str, Any]:
        return {"time": self.time, "event": self.event, **self.values()}


class AttemptStarted(Event, kind="attempt"):
    workers: int
    start: dict[str, Any]
    ahead: bool = False


class PhaseDone(Event, kind="phase"):
    phase: str


class DriverStarted(Event, kind="driver"):
    """Of a Ray script, whose own trainer starts the train workers."""


class TrainWorkerStarted(Event, kind="train_worker"):
    rank: int
    node: str


class RowsGiven(Event, kind="given"):
    """Which rows of which blocks train workers got in the batches of a training pass."""

    epoch: int
    before: int
    """Optimiser steps of the run before this pass of the attempt."""
    given: list[list[int]]
    """Batch of the pass, rank, then of each slice: shard, block in it, its ids, first row, end."""


class OfPass(Event):
    split: str
    epoch: int


class PassProduced(OfPass, kind="produced"):
    """All of its blocks have arrived."""


class StepLogged(Event, kind="step"):
    epoch: int
    step: int
    loss: float
    lr: float
    grad_norm: float | None = None
    epoch_samples: int
    elapsed_s: float
    wait_s: float
    first_wait_s: float = 0.0
    longest_wait_s: float = 0.0
    batches: int = 0
    terms_ms: dict[str, float] = {}


class PassEnded(OfPass, kind="pass"):
    samples: int
    steps: int
    elapsed_s: float
    step_ms: list[float]
    times: dict[str, float]


class EpochEnded(Event, kind="epoch"):
    epoch: int
    step: int
    metrics: MetricValues
    whole: bool = True


class MetricTable(Event, kind="table"):
    epoch: int | None = None
    step: int = 0
    name: str
    rows: list[str]
    columns: list[str]
    cells: list[list[float | None]] = Field(alias="values")


class MetricsLogged(Event, kind="metrics"):
    step: int
    is_step: bool = True
    """False: it counts reports of a Ray script's trainer."""
    metrics: MetricValues
    rank: int = 0


class LoaderProgress(Event, kind="loader"):
    loader: int
    rank: int
    steps: int
    samples: int = 0
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    longest_wait_s: float = 0.0


class RecordsCounted(OfPass, kind="records"):
    read: int = 0
    quarantined: int = 0
    repeated: int = 0


class RecordQuarantined(OfPass, kind="quarantined"):
    key: str
    reason: str


class CheckpointWritten(Event, kind="checkpoint"):
    path: str
    epoch: int
    step: int
    seconds: float | None = None
    paused_s: float | None = None
    run: str | None = None
    """As in its meta: several runs may write to one folder."""


class Resumed(Event, kind="resumed"):
    path: str
    epoch: int
    step: int
    validate_only: int | None = Field(None, alias="validate")


class ModelWritten(Event, kind="model"):
    path: str
    checkpoint: str
    epoch: int
    step: int
    whole: bool
    metric: str | None = None
    value: float | None = None


class ExportWritten(Event, kind="export"):
    format: str
    path: str
    error: str | None = None
    max_abs_diff: float | None = None
    batch_sizes: list[int] = []
    note: str = ""


class HostCacheUse(BaseModel):
    records: int
    found: int
    bytes: int
    limit_bytes: int


class CacheUsed(OfPass, kind="cache"):
    kind: str
    records: int
    found: int
    kept: int
    kept_bytes: int
    hosts: dict[str, HostCacheUse]


class HostCpu(Event, kind="host_cpu"):
    hosts: dict[str, float]
    gpus: dict[str, list[float]] = {}
    """By host, the utilization of each of its GPUs, where they can be measured."""


class HostChanged(Event):
    host: str
    group: str = ""
    node: str = ""


class HostLost(HostChanged, kind="host_lost"):
    """A host is gone that was not to go."""


class HostJoined(HostChanged, kind="host_joined"):
    """After the start."""


class HostReleased(HostChanged, kind="host_released"):
    """A host is gone that was no longer requested."""


class TrainWorkerLost(Event, kind="train_worker_lost"):
    cause: str
    restarts_left: int


class Recovered(Event, kind="recovered"):
    seconds: float
    data_s: float


class WorkRepeated(Event, kind="work_repeated"):
    split: str
    work: Any


class CpuHostsRequested(Event, kind="cpu_hosts"):
    count: int
    reason: str


class HostsClosing(Event, kind="closing"):
    nodes: list[str]


class Note(Event, kind="note"):
    text: str


class Printed(Event, kind="print"):
    text: str


class StopRequested(Event, kind="stop"):
    reason: str


class Stopped(Event, kind="stopped"):
    reason: str


class Completed(Event, kind="complete"):
    """Training has ended and the model is written."""


class ScriptOutput(Event, kind="output"):
    """Goes to logs/script-rank-N.log instead of events.jsonl."""

    rank: int
    text: str


class RecordIds(OfPass, kind="record_ids"):
    """Goes to `records/` instead of events.jsonl."""

    rank: int
    keys: list[Any]


Kinds = type[Event] | tuple[type[Event], ...]


def event_of(record: dict[str, Any]) -> Event:
    return KINDS.get(str(record.get("event")), Event).model_validate(record)


def read_events(path: Path, of: Kinds = Event, every: int = 1) -> Iterator[Event]:
    """The events of a file, as far as they can be read: a kill may cut a line, to which a restart appends."""
    for record in json_lines(path, of, every):
        with suppress(ValidationError):
            if isinstance(event := event_of(record), of):
                yield event


def json_lines(path: Path, of: Kinds = Event, every: int = 1) -> Iterator[dict[str, Any]]:
    """The objects in a .jsonl file, without lines that a crash cut; nothing if there is no such file.

    Args:
        of: leave out lines that are events of other kinds, as their beginnings tell.
        every: take one in so many lines.
    """
    for line in islice(lines(path, of), 0, None, every):
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(line), dict):
                yield found


def lines(path: Path, of: Kinds) -> Iterator[str]:
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError:
        return
    others = {kind for kind, known in KINDS.items() if not issubclass(known, of)}
    with file:
        yield from (line for line in file if not ((told := KIND.match(line)) and told[1] in others))
