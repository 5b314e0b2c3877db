"""Laptop: the job on a Ray cluster of this machine alone."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import runs
from launcher.backends.base import Backend
from launcher.job import COMMAND, Job
from stoker.errors import UsageError
from stoker.integrations.scripts.checks import command_line
from stoker.place import BACKEND_VARIABLE, LAUNCH_DIR_VARIABLE, RUN_DIR_VARIABLE
from stoker.tracking.summary import finite

PROCESS_FILE = "process.id"


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
                f"script   {command_line(config)}" if config.script else f"recipe   {config.recipe}",
                f"data     {data or ('as the script says' if config.script else 'as the recipe says')}",
                f"results  {self.run_dir}",
            ]
        )


class LocalRun:
    """Laptop: the running process; its output is this terminal's."""

    def __init__(
        self, run_dir: Path, process: subprocess.Popen[bytes], new: bool = False, latest: str | None = None
    ) -> None:
        self.id = str(run_dir)
        self.run_dir, self.process, self.new, self.latest = run_dir, process, new, latest

    def status(self) -> str:
        code = self.process.poll()
        return "running" if code is None else "succeeded" if code == 0 else f"failed: exit code {code}"

    def logs(self, follow: bool = False) -> Iterator[str]:
        yield from log_lines(self.run_dir, follow, lambda: self.process.poll() is None)

    def wait(self) -> int:
        """The exit code; Ctrl-C and SIGTERM are waited for, so that a checkpoint is kept."""
        with self._terminated_too():
            while True:
                try:
                    code = self.process.wait()
                    if code == 2 and self.new and not PastRun(self.run_dir).summary().get("steps"):
                        runs.forget(self.run_dir, self.latest)
                    return 128 - code if code < 0 else code
                except KeyboardInterrupt:
                    # The terminal has sent SIGINT to the whole group: the job is stopping by itself.
                    continue

    @contextlib.contextmanager
    def _terminated_too(self) -> Iterator[None]:
        """Hand SIGTERM on, which a service manager or `timeout` sends to this process alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self.stop())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)


def plan(job: Job, run_dir: Path | None = None) -> LocalRequest:
    """Laptop: where the run will lie, or an earlier run that goes on; nothing is written."""
    return LocalRequest(job, run_dir or runs.new_run_dir(job))


def submit(request: LocalRequest) -> LocalRun:
    """Laptop: stage the source and start the job's process."""
    run_dir = request.run_dir
    new = not run_dir.exists()
    shutil.rmtree(run_dir / "code", ignore_errors=True)  # of a run that goes on
    try:
        request.job.stage(run_dir / "code")
    except OSError as error:
        if new:
            runs.forget(run_dir, None)
        # copytree's own error lists (source, copy, why), one for each file.
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise UsageError(f"output_dir: {run_dir} cannot be written: {why}") from None
    latest = runs.point_latest(run_dir)
    command = [sys.executable, *COMMAND[1:]]
    environment = os.environ | {
        RUN_DIR_VARIABLE: str(run_dir),
        BACKEND_VARIABLE: "local",
        LAUNCH_DIR_VARIABLE: str(Path.cwd()),
    }
    process = subprocess.Popen(command, cwd=run_dir / "code", env=environment)
    (run_dir / PROCESS_FILE).write_text(str(process.pid))
    return LocalRun(run_dir, process, new, latest)


class PastRun:
    """Laptop: a run known by its directory, started by another process."""

    def __init__(self, run_dir: Path) -> None:
        self.id = str(run_dir)
        self.run_dir = run_dir

    def summary(self) -> dict[str, Any]:
        """What the run has written of itself so far."""
        try:
            found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        except (OSError, ValueError):
            return {"status": "starting"}
        return found if isinstance(found, dict) else {}

    def process_id(self) -> int | None:
        """The process on this machine that runs it, None where it has ended."""
        try:
            number = int((self.run_dir / PROCESS_FILE).read_text())
            os.kill(number, 0)
        except (OSError, ValueError):
            return None
        with contextlib.suppress(OSError):
            # Numbers of processes are used again.
            command = Path(f"/proc/{number}/cmdline").read_bytes()
            return number if COMMAND[1].encode() in command else None
        return number

    def status(self) -> str:
        found = self.summary()
        status = str(found.get("status", "unknown"))
        if status in ("running", "starting") and self.process_id() is None:
            return f"failed: it ended without a word after step {found.get('steps', 0)}; see logs/driver.log"
        parts = [status]
        if found.get("error"):
            parts.append(str(found["error"]))
        if found.get("steps"):
            parts.append(f"step {found['steps']}, epoch {found.get('epochs', 0)}")
        metrics = found.get("metrics")
        last = metrics.get("last") if isinstance(metrics, dict) else None
        known = finite(last) if isinstance(last, dict) else {}
        parts += [f"{name} {value:.4f}" for name, value in known.items()]
        return "  ".join(parts)

    def logs(self, follow: bool = False) -> Iterator[str]:
        yield from log_lines(self.run_dir, follow, lambda: self.process_id() is not None)

    def wait(self) -> int:
        while self.process_id() is not None:
            time.sleep(0.5)
        return 0 if self.summary()["status"] == "succeeded" else 1

    def stop(self) -> None:
        number = self.process_id()
        if number is None:
            raise UsageError(f"{self.id}: this run has ended: {self.status()}")
        os.kill(number, signal.SIGTERM)


def attach(run_id: str) -> PastRun:
    """Laptop: a run by its directory.

    Raises:
        UsageError: no run lies there.
    """
    run_dir = Path(run_id).resolve()
    if not (run_dir / "code").is_dir() and not (run_dir / "summary.json").is_file():
        raise UsageError(f"{run_id}: no run directory, and no id of the form ray:… or sagemaker:…")
    return PastRun(run_dir)


BACKEND = Backend(
    name="local",
    plan=lambda job, options, resume: plan(job, resume.run_dir),
    submit=submit,
    attach=attach,
    options=("dashboard",),
)


def log_lines(run_dir: Path, follow: bool, alive: Callable[[], bool]) -> Iterator[str]:
    """Laptop: what the run showed, line by line; with `follow` until it has ended."""
    path = run_dir / "logs" / "console.log"
    while follow and not path.exists() and alive():
        time.sleep(0.2)
    if not path.exists():
        return
    with path.open() as file:
        while True:
            running = follow and alive()
            yield from (line.rstrip("\n") for line in file)
            if not running:
                return
            time.sleep(0.3)
