"""Writes how the soak tests ended: `python scripts/soak_report.py docs/soak.md RESULTS.xml …`."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from datetime import date
from pathlib import Path

HEAD = """# Soak tests

What takes minutes and is therefore run by `make soak`, before a release, and not by `make test`. This file is
written by it.

Last run on {day}, commit `{commit}`, {cores} cores.

| test | result | seconds |
|---|---|---|
"""


def main(target: str, *results: str) -> None:
    """Laptop: the table of one run, from the reports of pytest."""
    rows = []
    for file in results:
        for case in ET.parse(file).iter("testcase"):  # noqa: S314 - pytest wrote it
            kinds = {child.tag for child in case}
            ended = next((kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed")
            module = (case.get("classname") or "").removeprefix("tests.")
            rows.append(f"| {module}: {case.get('name')} | {ended} | {float(case.get('time') or 0):.0f} |")
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    head = HEAD.format(day=date.today().isoformat(), commit=asked.stdout.strip(), cores=os.cpu_count())
    Path(target).write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
