"""Laptop: seconds from the typed command to the first training step, and what they are made of."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Measure

ROOT = Path(__file__).resolve().parent.parent
GOAL_S = 20.0


def run() -> list[Measure]:
    """The rows of this benchmark: whole, and each part's share."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "launcher/submit.py")]
        command += [str(ROOT / "source_dir/configs/digits.yaml"), "train.epochs=1"]
        # The example's data is there already, as it is from the second run on.
        subprocess.run([*command, "--dry-run"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        started = time.time()
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        run_dir = Path(folder) / "runs" / "latest"
        first = next(
            event["time"]
            for event in map(json.loads, (run_dir / "events.jsonl").open())
            if event["event"] == "step"
        )
        parts = json.loads((run_dir / "summary.json").read_text())["startup"]
    total = first - started
    rows = [Measure("command → first step", total, None, "–", GOAL_S / total, 1.0, total <= GOAL_S, "s")]
    before = 0.0
    launcher = total - parts["first step"]
    for name, at in [("launcher", 0.0), *parts.items()]:
        seconds = launcher if name == "launcher" else at - before
        rows.append(Measure(f"  {name}", seconds, None, "–", None, None, None, "s"))
        before = at
    return rows
