"""Head: summary.json, the result of a run for people and programs."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from stoker.config.redaction import scrubbed
from stoker.errors import UsageError

MOST_ROWS, MOST_EVENTS = 2000, 200
"""Most passes in summary.json, and events of each kind: the last ones."""
COUNTS = ("read", "quarantined", "remainder", "repeated", "trained", "validated")

Status = Literal["running", "succeeded", "failed", "interrupted"]
Bottleneck = Literal["gpu", "cpu", "network", "gpu_host_cpu", "lost_hosts", "one_wait", "late"]
STEP_TERMS = ("wait_production", "wait_transfer", "wait_collate", "host_to_device", "compute")
"""Terms of a step's time: waiting for blocks to be produced, transferred, and assembled into a batch;
copying the batch to the device; and training."""


def mode_of(metric: str, modes: Mapping[str, str]) -> str | None:
    """min or max: as `modes` says of the metric, or of the one with several values to which it belongs; min
    for a name that ends in "loss". None: not known, so that no value is best.
    """
    whole = "/".join(metric.split("/")[:2])
    return modes.get(metric) or modes.get(whole) or ("min" if metric.endswith("loss") else None)


class SummaryPart(BaseModel):
    model_config = ConfigDict(extra="allow")


class Host(SummaryPart):
    host: str
    group: str
    cpus: float
    gpus: float
    ip: str
    type: str | None = None
    """Instance type; None if unknown, as on a laptop."""
    node_id: str = ""
    """Id of its Ray node."""
    scaled: bool = False
    """Whether the cluster's autoscaler added it."""
    since: float = 0.0
    """When it was first seen, in seconds since 1970."""
    until: float | None = None
    """When it was found to be gone; None: it was there to the end."""


class Cluster(SummaryPart):
    hosts: list[Host] = []
    """All that were there at any time."""
    formed_s: float = 0.0

    def at_once(self) -> list[Host]:
        """The most hosts that were there at the same time: a lost one and its replacement count once."""
        came = sorted(host.since for host in self.hosts)
        gone = sorted(host.until for host in self.hosts if host.until is not None)
        moments = [host.since for host in self.hosts]
        most = max(
            moments, key=lambda at: bisect_right(came, at) - bisect_right(gone, at), default=0.0
        )
        return [h for h in self.hosts if h.since <= most and (h.until is None or h.until > most)]


class Records(SummaryPart):
    read: int = 0
    """Records of the passes that have begun, including those left unread by a limit or an interruption."""
    trained: int = 0
    quarantined: int = 0
    remainder: int = 0
    repeated: int = 0
    """How often records were trained again within an epoch."""
    validated: int = 0
    epochs: list[dict[str, Any]] = []
    """By pass; in summary.json the last MOST_ROWS."""
    dropped: int = 0
    """Number of passes before these."""

    def add(self, counts: dict[str, Any]) -> None:
        """Add the books of one pass over one split; they replace those of an earlier attempt at it."""
        split, epoch = counts["split"], counts["epoch"]
        tail = list(takewhile(lambda row: row["epoch"] >= epoch, reversed(self.epochs)))
        if any((row["split"], row["epoch"]) == (split, epoch) for row in tail):
            stays = [row for row in tail if row["epoch"] == epoch and row["split"] < split]
            self.epochs = [*self.epochs[: -len(tail)], *stays]
            self._count(self.epochs, anew=True)
        self.epochs.append(counts)
        self._count([counts])

    @property
    def verb(self) -> str:
        """What all of them were: read; or only planned, if a pass ended early."""
        return "read" if all(counts.get("whole", True) for counts in self.epochs) else "planned"

    def rewind(self, epoch: int, validate: int | None = None) -> None:
        """Drop the passes from an epoch on, because training restarts from a checkpoint before them.

        An epoch that ended early stays until its end is trained: the checkpoint is that of its last step.
        """
        early = {row["epoch"] for row in self.epochs if not row.get("whole", True)}
        self.epochs = [
            row
            for row in self.epochs
            if (row["epoch"] < epoch or row["epoch"] in early)
            and (row["split"], row["epoch"]) != ("val", validate)
        ]
        self._count(self.epochs, anew=True)

    def _count(self, rows: list[dict[str, Any]], anew: bool = False) -> None:
        for name in COUNTS:
            counted = [row for row in rows if row["split"] == "train" or name == "validated"]
            before = 0 if anew else getattr(self, name)
            setattr(self, name, before + sum(row.get(name, 0) for row in counted))


