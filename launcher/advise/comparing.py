"""Laptop: compare runs: `submit.py compare RUN…` on the terminal, `submit.py report RUN…` as a page."""

from __future__ import annotations

import math
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import UsageError
from stoker.events.console import MOST_PARTS
from stoker.events.runs import CONFIG, differing, find_runs, row_of, runs_dataframe
from stoker.figures import count_of

if TYPE_CHECKING:
    import pandas


def compare(paths: list[str], csv: str | None) -> int:
    """Laptop: print the table, or write every column as CSV.

    Args:
        paths: run directories, or folders that contain them.
        csv: file to write, "-" for stdout; None prints the table.

    Returns:
        The exit code.

    Raises:
        UsageError: none of the paths is a readable run directory.
    """
    found, passed_over = find_runs(paths)
    runs = []
    for run in found:
        try:
            row_of(run)
            runs.append(run)
        except UsageError as error:  # a truncated run must not hide the others
            passed_over += error.problems
    if not runs:
        raise UsageError(*passed_over)
    for line in passed_over:
        print(f"skipped: {line}", file=sys.stderr)
    frame = runs_dataframe(runs)
    if csv is None:
        show(frame)
        return 0
    try:
        frame.to_csv(sys.stdout if csv == "-" else csv)
    except OSError as error:
        raise UsageError(f"--csv {csv}: cannot be written: {error.strerror}") from None
    if csv != "-":
        print(f"written: {csv} ({count_of(len(frame), 'run')}, {len(frame.columns)} columns)")
    return 0


def report(paths: list[Path], output: Path | None, show: bool) -> int:
    """Laptop: write report.html for one run or for several side by side.

    Args:
        paths: run directories.
        output: the file; default: report.html in the run directory, or here for several runs.
        show: open the report in the browser.

    Returns:
        The exit code.

    Raises:
        UsageError: a path is not a run directory, or the file cannot be written.
    """
    from stoker.events.report import REPORT, write_report

    target = output or (paths[0] / REPORT if len(paths) == 1 else Path(REPORT))
    if target.is_dir():
        target = target / REPORT
    try:
        write_report(paths, target)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from None
    print(f"written: {target}")
    if show:
        webbrowser.open(target.resolve().as_uri())
    return 0


def show(frame: pandas.DataFrame) -> None:
    """Laptop: print the results, speed and cost of each run, then the configuration differences."""
    from rich.columns import Columns
    from rich.console import Console
    from rich.table import Table

    columns = [*metric_columns(frame), "samples_per_s", "input_wait_pct", "seconds"]
    columns += [c for c in ("hosts",) if frame[c].nunique() > 1]
    costs = [c for c in ("usd", "usd_per_million_samples") if frame[c].notna().any()]
    columns += costs
    titles = [TITLES.get(column, column.removeprefix("best/")) for column in columns]
    results = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    results.add_column("run")
    results.add_column("status")
    for column, title in zip(columns, titles, strict=True):
        results.add_column(title, justify="left" if column == "hosts" else "right")
    rows = [
        (str(name), row["status"], *(cell(column, row[column]) for column in columns))
        for name, row in frame.iterrows()
    ]
    for cells in rows:
        results.add_row(*cells)
    console = Console(highlight=False)
    if console.measure(results, options=console.options.update(width=10_000)).maximum <= console.width:
        console.print(results)
    else:  # a table squeezed into a narrow terminal is unreadable
        for name, status, *texts in rows:
            console.print(name, status, style="bold")
            figures = (f"{title} {text}" for title, text in zip(titles, texts, strict=True) if text != "–")
            console.print(Columns(figures, padding=(0, 2)))
    console.print(
        "metrics: best of each run; wait: share of the training time spent waiting for data"
        + ("; costs: estimated, per 1M samples at the steady rate" if costs else ""),
        style="dim",
    )
    keys = differing(frame)
    if keys:
        console.print("\ndifferences", style="bold")
        given = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        given.add_column(no_wrap=True)
        given.add_column(overflow="fold")
        for name, row in frame.iterrows():
            values = (f"{key.removeprefix(CONFIG)}={cell(key, row[key])}" for key in keys)
            given.add_row(str(name), "  ".join(values))
        console.print(given)
    elif len(frame) > 1:
        console.print("\nthe configurations are identical")


TITLES = {
    "samples_per_s": "samples/s",
    "input_wait_pct": "wait",
    "seconds": "time",
    "best/train/loss": "train/loss",
    "usd": "$",
    "usd_per_million_samples": "$/1M samples",
}


def metric_columns(frame: pandas.DataFrame) -> list[str]:
    """Laptop: the best validation metrics, or the training loss if nothing was validated."""
    found = [column for column in frame.columns if column.startswith("best/val/")]
    # Not each class of a metric, if others say how good a run is.
    found = [column for column in found if column.count("/") == 2] or found[:MOST_PARTS]
    return found or [column for column in frame.columns if column == "best/train/loss"]


def cell(column: str, value: Any) -> str:
    """Laptop: a value as the table shows it."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if column.endswith("acc1"):
        return f"{100 * value:.2f} %"
    if column == "input_wait_pct":
        return f"{value:.0f} %"
    if column == "seconds":
        return f"{value / 3600:.1f} h" if value >= 7200 else f"{value:.0f} s"
    if column == "samples_per_s":
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
