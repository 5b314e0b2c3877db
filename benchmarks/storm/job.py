"""Laptop: the job of a storm: its data, its configuration, its launches, and its trace."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.jobs import ROOT
from benchmarks.recipes.stormy import HURRY
from stoker.config.loading import load
from stoker_launcher.job import Job, Project
from stoker_launcher.places import rehearsal
from stoker_launcher.rehearsal.running import RehearsalRun

RECIPES = ROOT / "benchmarks" / "recipes"
BUCKET, PREFIX = "storm", "rows"
FILES, ROWS, BATCH = 12, 50, 10
RECORDS = FILES * ROWS
STEPS = RECORDS // BATCH
"""Of an epoch."""
STEP_PAUSE_S, RECORD_PAUSE_S, BALLAST = 0.25, 0.03, 200_000
"""Without the weight of the records, the whole run would be ready before the first fault."""
SHARE_TRAINING = 0.8
"""Largest share of the storm in which the job trains; the rest is spent on restarts."""
CHECKPOINT_STEPS = 20
FAILURES = 6
"""Of a launch: more than it has faults of train workers, but a full disk must end it."""
HEAD = "algo-1"
JOIN_TIMEOUT_S, LATE_S = 90, 110.0
"""A late host comes after the job has started without it."""


def epochs_for(minutes: float) -> int:
    """Laptop: how many epochs last about as long as the storm."""
    return max(2, round(minutes * 60 * SHARE_TRAINING / (STEPS * STEP_PAUSE_S)))


def upload_rows(client: Any) -> None:
    """Laptop: write the records to S3, some in each file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draws = np.random.default_rng(5).normal(size=(RECORDS, 2)).astype(np.float32)
    client.create_bucket(Bucket=BUCKET)
    for number in range(FILES):
        ids = np.arange(number * ROWS, (number + 1) * ROWS)
        x0, x1 = draws[ids].T
        content = io.BytesIO()
        table = pa.table({"id": ids, "x0": x0, "x1": x1, "y": np.sin(x0) + x1})
        pq.write_table(table, content, row_group_size=ROWS // 2)
        client.put_object(
            Bucket=BUCKET, Key=f"{PREFIX}/train/part-{number:02d}.parquet", Body=content.getvalue()
        )


@dataclass(frozen=True)
class StormJob:
    """Laptop: one configuration, launched as often as a fault ends it."""

    name: str
    folder: Path
    """Has `trace/` and `runs/`; all hosts see it."""
    checkpoints: Path
    epochs: int
    environment: dict[str, str]
    """Of every host."""
    timeout_s: float

    @property
    def trace(self) -> Path:
        return self.folder / "notes"

    @property
    def steps(self) -> int:
        return self.epochs * STEPS

    def hurry(self) -> None:
        """Laptop: let the job train without pauses from now on."""
        (self.trace / HURRY).touch()

    def trace_starts(self) -> int:
        """Laptop: how many starts have trained a step."""
        return len(starts(self.trace))

    def launch(
        self, hosts: str = "gpu=1,cpu=2", late: dict[str, float] | None = None
    ) -> RehearsalRun:
        """Laptop: start the job; it continues from its checkpoints if there are any."""
        sections: dict[str, Any] = {
            "name": self.name,
            "output_dir": str(self.folder / "runs"),
            "recipe": "stormy:Stormy",
            "params": {
                "data": f"s3://{BUCKET}/{PREFIX}",
                "trace": str(self.trace),
                "step_pause_s": STEP_PAUSE_S,
                "record_pause_s": RECORD_PAUSE_S,
                "ballast": BALLAST,
            },
            "data": {"order": "exact", "block_records": 10, "stall_timeout_s": 200},
            "train": {
                "epochs": self.epochs, "batch_size": BATCH, "workers": 1, "threads": 1,
                "lr": 0.003, "scheduler": "cosine", "max_failures": FAILURES,
            },
            "cluster": {"object_store_mb": 128, "join_timeout_s": JOIN_TIMEOUT_S, "min_cpu_hosts": 1},
            "checkpoint": {"dir": str(self.checkpoints), "every_steps": CHECKPOINT_STEPS, "keep": 3},
            "tracking": {"tensorboard": False, "record_ids": True},
            "sagemaker": {"environment": {"RAY_worker_niceness": "0", **self.environment}},
            "rehearsal": {
                "hosts": hosts, "entry": "container", "shm_mb": 200, "timeout_s": self.timeout_s,
                "join_delay": late or {},
            },
        }  # fmt: skip
        import yaml

        file = self.folder / "job.yaml"
        file.write_text(yaml.safe_dump(sections))
        resolved = load(file, [])
        job = Job(resolved, Project(resolved.config, RECIPES))
        return rehearsal.submit(rehearsal.plan(job), show=False)


class Trace:
    """Laptop: what the starts of a job have trained, compared with an undisturbed run step by step."""

    def __init__(self, folder: Path, expected: list[str]) -> None:
        self._folder = folder
        self._at = {line: number for number, line in enumerate(expected)}
        self._known: dict[Path, int] = {}
        """The step at which a start began."""

    def step(self) -> int:
        """Steps trained by the newest start, and those before it; 0 before the first."""
        files = starts(self._folder)
        if not files:
            return 0
        lines = complete_lines(files[-1])
        return self._at.get(lines[0], -1) + len(lines) if lines else 0


def starts(folder: Path) -> list[Path]:
    """Laptop: the notes of every start that trained a step, oldest first."""
    return sorted(folder.glob("start-*"))


def complete_lines(file: Path) -> list[str]:
    """Laptop: the steps that a start noted; a killed one may leave half a line."""
    return file.read_text().split("\n")[:-1]


def records_of(line: str) -> list[int]:
    """Laptop: the ids of a step's records."""
    return [int(number) for number in line.split()[1:]]
