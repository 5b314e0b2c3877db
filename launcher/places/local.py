"""Laptop: run the job on a one-machine Ray cluster."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import runs
from launcher.job import COMMAND, Job
from launcher.places import Place
from stoker.errors import UsageError
from stoker.events.console import metrics_text
from stoker.events.summary import finite
from stoker.hosts.raynode import end_with_parent
from stoker.place import BACKEND_VARIABLE, CHECK_VARIABLE, LAUNCH_DIR_VARIABLE, RUN_DIR_VARIABLE, STOP_FILE
from stoker.scripts.script_checks import command_line

PROCESS_FILE = "process.id"
FORWARD_AFTER_S = 2.0


@dataclass(frozen=True)
class LocalRequest:
    """A local run before it is started: the job and its run directory."""

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
                f"data     {data or ('set in the script' if config.script else 'set in the recipe')}",
                f"results  {self.run_dir}",
            ]
        )

    def check(self) -> int:
        """Check the job as its run would, in a staged copy; prints what is wrong; the run's exit code."""
        with tempfile.TemporaryDirectory(prefix="stoker-") as scratch:
            self.job.stage(Path(scratch) / "code")
            variables = environment(self.run_dir) | {CHECK_VARIABLE: "1"}
            command = [sys.executable, *COMMAND[1:]]
            done = subprocess.run(
                command, cwd=f"{scratch}/code", env=variables, capture_output=True, text=True, check=False
            )
        sys.stderr.write(done.stderr.replace(scratch, str(self.run_dir)))
        return done.returncode


class LocalRun:
    """A running local job; its process writes to this terminal."""

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
        """Block until the end, also after Ctrl-C or SIGTERM, so that a checkpoint is saved; the exit code."""
        with self._terminated_too():
            while True:
                try:
                    code = self.process.wait()
                    (self.run_dir / STOP_FILE).unlink(missing_ok=True)
                    if code == 2 and self.new and not PastRun(self.run_dir).summary().get("steps"):
                        runs.forget(self.run_dir, self.latest)
                    return 128 - code if code < 0 else code
                except KeyboardInterrupt:
                    with contextlib.suppress(KeyboardInterrupt):
                        self._interrupt()

    def _interrupt(self) -> None:
        """Forward SIGINT unless the job has it: a terminal sends it to both, `kill` and IDEs do not."""
        began, file = time.time(), self.run_dir / STOP_FILE
        while self.process.poll() is None and time.time() < began + FORWARD_AFTER_S:
            if file.exists() and file.stat().st_mtime > began - FORWARD_AFTER_S:
                return
            time.sleep(0.1)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    @contextlib.contextmanager
    def _terminated_too(self) -> Iterator[None]:
        """Forward SIGTERM to the job, because service managers and `timeout` send it only to this process."""
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
    """Plan a new run directory, or resume in an earlier one; writes nothing."""
    return LocalRequest(job, run_dir or runs.new_run_dir(job))


def submit(request: LocalRequest) -> LocalRun:
    """Stage the source and start the job's process."""
    run_dir = request.run_dir
    new = not run_dir.exists()
    shutil.rmtree(run_dir / "code", ignore_errors=True)  # code of a resumed run
    try:
        request.job.stage(run_dir / "code")
    except OSError as error:
        if new:
            runs.forget(run_dir, None)
        # copytree raises a list of (source, copy, reason).
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise UsageError(f"output_dir: {run_dir} cannot be written: {why}") from None
    latest = runs.point_latest(run_dir)
    command = [sys.executable, *COMMAND[1:]]
    cwd, variables = run_dir / "code", environment(run_dir)
    # A killed launcher stops its job like a SIGTERM; the kernel counts the end of a thread as that, too.
    end = end_with_parent if threading.current_thread() is threading.main_thread() else None
    process = subprocess.Popen(command, cwd=cwd, env=variables, preexec_fn=end)
    (run_dir / PROCESS_FILE).write_text(str(process.pid))
    return LocalRun(run_dir, process, new, latest)


def environment(run_dir: Path) -> dict[str, str]:
    """The environment of a job's process."""
    place = {BACKEND_VARIABLE: "local", RUN_DIR_VARIABLE: str(run_dir), LAUNCH_DIR_VARIABLE: str(Path.cwd())}
    return os.environ | place


class PastRun:
    """A run that another process started, found by its directory."""

    def __init__(self, run_dir: Path) -> None:
        self.id = str(run_dir)
        self.run_dir = run_dir

    def summary(self) -> dict[str, Any]:
        """The run's `summary.json` so far."""
        try:
            found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        except (OSError, ValueError):
            return {"status": "starting"}
        return found if isinstance(found, dict) else {}

    def process_id(self) -> int | None:
        """The process id of the run on this machine; None after its end."""
        try:
            number = int((self.run_dir / PROCESS_FILE).read_text())
            os.kill(number, 0)
        except (OSError, ValueError):
            return None
        with contextlib.suppress(OSError):
            # Process ids are reused.
            command = Path(f"/proc/{number}/cmdline").read_bytes()
            return number if COMMAND[1].encode() in command else None
        return number

    def status(self) -> str:
        found = self.summary()
        status = str(found.get("status", "unknown"))
        if status in ("running", "starting") and self.process_id() is None:
            last = found.get("steps", 0)
            return f"failed: the process exited without a result (last step: {last}); see logs/driver.log"
        parts = [status]
        if found.get("error"):
            parts.append(str(found["error"]))
        if found.get("steps"):
            epoch = "" if found.get("script") else f", epoch {found.get('epochs', 0)}"
            parts.append(f"step {found['steps']}{epoch}")
        metrics = found.get("metrics")
        last = metrics.get("last") if isinstance(metrics, dict) else None
        known = finite(last) if isinstance(last, dict) else {}
        if found.get("script"):
            parts += [f"{name} {value:.6g}" for name, value in known.items()]
        elif known:  # without the speed of the last epoch: `standing` has that of the run
            parts.append(metrics_text({n: v for n, v in known.items() if not n.startswith("perf/")}))
        return "  ".join(parts)

    def logs(self, follow: bool = False) -> Iterator[str]:
        yield from log_lines(self.run_dir, follow, lambda: self.process_id() is not None)

    def wait(self) -> int:
        while self.process_id() is not None:
            time.sleep(0.5)
        return 0 if self.summary()["status"] == "succeeded" else 1

    def stop(self) -> str | None:
        number = self.process_id()
        if number is None:
            raise UsageError(f"{self.id}: this run has already ended: {self.status()}")
        os.kill(number, signal.SIGTERM)
        return None


def attach(run_id: str) -> PastRun:
    """Find a run by its directory.

    Raises:
        UsageError: the folder is not a run directory.
    """
    run_dir = Path(run_id).resolve()
    if not (run_dir / "code").is_dir() and not (run_dir / "summary.json").is_file():
        if run_dir.name == "latest" and not run_dir.exists():
            raise UsageError(f"{run_id}: there is no run yet; start one, or name a run directory")
        raise UsageError(f"{run_id}: not a run directory, nor an id of a run elsewhere, such as sagemaker:…")
    return PastRun(run_dir)


PLACE = Place(
    name="local",
    plan=lambda job, options, resume: plan(job, resume.run_dir),
    submit=submit,
    attach=attach,
    options=("dashboard",),
)


def log_lines(run_dir: Path, follow: bool, alive: Callable[[], bool]) -> Iterator[str]:
    """The run's console output, line by line; with `follow` until it has ended."""
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
