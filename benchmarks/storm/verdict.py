"""Laptop: what a storm must show at its end: every record once, equal weights, nothing left, flat memory."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.storm.job import RECORDS, STEPS, complete_lines, records_of, starts
from benchmarks.storm.watch import Sample

WARM_S, LEAST_S = 60.0, 180.0
"""Memory counts from so long after a launch began to train; shorter ones than the second say nothing."""
GROWTH_MB_PER_MIN = 5.0
LASTING = 0.8
"""A process that is in so many of a launch's samples counts."""


def compare_traces(
    folder: Path, expected: list[str]
) -> tuple[list[str], Counter[int], Counter[int]]:
    """Laptop: follow all starts along the undisturbed run.

    Returns:
        What is wrong; records lost and repeated, by epoch.
    """
    at = {line: number for number, line in enumerate(expected)}
    problems: list[str] = []
    lost: Counter[int] = Counter()
    final: list[str] = []
    for file in starts(folder):
        lines = complete_lines(file)
        if not lines:
            continue
        first = at.get(lines[0])
        if first is None:
            problems.append(
                f"{file.name}: its first step is none of the undisturbed run: {lines[0]}"
            )
            continue
        if first > len(final):
            problems.append(
                f"{file.name} begins at step {first}, but only {len(final)} were trained"
            )
            for number in range(len(final), first):
                lost[number // STEPS] += len(records_of(expected[number]))
            final += expected[len(final) : first]
        final[first:] = lines
        for number, line in enumerate(lines, start=first):
            if number >= len(expected) or line != expected[number]:
                told = expected[number] if number < len(expected) else "the end"
                problems.append(f"{file.name}: step {number} is {line!r}, undisturbed {told!r}")
                break
    repeated: Counter[int] = Counter()
    for epoch in range(len(expected) // STEPS):
        ids = Counter(
            i for line in final[epoch * STEPS : (epoch + 1) * STEPS] for i in records_of(line)
        )
        lost[epoch] += sum(1 for record in range(RECORDS) if record not in ids)
        repeated[epoch] += sum(count - 1 for count in ids.values())
    return problems, +lost, +repeated


def books(run_dir: Path, epochs: int) -> list[str]:
    """Laptop: what the last run's own account says, against what it must say."""
    summary = json.loads((run_dir / "summary.json").read_text())
    found = {key: summary["records"][key] for key in ("read", "trained", "quarantined", "repeated")}
    wanted = {
        "read": epochs * RECORDS,
        "trained": epochs * RECORDS,
        "quarantined": 0,
        "repeated": 0,
    }
    return [] if found == wanted else [f"summary.json has {found}, must have {wanted}"]


def compare_weights(run_dir: Path, reference: Path) -> list[str]:
    """Laptop: the model of the storm against that of the undisturbed run, bit for bit."""
    import torch
    from safetensors.torch import load_file

    ours, theirs = (
        load_file(folder / "model/model.safetensors") for folder in (run_dir, reference)
    )
    other = [
        name for name in theirs if name not in ours or not torch.equal(ours[name], theirs[name])
    ]
    return [f"weights differ: {', '.join(other)}"] if other or ours.keys() != theirs.keys() else []


def growth(samples: list[Sample], commands: dict[int, str]) -> list[dict[str, Any]]:
    """Laptop: the course of the memory of each host in each launch that was long enough, and of the storm.

    Only processes that are there nearly all the time count, while they all are: chain workers come and go on
    the head, too, and a launch ends one process at a time. What leaks grows all the time, whereas allocators
    take a step at an event, such as the first lost host, and stay there. So the rate is the smaller one of a
    launch's two halves. `commands` names the processes.
    """
    rows = []
    for name in sorted({name for sample in samples for name in sample.used_mb}):
        # The storm itself does not start again with each launch.
        for launch in sorted({sample.launch for sample in samples}) if name != "storm" else [None]:
            found = [s for s in samples if name in s.used_mb and launch in (None, s.launch)]
            trains = next((s.at for s in found if s.step != found[0].step), math.inf)
            found = [s for s in found if s.at - trains > WARM_S]
            if len(found) < 10 or found[-1].at - found[0].at < LEAST_S:
                continue
            there = Counter(process for sample in found for process in sample.used_mb[name])
            lasting = {process for process, times in there.items() if times >= LASTING * len(found)}
            found = [s for s in found if lasting <= s.used_mb[name].keys()]
            if not lasting or len(found) < 10:
                continue
            points = [(s.at, sum(s.used_mb[name][p] for p in lasting)) for s in found]
            half = len(points) // 2
            rows.append(
                {
                    "of": name,
                    "launch": launch,
                    "minutes": round((points[-1][0] - points[0][0]) / 60, 1),
                    "first_mb": round(statistics.median(mb for _, mb in points[:5])),
                    "last_mb": round(statistics.median(mb for _, mb in points[-5:])),
                    "mb_per_min": round(min(_slope(points[:half]), _slope(points[-half:])), 2),
                    "most": _most(
                        lasting, found[0].used_mb[name], found[-1].used_mb[name], commands
                    ),
                }
            )
    return rows


def _slope(points: list[tuple[float, float]]) -> float:
    """MB/min by Theil and Sen: the median of the slopes between halves, which single peaks do not bend."""
    half = len(points) // 2
    pairs = zip(points[:half], points[-half:], strict=True)
    return 60 * statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)


def _most(
    lasting: set[int], first: dict[int, float], last: dict[int, float], commands: dict[int, str]
) -> dict[str, float]:
    """The three processes that grew most, in MB."""
    grown = sorted(((last[p] - first[p], p) for p in lasting), reverse=True)[:3]
    return {f"{commands.get(process, '')} ({process})": round(mb, 1) for mb, process in grown}


def memory_problems(rows: list[dict[str, Any]]) -> list[str]:
    """Laptop: hosts whose memory is not flat."""
    return [
        f"memory of {row['of']} grew by {row['mb_per_min']} MB/min, more than {GROWTH_MB_PER_MIN:g}; "
        f"most: {row['most']}"
        for row in rows
        if row["mb_per_min"] > GROWTH_MB_PER_MIN
    ]


def by_fault(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Laptop: a row per kind of fault."""
    rows = []
    for name in dict.fromkeys(event["fault"] for event in events):
        found = [event for event in events if event["fault"] == name]
        rows.append(
            {
                "fault": name,
                "times": len(found),
                "outcome": ", ".join(sorted({event["outcome"] for event in found})),
                "lost": sum(event["lost"] for event in found),
                "repeated": sum(event["repeated"] for event in found),
                "recovered_s_median": statistics.median(event["recovered_s"] for event in found),
                "recovered_s_max": max(event["recovered_s"] for event in found),
            }
        )
    return rows
