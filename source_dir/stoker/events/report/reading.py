"""Head and laptop: read a run directory for the report; skips missing or truncated data."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stoker.errors import UsageError
from stoker.events.summary import Summary, number, read_summary

Point = tuple[float, float]

MARKS = {
    "checkpoint": "checkpoint",
    "resumed": "resumed",
    "train_worker_lost": "train worker lost:",
    "host_lost": "host lost",
    "host_joined": "host joined",
    "host_released": "host released",
    "cpu_hosts": "CPU hosts requested:",
    "stop": "stop asked",
    "stopped": "stopped",
}

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MOST_PICTURE_CHARACTERS = 450_000
MOST_CLASSES = 30
COLOR = re.compile("#[0-9a-f]{6}")


@dataclass(frozen=True)
class Mark:
    """An event at a point in time."""

    seconds: float
    kind: str
    text: str


class Pictures(NamedTuple):
    """Head and laptop: sample images of a split, as the model gets them."""

    images: list[dict[str, str]]
    """`png` (base64) and `label`; `predicted` (another PNG) if the first one shows the target."""
    legend: list[tuple[str, str]]
    """Class → colour, #rrggbb."""
    epoch: int | None


class Table(NamedTuple):
    """Head and laptop: the values of a metric that is no number."""

    rows: list[str]
    columns: list[str]
    values: list[list[float | None]]
    epoch: int | None


@dataclass
class RunData:
    """The data of one run."""

    run_dir: Path
    summary: Summary
    samples_per_s: list[Point] = field(default_factory=list)
    """(seconds since the start, rate since the last logged step)."""
    input_wait: list[Point] = field(default_factory=list)
    """(seconds since the start, % of the time since the last logged step)."""
    loss: list[Point] = field(default_factory=list)
    """(global step, loss)."""
    metrics: dict[str, list[Point]] = field(default_factory=dict)
    """Name → (global step, value), at the end of each epoch or as a script logs it."""
    tables: dict[str, Table] = field(default_factory=dict)
    """Name of a metric → its last table."""
    marks: list[Mark] = field(default_factory=list)
    epochs: list[Mark] = field(default_factory=list)
    host_cpu: dict[str, list[Point]] = field(default_factory=dict)
    """Host → (seconds since the start, % of its CPUs)."""
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    quarantined: int = 0
    config: str = ""
    origins: dict[str, str] = field(default_factory=dict)
    pictures: dict[str, Pictures] = field(default_factory=dict)
    """Split → its latest sample images."""

    @property
    def name(self) -> str:
        # In a container, every run's directory is /opt/ml/output/data.
        return self.summary.name if self.run_dir.name == "data" else self.run_dir.name


def read_run(run_dir: Path) -> RunData:
    """Head and laptop: read a run directory.

    Raises:
        UsageError: not a run directory, or an unreadable summary.
    """
    path = run_dir / "summary.json"
    if not path.is_file():
        reason = "no summary.json in it" if run_dir.is_dir() else "no such folder; is there no run yet?"
        raise UsageError(f"{run_dir}: not a run directory ({reason})")
    summary = read_summary(path)
    summary.chain = [stage for stage in map(_stage, summary.chain) if stage]
    summary.host_cpu = [row for row in summary.host_cpu if number(row.get("mean_pct")) is not None]
    if number((summary.cost or {}).get("usd")) is None:
        summary.cost = None
    run = RunData(run_dir.resolve(), summary)
    _read_events(run)
    _read_quarantine(run)
    _read_config(run)
    return run


def _stage(stage: dict[str, Any]) -> dict[str, Any] | None:
    """Normalise a stage; None without CPU time, and 0 for unknown bytes."""
    cpu_ms = number(stage.get("cpu_ms_per_sample"))
    if cpu_ms is None:
        return None
    size = number(stage.get("bytes_out")) or 0.0
    name = str(stage.get("stage", "?"))
    return {**stage, "stage": name, "cpu_ms_per_sample": cpu_ms, "bytes_out": size}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Parse a .jsonl file; skips a line that a crash truncated."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError:
        return
    with file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def _read_events(run: RunData) -> None:
    start: float | None = None
    before: tuple[int, float, float, float] | None = None
    for event in _lines(run.run_dir / "events.jsonl"):
        kind, now = event.get("event"), number(event.get("time"))
        if not isinstance(kind, str) or now is None:
            continue
        start = now if start is None else start
        at = now - start
        if kind == "step":
            before = _take_step(run, event, at, before)
        elif kind == "epoch":
            run.epochs.append(_epoch_mark(event, at))
            _take_metrics(run, event)
        elif kind == "metrics":
            _take_metrics(run, event)
        elif kind == "host_cpu" and isinstance(event.get("hosts"), dict):
            for host, percent in event["hosts"].items():
                value = number(percent)
                if value is not None:
                    run.host_cpu.setdefault(str(host), []).append((at, value))
        elif kind == "samples" and isinstance(event.get("images"), list):
            run.pictures["val" if event.get("split") == "val" else "train"] = _pictures(event)
        elif kind == "table" and (table := _table(event)):
            run.tables[str(event.get("name"))] = table
        elif kind in MARKS:
            run.marks.append(Mark(at, kind, _mark_text(kind, event)))


