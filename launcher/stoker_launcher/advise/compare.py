"""Laptop: compare runs by results, speed, cost and configuration."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stoker.errors import UsageError
from stoker.events.console import MOST_PARTS
from stoker.events.runs import CONFIG, differing, find_runs, run_row, runs_dataframe
from stoker.figures import duration, table
from stoker_launcher.run_directory import is_lost

if TYPE_CHECKING:
    import pandas


def compare(paths: list[str]) -> int:
    found, passed_over = find_runs(paths)
    runs = []
    for run in found:
        try:
            run_row(run)
            runs.append(run)
        except UsageError as error:  # a truncated run must not hide the others
            passed_over += error.problems
    if not runs:
        raise UsageError(*passed_over)
    for line in passed_over:
        print(f"skipped: {line}", file=sys.stderr)
    frame = runs_dataframe(runs)
    told = zip(runs, frame["status"], strict=True)
    frame["status"] = ["failed" if is_lost(run) else status for run, status in told]
    print("\n".join(comparison(frame)))
    return 0


def comparison(frame: pandas.DataFrame) -> Iterator[str]:
    columns = [*metric_columns(frame), "samples_per_s", "input_wait_pct", "seconds"]
    columns += [c for c in ("hosts",) if frame[c].nunique() > 1]
    costs = [c for c in ("usd", "usd_per_million_samples") if frame[c].notna().any()]
    columns += costs
    titles = [TITLES.get(column, column.removeprefix("best/")) for column in columns]
    rows = [
        (str(name), row["status"], *(cell(column, row[column]) for column in columns))
        for name, row in frame.iterrows()
    ]
    yield table(("run", "status", *titles), rows, left=("run", "hosts"))
    yield "metrics: best of each run; wait: share of the training time spent waiting for data" + (
        "; costs: estimated, per 1M samples at the steady rate" if costs else ""
    )
    keys = differing(frame)
    if keys:
        yield "\ndifferences"
        for name, row in frame.iterrows():
            values = (f"{key.removeprefix(CONFIG)}={cell(key, row[key])}" for key in keys)
            yield f"{name}  {'  '.join(values)}"
    elif len(frame) > 1:
        yield "\nthe configurations are identical"


TITLES = {
    "samples_per_s": "samples/s",
    "input_wait_pct": "wait",
    "seconds": "time",
    "best/train/loss": "train/loss",
    "usd": "$",
    "usd_per_million_samples": "$/1M samples",
}


def metric_columns(frame: pandas.DataFrame) -> list[str]:
    """The best validation metrics, or the training loss if nothing was validated."""
    found = [column for column in frame.columns if column.startswith("best/val/")]
    # Not each class of a metric, if others say how good a run is.
    found = [column for column in found if column.count("/") == 2] or found[:MOST_PARTS]
    return found or [column for column in frame.columns if column == "best/train/loss"]


def cell(column: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if column.startswith(CONFIG):
        return str(value)
    if column.endswith("acc1"):
        return f"{100 * value:.2f} %"
    if column == "input_wait_pct":
        return f"{value:.0f} %"
    if column == "seconds":
        return duration(value)
    if column == "samples_per_s":
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
