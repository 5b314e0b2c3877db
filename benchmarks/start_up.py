"""Laptop: the time to the first batch (against a DataLoader), of the demo, and to an error message."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from benchmarks import end_to_end
from benchmarks.harness import Measure
from benchmarks.jobs import environment
from benchmarks.loaders import shards
from benchmarks.loaders.work import write_folder
from benchmarks.per_core import photos
from stoker_launcher.rehearsal import sagemaker_hosts

ROOT = Path(__file__).resolve().parent.parent
IMAGES, ROUNDS = 1_280, 3
PEER = "DataLoader, our decode chain"
GOAL, REFUSED_S, HOSTS_S, FORMED_S, REQUIREMENTS_S = 2.5, 2.0, 45.0, 5.0, 1.0
LATE = "start:algo-3@/missing: cpu: algo-3; joined/"
"""The last host starts when all others are there."""
DIGITS = str(ROOT / "source_dir/configs/digits.yaml")
WRONG = {
    "path": [DIGITS, "params.data=/nowhere/at/all"],
    "key": [DIGITS, "train.epoch=3"],
    "parameter": [DIGITS, "params.imagesize=3"],
    "recipe": [DIGITS, "recipe=rowz:Counting"],
    "column": [DIGITS, "recipe=ImageClassification", "params.data=columns", "data.prepare="],
    "address": [DIGITS, "--on", "ray", "--address", "http://127.0.0.1:9"],
}
"""Mistake → arguments of `submit.py`."""


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_folder(folder / "data", photos(500, 375), IMAGES)
        shards.write(folder / "data", mosaic_too=False)
        for _ in range(ROUNDS):
            ours.append(end_to_end.stoker(folder, IMAGES)["start_s"])
            theirs.append(end_to_end.peer(folder, "dataloader_ours")["start_s"])
        times = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        measures = [
            Measure(
                "command → first batch",
                statistics.median(ours),
                statistics.median(theirs),
                PEER,
                times,
                GOAL,
                times <= GOAL,
                "s",
            )
        ]
        return measures + demo(folder) + hosts(folder) + refusals(folder)


def demo(folder: Path) -> list[Measure]:
    """The whole example, with a breakdown of its start."""
    began = time.time()
    submit(folder, DIGITS)
    seconds = time.time() - began
    run_dir = folder / "runs" / "latest"
    events = map(json.loads, (run_dir / "events.jsonl").open())
    first = next(event["time"] for event in events if event["event"] == "step")
    parts = json.loads((run_dir / "summary.json").read_text())["startup"]
    rows = [
        plain("demo: command → end", seconds),
        plain("demo: command → first step", first - began),
    ]
    before = 0.0
    launcher = first - began - parts["first step"]
    for name, at in [("launcher", 0.0), *parts.items()]:
        rows.append(plain(f"  {name}", launcher if name == "launcher" else at - before))
        before = at
    return rows


def hosts(folder: Path) -> list[Measure]:
    """One epoch of the example on three rehearsed hosts, once all at the same time, once with a late one."""
    job = (DIGITS, "--on", "rehearsal", "rehearsal.hosts=gpu=1,cpu=2", "train.epochs=1")
    sagemaker_hosts.toolkit_folder()  # the first rehearsal on a machine installs it
    began = time.time()
    submit(folder, *job)
    seconds = time.time() - began
    run_dir = folder / "runs" / "latest"
    parts = json.loads((run_dir / "summary.json").read_text())["startup"]
    submit(folder, *job, "rehearsal.join_delay={algo-3: never}", f"rehearsal.faults=['{LATE}']")
    formed = json.loads((run_dir / "rehearsal.json").read_text())["formed_after_last_host_s"]
    code = "from pathlib import Path; from stoker.hosts.requirements import ensure; ensure(Path())"
    began = time.time()
    folder_of_code = ROOT / "source_dir"
    subprocess.run([sys.executable, "-c", code], cwd=folder_of_code, env=environment(), check=True)
    checked = time.time() - began
    return [
        bounded("three rehearsed hosts: command → end", seconds, HOSTS_S),
        bounded("  formed → first step", parts["first step"] - parts["cluster formed"], FORMED_S),
        bounded("a late host started → formed", formed, FORMED_S),
        bounded("satisfied requirements are checked in", checked, REQUIREMENTS_S),
    ]


def refusals(folder: Path) -> list[Measure]:
    """Seconds until an invalid job is refused."""
    rows = []
    for split in ("train", "val"):
        (folder / "columns" / split).mkdir(parents=True)
        table = pa.table({"picture": [b"", b""], "class": [0, 1]})
        parquet.write_table(table, folder / "columns" / split / "rows.parquet")
    for name, arguments in WRONG.items():
        began = time.time()
        if submit(folder, *arguments, may_fail=True) == 0:
            raise RuntimeError(f"a wrong {name} was accepted: {' '.join(arguments)}")
        seconds = time.time() - began
        rows.append(bounded(f"a wrong {name} is refused after", seconds, REFUSED_S))
    for name, arguments in {"--help": ["--help"], "--dry-run": [DIGITS, "--dry-run"]}.items():
        began = time.time()
        submit(folder, *arguments)
        rows.append(plain(f"submit.py {name}", time.time() - began))
    return rows


def submit(folder: Path, *arguments: str, may_fail: bool = False) -> int:
    """Run the launcher to its end and return its exit code."""
    command = [sys.executable, str(ROOT / "launcher/submit.py"), *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=not may_fail,
        timeout=300,
    )
    return done.returncode


def bounded(name: str, seconds: float, goal: float) -> Measure:
    """A row with the most that it may take."""
    return Measure(name, seconds, None, "–", None, goal, seconds <= goal, "s")


def plain(name: str, seconds: float) -> Measure:
    """A row without a goal."""
    return Measure(name, seconds, None, "–", None, None, None, "s")