class Speed(SummaryPart):
    samples_per_s: float = 0.0
    steady_samples_per_s: float = 0.0
    input_wait_pct: float = 0.0
    steps: int = 0
    """Number of steps that these figures cover, as do the three below."""
    batches: int = 0
    first_wait_s: float = 0.0
    """The input wait for the first batch of each pass."""
    longest_wait_s: float = 0.0
    """The longest input wait for one batch."""
    step_ms_p50: float = 0.0
    """Median of the last 10,000 steps."""
    step_terms_ms: dict[str, float] = {}
    """Mean ms per batch by STEP_TERMS, as far as each delayed training; they add up to its time."""
    bytes_per_sample: float = 0.0
    first_step_s: float | None = None
    """Seconds from the start of the process on the head to the end of the first step."""


class Metrics(SummaryPart):
    last: dict[str, float] = {}
    best: dict[str, float] = {}
    modes: dict[str, str] = {}
    """min or max, for metrics of which the configuration or torchmetrics says what is better."""

    def take(self, metrics: dict[str, Any], competes: bool = True) -> None:
        """Add an epoch's metrics; values that are not finite numbers do not count.

        `competes`: whether it may be best, because the model may be of this epoch.
        """
        self.last = finite(metrics)
        for name, value in self.last.items() if competes else ():
            mode = mode_of(name, self.modes) if name.startswith(("val/", "train/")) else None
            if mode is not None:
                pick = min if mode == "min" else max
                self.best[name] = pick(self.best.get(name, value), value)


MEASURED = (
    *("started", "startup", "speed", "bottleneck", "chain", "operators", "cache", "cluster"),
    *("train_workers", "chain_tasks_by_host", "train_workers_by_host", "host_cpu", "host_gpus"),
)
"""Fields of a summary that describe how a start trained, and on which hosts."""
SUMS_OF_COST = ("usd", "cpu_host_hours")
TRAINED = ("steps", "epochs", "records", "metrics")
"""Fields that cover all starts of a run; a start that finds its checkpoint fills them in itself."""


