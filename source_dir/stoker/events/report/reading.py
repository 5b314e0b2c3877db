"""Head and laptop: read a run directory for the report; skips missing or truncated data."""

from __future__ import annotations

import base64
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stoker.errors import UsageError
from stoker.events import kinds
from stoker.events.summary import Summary, finite, number, read_summary

Point = tuple[float, float]

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MOST_PICTURE_CHARACTERS = 450_000
MOST_CLASSES = 30
COLOR = re.compile("#[0-9a-f]{6}")


@dataclass(frozen=True)
class Mark:
    seconds: float
    kind: str
    text: str


class Pictures(NamedTuple):
    """Sample images of a split, as the model gets them."""

    images: list[dict[str, str]]
    """`png` (base64) and `label`; `predicted` (another PNG) if the first one shows the target."""
    legend: list[tuple[str, str]]
    """Class → colour, #rrggbb."""
    epoch: int | None


@dataclass
class RunData:
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
    tables: dict[str, kinds.MetricTable] = field(default_factory=dict)
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
    """Read a run directory."""
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


def _read_events(run: RunData) -> None:
    start: float | None = None
    before: kinds.StepLogged | None = None
    for event in kinds.read_events(run.run_dir / "events.jsonl"):
        if not math.isfinite(event.time):
            continue
        start = event.time if start is None else start
        at = event.time - start
        match event:
            case kinds.StepLogged():
                _take_step(run, event, at, before)
                before = event
            case kinds.EpochEnded():
                done = "done" if event.whole else "in part"
                run.epochs.append(Mark(at, "epoch", f"epoch {event.epoch + 1} {done}"))
                _take_metrics(run, event)
            case kinds.MetricsLogged():
                _take_metrics(run, event)
            case kinds.HostCpu():
                for host, percent in event.hosts.items():
                    if math.isfinite(percent):
                        run.host_cpu.setdefault(host, []).append((at, percent))
            case kinds.SamplesShown():
                run.pictures["val" if event.split == "val" else "train"] = _pictures(event)
            case kinds.MetricTable():
                if event.rows and [len(event.columns)] * len(event.rows) == list(map(len, event.cells)):
                    run.tables[event.name] = event
            case _:
                if text := _mark_text(event):
                    run.marks.append(Mark(at, event.event, text))


def _mark_text(event: kinds.Event) -> str:
    match event:
        case kinds.CheckpointWritten():
            return f"checkpoint at step {event.step}: {Path(event.path).name}"
        case kinds.Resumed():
            return f"resumed {event.path}"
        case kinds.TrainWorkerLost():
            return f"train worker lost: {event.cause}"
        case kinds.HostChanged():
            return f"{event.event.replace('_', ' ')} {event.host}"
        case kinds.CpuHostsRequested():
            return f"{event.count} CPU hosts requested: {event.reason}"
        case kinds.StopRequested():
            return f"stop asked {event.reason}"
        case kinds.Stopped():
            return f"stopped {event.reason}"
    return ""


def _pictures(event: kinds.SamplesShown) -> Pictures:
    """The valid PNG files, limited so that the page stays below a megabyte."""
    found, room = [], MOST_PICTURE_CHARACTERS
    for image in event.images:
        files: dict[str, str] = {name: image[name] for name in ("png", "predicted") if name in image}
        if "png" not in files or not all(map(_is_png, files.values())):
            continue
        if (size := sum(map(len, files.values()))) > room:
            continue
        room -= size
        label = image.get("label")
        found.append({**files, "label": "" if label is None else str(label)[:60]})
    legend = [
        (str(entry.get("name"))[:40], entry["color"])
        for entry in event.legend
        if COLOR.fullmatch(str(entry.get("color")))
    ]
    return Pictures(found, legend[:MOST_CLASSES], event.epoch)


def _is_png(text: Any) -> bool:
    try:
        return isinstance(text, str) and base64.b64decode(text, validate=True).startswith(PNG_SIGNATURE)
    except ValueError:
        return False


def _take_step(run: RunData, event: kinds.StepLogged, at: float, before: kinds.StepLogged | None) -> None:
    """Take one logged step: rates since the previous one in the same epoch."""
    if math.isfinite(event.loss):
        run.loss.append((event.step, event.loss))
    samples, seconds, wait_s = event.epoch_samples, event.elapsed_s, event.wait_s
    if before is not None and before.epoch == event.epoch:
        samples, seconds = samples - before.epoch_samples, seconds - before.elapsed_s
        wait_s -= before.wait_s
    if seconds > 0 and math.isfinite(seconds + wait_s):
        run.samples_per_s.append((at, max(0.0, samples / seconds)))
        run.input_wait.append((at, min(100.0, max(0.0, 100 * wait_s / seconds))))


def _take_metrics(run: RunData, event: kinds.EpochEnded | kinds.MetricsLogged) -> None:
    for name, value in finite(event.metrics).items():
        run.metrics.setdefault(name, []).append((event.step, value))


MOST_QUARANTINED = 50


def _read_quarantine(run: RunData) -> None:
    for row in kinds.json_lines(run.run_dir / "quarantine.jsonl"):
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
