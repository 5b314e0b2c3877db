"""Laptop: runs real jobs through the launcher for benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "benchmarks" / "recipes"


def environment() -> dict[str, str]:
    """The environment of benchmark processes, which can import this project and its peers.

    Ray runs its workers at nice 15. Against a peer at nice 0 they would lose time to other load.
    """
    paths = [
        str(ROOT),
        str(ROOT / "source_dir"),
        str(ROOT / "launcher"),
        os.environ.get("PYTHONPATH", ""),
        str(ROOT / ".peers"),
    ]
    importable = os.pathsep.join(path for path in paths if path)
    return os.environ | {"PYTHONPATH": importable, "RAY_worker_niceness": "0"}


def run_job(folder: Path, job: dict[str, Any], *arguments: str, timeout_s: float = 600) -> Path:
    """Run a job of `benchmarks/recipes` to its end and return its run directory.

    Args:
        folder: the folder of the job's file and its runs.
        job: the configuration.
        arguments: extra command-line arguments.
        timeout_s: the limit for the whole command.

    Raises:
        RuntimeError: the job failed; contains the last lines of its output.
    """
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    command = [
        sys.executable,
        str(ROOT / "launcher/submit.py"),
        "job.yaml",
        "--source-dir",
        str(RECIPES),
    ]
    done = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(
            f"the job {job['name']} ended with {done.returncode}:\n{done.stdout[-3000:]}"
        )
    return (folder / "runs" / "latest").resolve()


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind, in order."""
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]
