"""Head and laptop: a run directory as the report needs it; whatever is absent or cut short is left out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stoker.config import UsageError
from stoker.tracking.summary import Summary

Point = tuple[float, float]

MARKS = {
    "checkpoint": "checkpoint",
    "resumed": "resumed",
    "host_lost": "host lost",
    "host_joined": "host joined",
    "stop": "stop asked",
    "stopped": "stopped",
}


@dataclass(frozen=True)
class Mark:
    """Something that happened at a time."""

    seconds: float
    kind: str
    text: str


@dataclass
class RunData:
    """One run as read."""

    run_dir: Path
    summary: Summary
    samples_per_s: list[Point] = field(default_factory=list)
    """(seconds since the start, rate since the last logged step)."""
    input_wait: list[Point] = field(default_factory=list)
    """(seconds since the start, % of the time since the last logged step)."""
    loss: list[Point] = field(default_factory=list)
    """(global step, loss)."""
    metrics: dict[str, list[Point]] = field(default_factory=dict)
    """Name → (global step, value) at the ends of epochs."""
    marks: list[Mark] = field(default_factory=list)
    epochs: list[Mark] = field(default_factory=list)
    host_cpu: dict[str, list[Point]] = field(default_factory=dict)
    """Host → (seconds, % of its CPUs)."""
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    quarantined: int = 0
    config: str = ""
    origins: dict[str, str] = field(default_factory=dict)
    pictures: list[dict[str, str]] = field(default_factory=list)
    """`png` (base64) and `label` of training images as the model saw them."""

    @property
    def name(self) -> str:
        return self.run_dir.name


def read_run(run_dir: Path) -> RunData:
    """Head and laptop: all that a run directory tells.

    Raises:
        UsageError: no run directory, or a summary that cannot be read.
    """
    path = run_dir / "summary.json"
    try:
        summary = Summary.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        reason = "no summary.json in it" if run_dir.is_dir() else "no such folder"
        raise UsageError(f"{run_dir}: is no run directory ({reason})") from None
    except (OSError, ValidationError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    run = RunData(run_dir.resolve(), summary)
    _read_events(run)
    _read_quarantine(run)
    _read_config(run)
    return run


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file; a line that a crash cut short is passed over."""
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
        kind, now = event.get("event"), _number(event.get("time"))
        if not isinstance(kind, str) or now is None:
            continue
        start = now if start is None else start
        at = now - start
        if kind == "step":
            before = _take_step(run, event, at, before)
        elif kind == "epoch":
            _take_epoch(run, event, at)
        elif kind == "host_cpu" and isinstance(event.get("hosts"), dict):
            for host, percent in event["hosts"].items():
                value = _number(percent)
                if value is not None:
                    run.host_cpu.setdefault(str(host), []).append((at, value))
        elif kind == "samples" and isinstance(event.get("images"), list):
            run.pictures = [p for p in event["images"] if isinstance(p, dict) and "png" in p]
        elif kind in MARKS:
            what = event.get("host") or event.get("reason") or event.get("path") or ""
            step = f" at step {event['step']}" if "step" in event else ""
            text = f"{MARKS[kind]}{step}" + (f": {Path(str(what)).name}" if kind == "checkpoint" else "")
            run.marks.append(
                Mark(at, kind, text if kind == "checkpoint" else f"{MARKS[kind]} {what}".strip())
            )


def _take_step(
    run: RunData, event: dict[str, Any], at: float, before: tuple[int, float, float, float] | None
) -> tuple[int, float, float, float] | None:
    """One logged step: figures since the one before it in the same epoch."""
    names = ("epoch_samples", "elapsed_s", "wait_s")
    samples, elapsed, wait = (_number(event.get(name)) for name in names)
    step, loss = _number(event.get("step")), _number(event.get("loss"))
    if step is not None and loss is not None:
        run.loss.append((step, loss))
    if samples is None or elapsed is None or wait is None:
        return before
    epoch = int(event.get("epoch", 0))
    first = before is None or before[0] != epoch
    since = (0.0, 0.0, 0.0) if first or before is None else before[1:]
    seconds = elapsed - since[1]
    if seconds > 0:
        run.samples_per_s.append((at, max(0.0, (samples - since[0]) / seconds)))
        run.input_wait.append((at, min(100.0, max(0.0, 100 * (wait - since[2]) / seconds))))
    return epoch, samples, elapsed, wait


def _take_epoch(run: RunData, event: dict[str, Any], at: float) -> None:
    number = int(event.get("epoch", 0)) + 1
    run.epochs.append(Mark(at, "epoch", f"epoch {number} done"))
    step = _number(event.get("step"))
    for name, value in (event.get("metrics") or {}).items():
        number_ = _number(value)
        if number_ is not None and step is not None:
            run.metrics.setdefault(name, []).append((step, number_))


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


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
