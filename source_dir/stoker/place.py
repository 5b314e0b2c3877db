"""Head: the backend of a run and the folders for its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

RUN_DIR_VARIABLE = "STOKER_RUN_DIR"
BACKEND_VARIABLE = "STOKER_BACKEND"
COMMIT_FILE = "job.commit"
"""In the staged source: the git commit it was copied from, if any."""
STOP_FILE = "stop.requested"
"""Local runs: left in the run directory by a job that has received a stop signal."""
LAUNCH_DIR_VARIABLE = "STOKER_LAUNCH_DIR"
"""Local runs: the folder in which you ran the command; relative data paths refer to it."""


@dataclass(frozen=True)
class Outcome:
    """Every host: an exit code and, unless it is 0, the cause in one line."""

    code: int
    cause: str = ""


@dataclass(frozen=True)
class Place:
    """Head: the backend's name and the folders of one run."""

    backend: str
    run_dir: Path
    """`config.yaml`, `summary.json`, `events.jsonl`, `tensorboard/`, `logs/`."""
    checkpoint_dir: Path
    model_dir: Path
    synced: bool = False
    """Whether the service copies `checkpoint_dir` elsewhere while the job writes it."""
    formed_s: float = 0.0
    """Seconds from the start of this process until the Ray cluster was formed."""
    train_group: str | None = None
    """Label of the group whose hosts train; None: any host with free resources."""
    expected_hosts: tuple[str, ...] = ()
    """Names of the job's hosts; empty if unknown."""


def local_place() -> Place:
    """Head: the place of a local run, from the launcher's environment variables or their defaults."""
    run_dir = Path(os.environ.get(RUN_DIR_VARIABLE) or "run").resolve()
    return Place(
        backend=os.environ.get(BACKEND_VARIABLE, "local"),
        run_dir=run_dir,
        checkpoint_dir=run_dir / "checkpoints",
        model_dir=run_dir / "model",
    )
