"""Laptop: CPU time of interleaved cases, medians, and the results file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "latest.json"


@dataclass(frozen=True)
class Measure:
    """A row of the results: ours, a peer, and the goal for their ratio (higher is better)."""

    measure: str
    ours: float
    peer: float | None
    peer_name: str
    ratio: float | None
    goal: float | None
    met: bool | None
    unit: str


def cpu_seconds(cases: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median CPU seconds per call of each case, interleaved so that drift affects all equally."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case()
    for _ in range(rounds):
        for name, case in cases.items():
            started = time.process_time()
            case()
            times[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def merged(earlier: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge rows by measure: new rows replace old ones of the same name.

    Raises:
        ValueError: two new rows have the same name.
    """
    rows = {row["measure"]: row for row in earlier}
    names = [row["measure"] for row in new]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"measures that share a name: {', '.join(sorted(doubled))}")
    return list((rows | {row["measure"]: row for row in new}).values())


def _earlier() -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())
    except (OSError, ValueError):
        return []
    return rows


def publish(measures: list[Measure]) -> None:
    """Print the table and write `benchmarks/results/latest.json`."""
    for m in measures:
        ratio = f"{m.ratio:6.2f}×" if m.ratio is not None else "      –"
        peer = f"{m.peer:10.3f}" if m.peer is not None else "         –"
        goal = f"goal {m.goal:g}: {'met' if m.met else 'NOT met'}" if m.goal is not None else ""
        print(
            f"{m.measure:<44} {m.ours:10.3f} {peer} {m.unit:<14} {ratio}  {goal}  ({m.peer_name})"
        )
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
    rows = merged(_earlier(), [asdict(m) | machine for m in measures])
    draft = RESULTS.with_suffix(".draft")
    draft.write_text(json.dumps(rows, indent=1) + "\n")
    draft.replace(RESULTS)
    print(
        f"written: {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}"
    )
