"""Laptop and head: reads finished runs from their directories: as rows to compare, and for the report.

from stoker import runs_dataframe
frame = runs_dataframe(["runs/digits-…", "runs/digits-…"])      # or ["runs"]: every run in it
frame[["config/train.lr", "best/val/acc1", "samples_per_s", "usd"]]
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic_core import to_jsonable_python

from stoker.config.loading import leaves
from stoker.errors import UsageError
from stoker.events import kinds
from stoker.events.summary import Summary, finite, number, read_summary

if TYPE_CHECKING:
    import pandas

Point = tuple[float, float]

CONFIG = "config/"
MOST_QUARANTINED = 50
MOST_STEPS = 50_000
DRAWN: tuple[type[kinds.Event], ...] = (
    *(kinds.EpochEnded, kinds.MetricsLogged, kinds.MetricTable, kinds.CheckpointWritten),
    *(kinds.Resumed, kinds.TrainWorkerLost, kinds.HostChanged, kinds.CpuHostsRequested),
    *(kinds.StopRequested, kinds.Stopped),
)
"""Kinds of events that the report shows, beside the steps."""


def find_runs(paths: Iterable[str | Path]) -> tuple[list[Path], list[str]]:
    """The run directories among or below these paths, and a line for each path that has none."""
    found: dict[Path, None] = {}
    passed_over = []
    for path in map(Path, paths):
        if (path / "summary.json").is_file():
            found[path.resolve()] = None
            continue
        below = sorted(child.parent.resolve() for child in path.glob("*/summary.json"))
        found.update(dict.fromkeys(below))
        if not below:
            reason = "no summary.json in it" if path.exists() else "no such folder"
            passed_over.append(f"{path}: not a run directory ({reason})")
    return list(found), passed_over


def runs_dataframe(paths: Sequence[str | Path]) -> pandas.DataFrame:
    """One row per run, indexed by the run's name; `paths` are run directories, or folders that contain some.

    Returns:
        Columns: status, place, started, hosts, train_workers, seconds, epochs, steps, samples_per_s
        (without warm-up), input_wait_pct (% of training time; both None if not measured), bottleneck, usd,
        usd_per_million_samples (estimated, the second at samples_per_s; None where prices are not known),
        `last/<metric>`, `best/<metric>`, and `config/<section.key>` for every key of the configuration.

    Raises:
        UsageError: a path is not a run directory, or a run cannot be read.
    """
    import pandas

    runs, problems = find_runs(paths)
    if problems:
        raise UsageError(*problems)
    rows = [run_row(run) for run in runs]
    frame = pandas.DataFrame(rows, index=[run.name for run in runs])
    for column in [name for name in frame if name.startswith(CONFIG) and frame[name].isna().any()]:
        values = [row.get(column) for row in rows]
        if int in map(type, values):  # beside a null, these would become floats
            frame[column] = pandas.Series(values, frame.index, dtype=object)
    frame.index.name = "run"
    return frame


def run_row(run_dir: Path) -> dict[str, Any]:
    summary = read_summary(run_dir / "summary.json")
    row = figures_of(summary)
    row |= {f"last/{name}": value for name, value in summary.metrics.last.items()}
    row |= {f"best/{name}": value for name, value in summary.metrics.best.items()}
    return row | {CONFIG + key: value for key, value in flat_config(run_dir).items()}


def figures_of(summary: Summary) -> dict[str, Any]:
    cost, speed = summary.cost or {}, summary.speed
    rate = speed.steady_samples_per_s or None
    same = ("status", "place", "started", "seconds", "epochs", "steps")
    return {name: getattr(summary, name) for name in (*same, "train_workers", "bottleneck")} | {
        "hosts": shape_of(summary),
        "samples_per_s": rate,
        "input_wait_pct": speed.input_wait_pct if rate else None,
        "usd": cost.get("usd"),
        "usd_per_million_samples": cost.get("usd_per_million_samples"),
    }


def shape_of(summary: Summary) -> str:
    """A run's hosts in short form: `1 × gpu (ml.g5.xlarge) + 2 × cpu`."""
    kinds = Counter((host.group, host.type or "") for host in summary.cluster.at_once())
    return " + ".join(
        f"{count} × {group}" + (f" ({kind})" if kind else "")
        for (group, kind), count in kinds.items()
    )


