"""Anywhere: the events of a run, one class for each kind; docs/events.md describes their fields.

    StepLogged(epoch=0, step=10, …).record()      # a line of events.jsonl
    event_of(record)                              # the event of a line

A kind or a field of a later version is kept as it is: `event_of` returns an `Event` of that kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import time as now
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Split = Literal["train", "val"]
Metrics = dict[str, float | None]


class Event(BaseModel):
    """What happened, and when; also one of a kind that this version does not know."""

    model_config = ConfigDict(extra="allow", frozen=True)

    time: float = Field(default_factory=lambda: round(now(), 3))
    event: str

    def values(self) -> dict[str, Any]:
        """The fields that were given, without time and kind."""
        return self.model_dump(exclude_unset=True, exclude={"time", "event"}, by_alias=True)

    def record(self) -> dict[str, Any]:
        """The event as a line of events.jsonl."""
        return {"time": self.time, "event": self.event, **self.values()}


class AttemptStarted(Event):
    event: Literal["attempt"] = "attempt"
    workers: int
    start: dict[str, Any]
    ahead: bool = False


class PhaseDone(Event):
    event: Literal["phase"] = "phase"
    phase: str


class TrainWorkerStarted(Event):
    event: Literal["train_worker"] = "train_worker"
    rank: int
    node: str


class BlocksArrived(Event):
    event: Literal["blocks"] = "blocks"
    epoch: int
    blocks: list[list[int]]


class PassProduced(Event):
    event: Literal["produced"] = "produced"
    split: str
    epoch: int


class StepLogged(Event):
    event: Literal["step"] = "step"
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
    terms_ms: dict[str, float] = {}


class PassEnded(Event):
    event: Literal["pass"] = "pass"
    split: str
    epoch: int
    samples: int
    steps: int
    elapsed_s: float
    step_ms: list[float]
    times: dict[str, float]


class EpochEnded(Event):
    event: Literal["epoch"] = "epoch"
    epoch: int
    step: int
    metrics: Metrics
    whole: bool = True


class MetricTable(Event):
    event: Literal["table"] = "table"
    epoch: int | None = None
    step: int = 0
    name: str
    rows: list[str]
    columns: list[str]
    cells: list[list[float | None]] = Field(alias="values")


class MetricsLogged(Event):
    event: Literal["metrics"] = "metrics"
    step: int
    metrics: Metrics
    rank: int = 0


class LoaderProgress(Event):
    event: Literal["loader"] = "loader"
    loader: int
    rank: int
    steps: int
    samples: int = 0
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    longest_wait_s: float = 0.0


class RecordsCounted(Event):
    event: Literal["records"] = "records"
    split: str
    epoch: int
    read: int = 0
    quarantined: int = 0
    repeated: int = 0


class RecordQuarantined(Event):
    event: Literal["quarantined"] = "quarantined"
    split: str
    epoch: int
    key: str
    reason: str


class CheckpointWritten(Event):
    event: Literal["checkpoint"] = "checkpoint"
    path: str
    epoch: int
    step: int
    seconds: float | None = None
    paused_s: float | None = None


class Resumed(Event):
    event: Literal["resumed"] = "resumed"
    path: str
    epoch: int
    step: int
    validate_only: int | None = Field(None, alias="validate")


class ModelWritten(Event):
    event: Literal["model"] = "model"
    path: str
    checkpoint: str
    epoch: int
    step: int
    whole: bool
    metric: str | None = None
    value: float | None = None


class ExportWritten(Event):
    event: Literal["export"] = "export"
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


class CacheUsed(Event):
    event: Literal["cache"] = "cache"
    split: str
    epoch: int
    kind: str
    records: int
    found: int
    kept: int
    kept_bytes: int
    hosts: dict[str, HostCacheUse]


class HostCpu(Event):
    event: Literal["host_cpu"] = "host_cpu"
    hosts: dict[str, float]


class HostChanged(Event):
    host: str
    group: str = ""
    node: str = ""


class HostLost(HostChanged):
    event: Literal["host_lost"] = "host_lost"


class HostJoined(HostChanged):
    event: Literal["host_joined"] = "host_joined"


class HostReleased(HostChanged):
    event: Literal["host_released"] = "host_released"


class TrainWorkerLost(Event):
    event: Literal["train_worker_lost"] = "train_worker_lost"
    cause: str
    restarts_left: int


class Recovered(Event):
    event: Literal["recovered"] = "recovered"
    seconds: float
    data_s: float


class WorkRepeated(Event):
    event: Literal["work_repeated"] = "work_repeated"
    split: str
    work: Any


class CpuHostsRequested(Event):
    event: Literal["cpu_hosts"] = "cpu_hosts"
    count: int
    reason: str


class HostsClosing(Event):
    event: Literal["closing"] = "closing"
    nodes: list[str]


class Note(Event):
    event: Literal["note"] = "note"
    text: str


class Printed(Event):
    event: Literal["print"] = "print"
    text: str


class StopRequested(Event):
    event: Literal["stop"] = "stop"
    reason: str


class Stopped(Event):
    event: Literal["stopped"] = "stopped"
    reason: str


class Completed(Event):
    event: Literal["complete"] = "complete"


class ScriptOutput(Event):
    """Goes to logs/script-rank-N.log instead of events.jsonl."""

    event: Literal["output"] = "output"
    rank: int
    text: str


class RecordIds(Event):
    """Goes to `records/` instead of events.jsonl."""

    event: Literal["record_ids"] = "record_ids"
    split: str
    epoch: int
    rank: int
    keys: list[Any]


KINDS: dict[str, type[Event]] = {
    kind.model_fields["event"].default: kind
    for kind in [*Event.__subclasses__(), *HostChanged.__subclasses__()]
    if kind is not HostChanged
}


def event_of(record: dict[str, Any]) -> Event:
    return KINDS.get(str(record.get("event")), Event).model_validate(record)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, as far as they can be read: a kill may cut a line, to which a restart appends."""
    for record in json_lines(path):
        try:
            yield event_of(record)
        except ValidationError:
            continue


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a .jsonl file, without lines that a crash cut; nothing if there is no such file."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError:
        return
    with file:
        for line in file:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found
