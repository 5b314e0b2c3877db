"""Head: the place of a run and the folders for its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

RUN_DIR_VARIABLE = "STOKER_RUN_DIR"
PLACE_VARIABLE = "STOKER_PLACE"
COMMIT_FILE = "job.commit"
"""In the staged source: the git commit it was copied from, if any."""
ORIGINS_FILE = "job.origins.json"
"""In the staged source: the origin of each value of `job.yaml`."""
TOKEN_FILE = ".ray-token"  # noqa: S105 - a name, not a secret
"""In the staged source: the token of the job's Ray cluster."""
STOP_FILE = "stop.requested"
"""In the run directory: a stop was requested. Local jobs write it themselves; on Slurm `stoker stop` does."""
LASTING_DIR_VARIABLE = "STOKER_LASTING_DIR"
"""Ray clusters: a folder of object storage that all hosts mount, for the checkpoints and the model; the run
directory is then on the head's disk."""
PACKAGE_VARIABLE = "STOKER_JOB_PACKAGE"
"""Ray clusters: a zip file of the staged source on the head's disk, for the workers of all hosts."""
LAUNCH_DIR_VARIABLE = "STOKER_LAUNCH_DIR"
"""Local runs: the folder in which you ran the command; relative data paths refer to it."""

CHECK_VARIABLE = "STOKER_CHECK_ONLY"
"""Local runs: end before a cluster forms, with what the checks found (`--dry-run`)."""


@dataclass(frozen=True)
class Outcome:
    """An exit code and, unless it is 0, the cause in one line."""

    code: int
    cause: str = ""


@dataclass(frozen=True)
class RunPlace:
    """The name of the place and the folders of one run."""

    name: str
    run_dir: Path
    """`config.yaml`, `summary.json`, `events.jsonl`, `tensorboard/`, `logs/`."""
    checkpoint_dir: Path
    model_dir: Path
    synced: bool = False
    """Whether the service copies `checkpoint_dir` elsewhere while the job writes it."""
    lasting: Path | None = None
    """Where the head copies `run_dir`: mounted object storage, which takes only whole files, and which has
    `model_dir`, too. None: the service keeps `run_dir` itself."""
    formed_s: float = 0.0
    """Seconds from the start of this process until the Ray cluster was formed."""
    train_group: str | None = None
    """Label of the group whose hosts train; None: any host with free resources."""
    expected_hosts: tuple[str, ...] = ()
    """Names of the job's hosts; empty if unknown."""


def local_place() -> RunPlace:
    """The place of a local run, from the launcher's environment variables or their defaults."""
    run_dir = Path(os.environ.get(RUN_DIR_VARIABLE) or "run").resolve()
    lasting = os.environ.get(LASTING_DIR_VARIABLE)
    folder = Path(lasting) if lasting else run_dir
    return RunPlace(
        name=os.environ.get(PLACE_VARIABLE, "local"),
        run_dir=run_dir,
        checkpoint_dir=folder / "checkpoints",
        model_dir=folder / "model",
        synced=bool(lasting),
        lasting=Path(lasting) if lasting else None,
    )
