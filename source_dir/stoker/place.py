"""Head: the place of a run and the folders for its files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
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
"""In a run directory of Slurm: `stoker stop` has requested a stop."""
LASTING_DIR_VARIABLE = "STOKER_LASTING_DIR"
"""Ray clusters: a folder of object storage that all hosts mount, for the checkpoints and the model; the run
directory is then on the head's disk."""
PACKAGE_VARIABLE = "STOKER_JOB_PACKAGE"
"""Ray clusters: a zip file of the staged source on the head's disk, for the workers of all hosts."""
SERVICE_JOB_VARIABLE = "STOKER_SERVICE_JOB"
"""SageMaker: the job's name in its queue, as each attempt is a training job of another name."""
KILLED_AFTER_VARIABLE = "STOKER_KILLED_AFTER_S"
"""Slurm: `killed_after_s` of a job with a time limit, before which SIGTERM comes."""
LAUNCH_DIR_VARIABLE = "STOKER_LAUNCH_DIR"
"""Local runs: the folder in which you ran the command; relative data paths refer to it."""

CHECK_VARIABLE = "STOKER_CHECK_ONLY"
"""Local runs: end before a cluster forms, with what the checks found (`--dry-run`)."""


@dataclass(frozen=True)
class Outcome:
    code: int
    cause: str = ""
    """One line, unless the code is 0."""


@dataclass(frozen=True)
class RunPlace:
    name: str
    """`place` in summary.json."""
    run_dir: Path
    """`config.yaml`, `summary.json`, `events.jsonl`, `tensorboard/`, `logs/`."""
    checkpoint_dir: Path
    model_dir: Path
    synced: bool = False
    """Whether `checkpoint_dir` appears elsewhere file by file, so that a manifest must come last."""
    copies: Mapping[Path, Path] = field(default_factory=dict)
    """Folders of the run → where the head copies them, during the run and at its end."""
    failure: Path = Path("failure")
    """On hosts of a service, the file for the cause of a failure, in one line."""
    killed_after_s: float | None = None
    """How long after SIGTERM the place sends SIGKILL. None: never, or after a time that it does not tell."""
    formed_s: float = 0.0
    """Seconds from the start of this process until the Ray cluster was formed."""
    train_group: str | None = None
    """Label of the group whose hosts train; None: any host with free resources."""
    expected_hosts: tuple[str, ...] = ()
    """Names of the job's hosts; empty if unknown."""
    job: str = ""
    """The service's name for this job, the same after each restart; empty if the place has none."""

    @property
    def lasting(self) -> Path | None:
        """Where the head copies `run_dir`: mounted object storage, which takes only whole files and also has
        `model_dir`. None: the service keeps `run_dir` itself."""
        return self.copies.get(self.run_dir)


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
        copies={run_dir: folder} if lasting else {},
    )