def _mark_text(kind: str, event: dict[str, Any]) -> str:
    if kind == "checkpoint":
        step = number(event.get("step"))
        at = "" if step is None else f" at step {step:.0f}"
        path = event.get("path")
        return f"{MARKS[kind]}{at}" + (f": {Path(path).name}" if isinstance(path, str) else "")
    if kind == "cpu_hosts":
        return f"{event.get('count')} {MARKS[kind]} {event.get('reason')}"
    what = next((event[key] for key in ("host", "cause", "reason", "path") if event.get(key)), "")
    return f"{MARKS[kind]} {what}".strip()


def _pictures(event: dict[str, Any]) -> Pictures:
    """The valid PNG files, limited so that the page stays below a megabyte."""
    found, room = [], MOST_PICTURE_CHARACTERS
    for image in event["images"]:
        if not isinstance(image, dict):
            continue
        files = {name: image[name] for name in ("png", "predicted") if name in image}
        if "png" not in files or not all(map(_is_png, files.values())):
            continue
        if (size := sum(map(len, files.values()))) > room:
            continue
        room -= size
        label = image.get("label")
        found.append({**files, "label": "" if label is None else str(label)[:60]})
    listed = event.get("legend")
    entries = [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
    legend = [(str(e.get("name"))[:40], e["color"]) for e in entries if COLOR.fullmatch(str(e.get("color")))]
    epoch = number(event.get("epoch"))
    return Pictures(found, legend[:MOST_CLASSES], None if epoch is None else int(epoch))


def _table(event: dict[str, Any]) -> Table | None:
    """A whole table; None if it is none."""
    names = [event.get("rows"), event.get("columns")]
    values, epoch = event.get("values"), number(event.get("epoch"))
    if not all(isinstance(part, list) for part in (*names, values)):
        return None
    rows, columns = ([str(name)[:60] for name in part] for part in names if part is not None)
    cells = [[number(cell) for cell in row] for row in values or [] if isinstance(row, list)]
    if not rows or len(cells) != len(rows) or any(len(row) != len(columns) for row in cells):
        return None
    return Table(rows, columns, cells, None if epoch is None else int(epoch))


def _is_png(text: Any) -> bool:
    try:
        return isinstance(text, str) and base64.b64decode(text, validate=True).startswith(PNG_SIGNATURE)
    except ValueError:
        return False


def _take_step(
    run: RunData, event: dict[str, Any], at: float, before: tuple[int, float, float, float] | None
) -> tuple[int, float, float, float] | None:
    """Take one logged step: rates since the previous one in the same epoch."""
    names = ("epoch_samples", "elapsed_s", "wait_s")
    samples, elapsed, wait = (number(event.get(name)) for name in names)
    step, loss = number(event.get("step")), number(event.get("loss"))
    if step is not None and loss is not None:
        run.loss.append((step, loss))
    if samples is None or elapsed is None or wait is None:
        return before
    epoch = int(number(event.get("epoch")) or 0)
    first = before is None or before[0] != epoch
    since = (0.0, 0.0, 0.0) if first or before is None else before[1:]
    seconds = elapsed - since[1]
    if seconds > 0:
        run.samples_per_s.append((at, max(0.0, (samples - since[0]) / seconds)))
        run.input_wait.append((at, min(100.0, max(0.0, 100 * (wait - since[2]) / seconds))))
    return epoch, samples, elapsed, wait


def _epoch_mark(event: dict[str, Any], at: float) -> Mark:
    epoch = number(event.get("epoch"))
    done = "done" if event.get("whole", True) else "in part"
    return Mark(at, "epoch", f"epoch {done}" if epoch is None else f"epoch {epoch + 1:.0f} {done}")


def _take_metrics(run: RunData, event: dict[str, Any]) -> None:
    step, metrics = number(event.get("step")), event.get("metrics")
    if step is None or not isinstance(metrics, dict):
        return
    for name, value in metrics.items():
        found = number(value)
        if found is not None:
            run.metrics.setdefault(str(name), []).append((step, found))


MOST_QUARANTINED = 50


def _read_quarantine(run: RunData) -> None:
    for row in _lines(run.run_dir / "quarantine.jsonl"):
        run.quarantined += 1
        if len(run.quarantine) < MOST_QUARANTINED:
            run.quarantine.append(row)


def _read_config(run: RunData) -> None:
    try:
        text = (run.run_dir / "config.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    lines = text.splitlines()
    for line in lines:
        # The header names the origin of each value: `# "train.lr": "command line"`.
        if line.startswith('# "'):
            try:
                run.origins.update(json.loads("{" + line[2:] + "}"))
            except ValueError:
                continue
    run.config = "\n".join(line for line in lines if not line.startswith("#"))