class Summary(BaseModel):
    """The contract of summary.json, version 2. Version 1 called the place `backend`."""

    model_config = ConfigDict(populate_by_name=True)

    version: int = Field(2, alias="schema")
    name: str = ""
    script: str | None = None
    """The user's own training script; None for a recipe."""
    args: list[str] = []
    """Its arguments."""
    status: Status = "running"
    error: str | None = None
    place: str = Field("local", validation_alias=AliasChoices("place", "backend"))
    started: str = ""
    """When its first start began."""
    seconds: float = 0.0
    """Duration of all starts, without the pauses between them."""
    earlier_s: float = 0.0
    """The part of `seconds` before the last start."""
    earlier_cost: dict[str, Any] | None = None
    """`cost` of the starts before the last one; None: not known."""
    steps: int = 0
    epochs: int = 0
    train_workers: int = 0
    cluster: Cluster = Cluster()
    startup: dict[str, float] = {}
    """Seconds from the start of the head's process to the end of each phase of the start."""
    records: Records = Records()
    speed: Speed = Speed()
    chain: list[dict[str, Any]] = []
    operators: list[dict[str, Any]] = []
    """Ray Data's operators: name, tasks, rows, bytes, cpu_s, wall_s."""
    chain_tasks_by_host: dict[str, int] = {}
    train_workers_by_host: dict[str, int] = {}
    metrics: Metrics = Metrics()
    bottleneck: Bottleneck | None = None
    host_cpu: list[dict[str, Any]] = []
    """Per host: host, group, mean_pct and max_pct of all its CPUs during training."""
    host_gpus: list[dict[str, Any]] = []
    """Per host whose GPUs could be measured: host, samples, and for each GPU its highest utilization."""
    cache: dict[str, Any] | None = None
    """Cache across epochs: kind; hit_pct of the last training pass; per host: host, bytes, limit_bytes and
    hit_pct of that pass. None without data.cache, or before the end of the first pass."""
    cost: dict[str, Any] | None = None
    model: str | None = None
    model_from: dict[str, Any] | None = None
    """The checkpoint that became the model: its name, epoch (from 1) and step, and the metric, mode and value
    that chose it; without those it is the newest."""
    tracking: dict[str, Any] = {}
    """Where to find the run elsewhere: mlflow.run_id, mlflow.url, …"""
    exports: list[dict[str, Any]] = []
    """Exported models: format, path below `model/`, max_abs_diff to the model, error."""
    events: list[dict[str, Any]] = []
    """Those of note, the last MOST_EVENTS of each kind."""
    event_counts: dict[str, int] = {}
    """How many there were, by kind."""

    def keep(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        self.event_counts[kind] = self.event_counts.get(kind, 0) + 1
        self.events.append(event)
        if self.event_counts[kind] > MOST_EVENTS:
            self.events.remove(next(old for old in self.events if old["event"] == kind))

    def notable(self) -> Counter[str]:
        """How many events of note there were, by kind."""
        kept: Counter[str] = Counter(each["event"] for each in self.events)
        return kept | Counter(self.event_counts)

    def host_of(self, node: str) -> str:
        names = {host.node_id: host.host for host in self.cluster.hosts}
        return names.get(node, node)

    def measured_by(self, earlier: Summary) -> dict[str, Any]:
        """The figures of an earlier start of the run, for one that trains no step."""
        names = MEASURED if self.steps else (*MEASURED, *TRAINED)
        written = {done["format"] for done in self.exports}
        valid = [
            done
            for done in earlier.exports
            if not done.get("error") and done.get("format", "") not in {"", *written}
        ]
        cost = self.cost  # its sums cover all starts, and it has no rate of training
        if cost and earlier.cost:
            cost = earlier.cost | {name: cost[name] for name in SUMS_OF_COST if name in cost}
        kept = {name: getattr(earlier, name) for name in names}
        return {"exports": [*valid, *self.exports], "cost": cost or earlier.cost} | kept

    def write(self, run_dir: Path) -> None:
        draft = run_dir / ".summary.json"
        records = self.records
        kept = {
            "epochs": records.epochs[-MOST_ROWS:],
            "dropped": records.dropped + max(len(records.epochs) - MOST_ROWS, 0),
        }
        shown = self.model_copy(update={"records": records.model_copy(update=kept)})
        content = scrubbed(json.loads(shown.model_dump_json(by_alias=True)))
        draft.write_text(json.dumps(content, indent=1, ensure_ascii=False))
        draft.replace(run_dir / "summary.json")


def finite(values: dict[str, Any]) -> dict[str, float]:
    """JSON has no NaN, and NaN does not compare."""
    return {name: value for name, value in values.items() if number(value) is not None}


def number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


def read_summary(path: Path) -> Summary:
    """Read a summary.json; null and non-finite values count as not measured."""
    try:
        return Summary.model_validate(_without_nulls(json.loads(path.read_text(encoding="utf-8"))))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: cannot be read: {where}: {first['msg']}") from None
    except (OSError, ValueError, RecursionError) as error:
        text = str(getattr(error, "strerror", None) or error).splitlines()[0]
        raise UsageError(f"{path}: cannot be read: {text}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        below = {key: _without_nulls(inner) for key, inner in value.items()}
        return {key: inner for key, inner in below.items() if inner is not None}
    if isinstance(value, list):
        return [inner for inner in map(_without_nulls, value) if inner is not None]
    return None if isinstance(value, float) and not math.isfinite(value) else value
