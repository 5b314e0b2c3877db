"""Head: where a run takes place and where its files go."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

RUN_DIR_VARIABLE = "STOKER_RUN_DIR"
BACKEND_VARIABLE = "STOKER_BACKEND"
COMMIT_FILE = "job.commit"
"""In the staged source: the git commit that it was copied from, where there was one."""
LAUNCH_DIR_VARIABLE = "STOKER_LAUNCH_DIR"
"""Local runs: the folder in which the command was typed; relative paths of data mean that one."""


@dataclass(frozen=True)
class Outcome:
    """Every host: an exit code and, where it is not 0, the cause in one line."""

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
    formed_s: float = 0.0
    """Seconds from the start of this process until the Ray cluster stood."""
    train_group: str | None = None
    """Label of the group whose hosts train; None: wherever there is room."""
    expected_hosts: tuple[str, ...] = ()
    """Names of the hosts that the job was given; empty where nobody says."""


def local_place() -> Place:
    """Head: the run directory that the launcher names in the environment, or one here."""
    run_dir = Path(os.environ.get(RUN_DIR_VARIABLE) or "run").resolve()
    return Place(
        backend=os.environ.get(BACKEND_VARIABLE, "local"),
        run_dir=run_dir,
        checkpoint_dir=run_dir / "checkpoints",
        model_dir=run_dir / "model",
    )
