"""Rehearsals of the stand-in driver: real hosts, real Ray, cheap sizes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.config.loading import Resolved
from stoker_launcher.job import Job, Project
from stoker_launcher.rehearsal.running import RehearsalRun

HERE = Path(__file__).parent
SAME_PRIORITY = "sagemaker.environment={RAY_worker_niceness: '0'}"
"""Ray's workers beside what else computes here; see tests/conftest.py."""
CHEAP = (
    *("cluster.object_store_mb=128", "cluster.join_timeout_s=450", SAME_PRIORITY),
    *("rehearsal.shm_mb=200", "rehearsal.entry=container"),
)
"""Without the toolkit, which costs every host some seconds of CPU and takes SIGTERM from train.py."""
RAY_ALONE = "\nFOR_CHAINS = FOR_TRAINING = ('ray._private.workers.default_worker',)\n"
"""What hosts import ahead: the workers of a stand-in need no more."""

LINGER_S = 120.0
"""In place of 30 s, which leaving may take on a busy machine."""
PATIENT = (
    f"from stoker_launcher.places import rehearsal\nrehearsal.LINGER_S = {LINGER_S}\n"
    "from stoker_launcher.command_line import main\nmain()\n"
)
"""The launcher with it."""

NAMES: list[str] = []
"""Of all rehearsals that this test process started: their hosts are told apart by the job's name."""


def new_name() -> str:
    NAMES.append(f"test-{os.getpid()}-{len(NAMES)}")
    return NAMES[-1]


def processes_left() -> list[str]:
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            known = (
                (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            ).decode(errors="replace")
            if any(f"={name}\0" in known or f"/{name}-2" in known for name in NAMES):
                left.append(f"{process.name}: {known[-200:]}")
    return left


class StandInJob(Job):
    def stage(self, folder: Path, data_at: dict[str, str] | None = None) -> None:
        super().stage(folder, data_at)
        for name in ("driver.py", "job_checks.py"):
            shutil.copy2(HERE / "standin.py", folder / "stoker/entry" / name)
        with (folder / "stoker/hosts/forks/__init__.py").open("a") as forks:
            forks.write(RAY_ALONE)


def stand_in(resolved: Resolved, data: dict[str, str] | None = None) -> StandInJob:
    return StandInJob(resolved, Project(resolved.config), data or {})


@dataclass
class Rehearsed:
    run: RehearsalRun
    code: int

    @property
    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.run.run_dir / "result.json").read_text()))

    def log(self, host: str) -> str:
        return (self.run.run_dir / "logs" / f"{host}.log").read_text()

    @property
    def codes(self) -> dict[str, int | None]:
        return {name: result.exit_code for name, result in self.run.results.items()}


Rehearse = Callable[..., Rehearsed]
