"""Writes the results of the soak tests: `python scripts/soak_report.py docs/soak.md RESULTS.xml …`."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from datetime import date
from pathlib import Path

HEAD = """# Soak tests

`make soak` runs these slow tests before a release and writes this file. `make test` leaves them out.

Last run on {day}, commit `{commit}`, {cores} cores.

| test | result | seconds |
|---|---|---|
"""


def main(target: str, *results: str) -> None:
    """Laptop: write the table of a run from the pytest reports."""
    rows = []
    for file in results:
        for case in ET.parse(file).iter("testcase"):  # noqa: S314 - pytest wrote it
            kinds = {child.tag for child in case}
            ended = next((kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed")
            module = (case.get("classname") or "").removeprefix("tests.")
            rows.append(f"| {module}: {case.get('name')} | {ended} | {float(case.get('time') or 0):.0f} |")
    command = ["git", "rev-parse", "--short", "HEAD"]
    asked = subprocess.run(command, capture_output=True, text=True)
    head = HEAD.format(day=date.today().isoformat(), commit=asked.stdout.strip(), cores=os.cpu_count())
    Path(target).write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
