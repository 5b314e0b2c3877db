"""Runs a job in this process on the shared cluster, as the bootstrap would on the head."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stoker.chain import probing
from stoker.config.loading import load
from stoker.entry import driver
from stoker.entry import job_checks as checks
from stoker.errors import UsageError
from stoker.events.summary import Summary
from stoker.hosts import forks, raynode
from stoker.hosts.raynode import OWN_DEADLINE_S, STARTS
from stoker.place import RunPlace
from stoker.ray_compat import fork_workers
from stoker.serve import opening

NO_PROGRESS_S = 6.0


@contextlib.contextmanager
def one_cluster() -> Iterator[None]:
    # After half an hour in which no lease ends, Ray Data would end an execution; here, it would much sooner.
    os.environ["RAY_DATA_EXECUTION_NO_PROGRESS_TIMEOUT_S"] = str(NO_PROGRESS_S)
    # As local runs have it.
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    # A run goes on without what takes longer to find out; on a busy machine, it would be another run.
    probing.PROBE_S = opening.DEADLINE_S = 300.0
    folder = raynode.private_folder()
    server = forks.started(forks.FOR_TRAINING, folder)
    if server:  # Ray 2.56 or newer
        os.environ[forks.SOCKET_VARIABLE] = server.socket
        fork_workers()
    import ray

    for start in range(1, STARTS + 1):
        began = time.monotonic()
        try:
            ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
            break
        except Exception:
            ray.shutdown()
            if time.monotonic() - began < OWN_DEADLINE_S or start == STARTS:
                raise
    os.environ.pop(forks.SOCKET_VARIABLE, None)
    try:
        yield
    finally:
        ray.shutdown()
        if server:
            server.stop()
        shutil.rmtree(folder)


@dataclass
class Outcome:
    code: int
    summary: Summary
    run_dir: Path


def run_job(
    folder: Path,
    *overrides: str,
    run_dir: Path | None = None,
    train_group: str | None = None,
    killed_after_s: float | None = None,
    **sections: Any,
) -> Outcome:
    path = folder / "job.yaml"
    path.write_text(
        yaml.safe_dump({"name": "test", "tracking": {"tensorboard": False}, **sections})
    )
    run_dir = run_dir or folder / "run"
    try:
        resolved = load(path, overrides)
        checks.check(resolved, data_too=False)
    except UsageError as error:
        return Outcome(2, Summary(status="failed", error=str(error)), run_dir)
    folders = (run_dir, run_dir / "checkpoints", run_dir / "model")
    place = RunPlace("local", *folders, train_group=train_group, killed_after_s=killed_after_s)
    code = driver.run(resolved, place).code
    return Outcome(
        code, Summary.model_validate_json((run_dir / "summary.json").read_text()), run_dir
    )