def flat_config(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "config.yaml"
    try:
        content = to_jsonable_python(
            yaml.safe_load(path.read_text(encoding="utf-8")), bytes_mode="base64"
        )
    except (OSError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UsageError(f"{path}: cannot be read: {why}") from None
    return flat(content if isinstance(content, dict) else {})


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    rows = leaves(tree)
    return {
        key: json.dumps(value) if isinstance(value, list | dict) else value for key, value in rows
    }


def differing(frame: pandas.DataFrame) -> list[str]:
    return [
        column
        for column in frame.columns
        if column.startswith(CONFIG)
        and column != f"{CONFIG}output_dir"  # differs without distinguishing runs
        and len({repr(value) for value in frame[column]}) > 1
    ]


@dataclass(frozen=True)
class Mark:
    seconds: float
    kind: str
    text: str


@dataclass
class RunData:
    run_dir: Path
    summary: Summary
    samples_per_s: list[Point] = field(default_factory=list)
    """(seconds since the start, rate since the last logged step)."""
    steps_per_point: int = 1
    """One of so many logged steps is read, so that there are at most MOST_STEPS of them."""
    input_wait: list[Point] = field(default_factory=list)
    """(seconds since the start, % of the time since the last logged step)."""
    loss: list[Point] = field(default_factory=list)
    """(global step, loss)."""
    metrics: dict[str, list[Point]] = field(default_factory=dict)
    """Name → (global step, value), at the end of each epoch or as a script logs it."""
    tables: dict[str, kinds.MetricTable] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    """By their time."""
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    quarantined: int = 0
    config: str = ""
    origins: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        # In a container, every run's directory is /opt/ml/output/data.
        return self.summary.name if self.run_dir.name == "data" else self.run_dir.name


def read_run(run_dir: Path) -> RunData:
    path = run_dir / "summary.json"
    if not path.is_file():
        raise UsageError(f"{run_dir}: not a run directory (no summary.json in it)")
    summary = read_summary(path)
    summary.chain = [  # without CPU time, a stage is left out; unknown bytes are 0
        {
            **stage,
            "stage": str(stage.get("stage", "?")),
            "cpu_ms_per_sample": cpu_ms,
            "bytes_out": number(stage.get("bytes_out")) or 0.0,
        }
        for stage in summary.chain
        if (cpu_ms := number(stage.get("cpu_ms_per_sample"))) is not None
    ]
    summary.host_cpu = [row for row in summary.host_cpu if number(row.get("mean_pct")) is not None]
    if number((summary.cost or {}).get("usd")) is None:
        summary.cost = None
    run = RunData(run_dir.resolve(), summary)
    _read_events(run)
    for row in kinds.json_lines(run.run_dir / "quarantine.jsonl"):
        run.quarantined += 1
        if len(run.quarantine) < MOST_QUARANTINED:
            run.quarantine.append(row)
    _read_config(run)
    return run


def _read_events(run: RunData) -> None:
    path = run.run_dir / "events.jsonl"
    start = next((event.time for event in kinds.read_events(path)), 0.0)
    run.steps_per_point += sum(1 for _ in kinds.lines(path, kinds.StepLogged)) // MOST_STEPS
    before: kinds.StepLogged | None = None
    for event in kinds.read_events(path, kinds.StepLogged, run.steps_per_point):
        if not isinstance(event, kinds.StepLogged):
            continue
        if math.isfinite(event.loss):
            run.loss.append((event.step, event.loss))
        samples, seconds, wait_s = event.epoch_samples, event.elapsed_s, event.wait_s
        if before is not None and before.epoch == event.epoch:
            samples, seconds = samples - before.epoch_samples, seconds - before.elapsed_s
            wait_s -= before.wait_s
        if seconds > 0 and math.isfinite(seconds + wait_s):
            at = event.time - start
            run.samples_per_s.append((at, max(0.0, samples / seconds)))
            run.input_wait.append((at, min(100.0, max(0.0, 100 * wait_s / seconds))))
        before = event
    for event in kinds.read_events(path, DRAWN):
        at, text = event.time - start, ""
        match event:
            case kinds.EpochEnded() | kinds.MetricsLogged():
                if isinstance(event, kinds.EpochEnded):
                    text = f"epoch {event.epoch + 1} {'done' if event.whole else 'in part'}"
                for name, value in finite(event.metrics).items():
                    run.metrics.setdefault(name, []).append((event.step, value))
            case kinds.MetricTable():
                widths = {len(cells) for cells in event.cells}
                if len(event.rows) == len(event.cells) and widths == {len(event.columns)}:
                    run.tables[event.name] = event
            case kinds.CheckpointWritten():
                text = f"checkpoint at step {event.step}: {Path(event.path).name}"
            case kinds.Resumed():
                text = f"resumed {event.path}"
            case kinds.TrainWorkerLost():
                text = f"train worker lost: {event.cause}"
            case kinds.HostChanged():
                text = f"{event.event.replace('_', ' ')} {event.host}"
            case kinds.CpuHostsRequested():
                text = f"{event.count} CPU hosts requested: {event.reason}"
            case kinds.StopRequested() | kinds.Stopped():
                verb = "stopped" if isinstance(event, kinds.Stopped) else "stop asked"
                text = f"{verb} {event.reason}"
        if text:
            run.marks.append(Mark(at, event.event, text))
    run.marks.sort(key=lambda mark: mark.seconds)


def _read_config(run: RunData) -> None:
    try:
        text = (run.run_dir / "config.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    lines = text.splitlines()
    # The header names the origin of each value: `# "train.lr": "command line"`.
    header = ",".join(line[2:] for line in lines if line.startswith('# "'))
    with contextlib.suppress(ValueError):
        run.origins = json.loads("{" + header + "}")
    run.config = "\n".join(line for line in lines if not line.startswith("#"))
