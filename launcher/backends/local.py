"""Laptop: the job on a Ray cluster of this machine alone."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from launcher.job import COMMAND, Job
from stoker.place import BACKEND_VARIABLE, RUN_DIR_VARIABLE


@dataclass(frozen=True)
class LocalRequest:
    """Laptop: the staged folder, the command and its environment."""

    job: Job
    run_dir: Path

    def render(self) -> str:
        config = self.job.resolved.config
        data = ", ".join(f"{name} = {value}" for name, value in self.job.data.items())
        return "\n".join(
            [
                f"stage    {self.run_dir}/code",
                f"run      {shlex.join(COMMAND)}",
                f"recipe   {config.recipe}",
                f"data     {data or 'as the recipe says'}",
                f"results  {self.run_dir}",
            ]
        )


class LocalRun:
    """Laptop: the running process; its output is this terminal's."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
        self.id = str(run_dir)
        self.run_dir = run_dir
        self.process = process

    def status(self) -> str:
        code = self.process.poll()
        return "running" if code is None else "succeeded" if code == 0 else f"failed: exit code {code}"

    def logs(self, follow: bool = False) -> Iterator[str]:
        yield from (self.run_dir / "logs" / "driver.log").read_text().splitlines()

    def wait(self) -> int:
        """The exit code; Ctrl-C is passed on once and waited for, so that a checkpoint is kept."""
        while True:
            try:
                code = self.process.wait()
                return 128 - code if code < 0 else code
            except KeyboardInterrupt:
                # The terminal has sent SIGINT to the whole group: the job is stopping by itself.
                continue

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)


def plan(job: Job) -> LocalRequest:
    """Laptop: where the run will lie; nothing is written."""
    root = Path(job.resolved.config.output_dir).resolve()
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    run_dir = root / f"{job.name}-{stamp}"
    number = 2
    while run_dir.exists():
        run_dir = root / f"{job.name}-{stamp}-{number}"
        number += 1
    return LocalRequest(job, run_dir)


def submit(request: LocalRequest) -> LocalRun:
    """Laptop: stage the source and start the job's process."""
    run_dir = request.run_dir
    request.job.stage(run_dir / "code")
    link = run_dir.parent / "latest"
    draft = run_dir.parent / f".latest-{os.getpid()}"
    draft.symlink_to(run_dir.name)
    draft.replace(link)
    command = [sys.executable, *COMMAND[1:]]
    environment = os.environ | {RUN_DIR_VARIABLE: str(run_dir), BACKEND_VARIABLE: "local"}
    return LocalRun(run_dir, subprocess.Popen(command, cwd=run_dir / "code", env=environment))
