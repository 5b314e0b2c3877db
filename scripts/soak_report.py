"""Writes the results: `python scripts/soak_report.py docs/soak.md RESULTS.xml … STORMS.json`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from datetime import date
from pathlib import Path

HEAD = """# Soak tests

`make soak` runs these slow tests before a release and writes this file. `make test-all` leaves them out.

Last run on {day}, commit `{commit}`, {cores} cores.

| test | cases | result | seconds |
|---|---|---|---|
"""


STORMS = """
## Storms

A job on emulated hosts under [seeded faults](reliability.md#the-storm). `make storm SEED=…` repeats one.

| seed | minutes | commit | faults | lost | repeated | longest recovery, s | problems |
|---|---|---|---|---|---|---|---|
"""


def storms(file: Path) -> str:
    """Laptop: the table of the storms."""
    rows = []
    for storm in json.loads(file.read_text())["storms"]:
        faults = storm["by_fault"]
        cells = [
            storm["seed"],
            f"{storm['minutes']:g}",
            f"`{storm['commit']}`",
            len(storm["events"]),
        ]
        cells += [sum(row[key] for row in faults) for key in ("lost", "repeated")]
        cells += [
            round(max((row["recovered_s_max"] for row in faults), default=0)),
            len(storm["problems"]),
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |\n")
    return STORMS + "".join(rows)


def main(target: str, *results: str) -> None:
    """Laptop: write the table of a run from the pytest reports: a row per test and per case that failed."""
    found: dict[tuple[str, str], list[float]] = {}
    for file in (name for name in results if name.endswith(".xml")):
        for case in ET.parse(file).iter("testcase"):  # noqa: S314 - pytest wrote it
            kinds = {child.tag for child in case}
            ended = next(
                (kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed"
            )
            module = (case.get("classname") or "").removeprefix("tests.")
            name = case.get("name") or ""
            test = f"{module}: {name.partition('[')[0] if ended == 'passed' else name}"
            found.setdefault((test, ended), []).append(float(case.get("time") or 0))
    rows = [f"| {test} | {len(s)} | {ended} | {sum(s):.0f} |" for (test, ended), s in found.items()]
    command = ["git", "rev-parse", "--short", "HEAD"]
    asked = subprocess.run(command, capture_output=True, text=True)
    head = HEAD.format(
        day=date.today().isoformat(), commit=asked.stdout.strip(), cores=os.cpu_count()
    )
    files = [Path(name) for name in results if name.endswith(".json") and Path(name).is_file()]
    Path(target).write_text(head + "\n".join(rows) + "\n" + "".join(map(storms, files)))


if __name__ == "__main__":
    main(*sys.argv[1:])
