"""Laptop: run the job on a one-machine Ray cluster."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stoker.errors import UsageError
from stoker.hosts.raynode import end_with_parent
from stoker.place import (
    CHECK_VARIABLE,
    LAUNCH_DIR_VARIABLE,
    PLACE_VARIABLE,
    RUN_DIR_VARIABLE,
)
from stoker.scripts.script_checks import script_command_line
from stoker_launcher import run_directory
from stoker_launcher.job import COMMAND, Job
from stoker_launcher.places import Place
from stoker_launcher.run_directory import PastRun, attach

Result = TypeVar("Result")


@dataclass(frozen=True)
class LocalRequest:
    job: Job
    run_dir: Path
    new: bool = True

    def render(self) -> str:
        config = self.job.resolved.config
        data = ", ".join(f"{name} = {value}" for name, value in self.job.data.items())
        return "\n".join(
            [
                f"stage    {self.run_dir}/code",
                f"run      {shlex.join(COMMAND)}",
                f"script   {script_command_line(config)}"
                if config.script
                else f"recipe   {config.recipe}",
                f"data     {data or ('set in the script' if config.script else 'set in the recipe')}",
                f"results  {self.run_dir}",
            ]
        )

    def check(self) -> int:
        """Check the job as its run would, in a staged copy; prints what is wrong; the run's exit code."""
        with tempfile.TemporaryDirectory(prefix="stoker-") as scratch:
            self.job.stage(Path(scratch) / "code", installs=False)
            variables = environment(self.run_dir) | {CHECK_VARIABLE: "1"}
            command = [sys.executable, *COMMAND[1:]]
            done = subprocess.run(
                command,
                cwd=f"{scratch}/code",
                env=variables,
                capture_output=True,
                text=True,
                check=False,
            )
        sys.stderr.write(done.stderr.replace(scratch, str(self.run_dir)))
        return done.returncode


class LocalRun(PastRun):
    def __init__(
        self,
        run_dir: Path,
        process: subprocess.Popen[bytes],
        new: bool = False,
        latest: str | None = None,
    ) -> None:
        super().__init__(run_dir)
        self.process, self.new, self.latest = process, new, latest

    def alive(self) -> bool:
        return self.process.poll() is None

    def status(self) -> str:
        code = self.process.poll()
        return (
            "running" if code is None else "succeeded" if code == 0 else f"failed: exit code {code}"
        )

    def wait(self) -> int:
        interrupt = functools.partial(self.process.send_signal, signal.SIGINT)
        return outlast(self.process, self.process.wait, interrupt, self._concluded)

    def _concluded(self, code: int) -> int:
        if code == 2 and self.new and not self.summary().get("steps"):
            run_directory.remove_refused(self.run_dir, self.latest)
        return code


def outlast(
    process: subprocess.Popen[bytes],
    watch: Callable[[], object],
    interrupt: Callable[[], None],
    conclude: Callable[[int], Result],
) -> Result:
    """Watch a job's process until its end, which after Ctrl-C and SIGTERM comes with a checkpoint.

    SIGTERM is forwarded: notebooks' services and some managers send it to this process only.
    """
    with handled(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM)):
        while True:
            try:
                watch()
                code = process.wait()
                break
            except KeyboardInterrupt:
                with contextlib.suppress(KeyboardInterrupt):
                    interrupt()
        with handled(signal.SIGINT, signal.SIG_IGN):  # half of the results would look like all
            return conclude(128 - code if code < 0 else code)


@contextlib.contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    """Handle a signal in this block; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def plan(job: Job, run_dir: Path | None = None) -> LocalRequest:
    new = run_dir is None or not run_dir.exists()
    return LocalRequest(job, run_dir or run_directory.new_run_dir(job), new)


def submit(request: LocalRequest) -> LocalRun:
    run_dir, new = request.run_dir, request.new
    try:
        if new:
            run_dir = run_directory.create(run_dir)
        request.job.stage(run_directory.replace_code(run_dir), installs=False)
        latest = run_directory.point_latest(run_dir)
    except OSError as error:
        if new:
            run_directory.remove_refused(run_dir, None)
        # copytree raises a list of (source, copy, reason).
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise UsageError(f"output_dir: {run_dir} cannot be written: {why}") from None
    passed: dict[str, Any] = {}
    if threading.current_thread() is not threading.main_thread():
        passed["preexec_fn"] = None  # the kernel counts the end of a thread as that of the launcher
    process = started(run_dir / "code", environment(run_dir), **passed)
    return LocalRun(run_dir, process, new, latest)


def started(code: Path, variables: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """The process of a staged job; a killed launcher stops it like a SIGTERM.

    In a session of its own, it gets Ctrl-C once, from the launcher, whoever sends that.
    """
    options = {"preexec_fn": end_with_parent, "start_new_session": True, **options}
    return subprocess.Popen([sys.executable, *COMMAND[1:]], cwd=code, env=variables, **options)


def environment(run_dir: Path) -> dict[str, str]:
    folders = {LAUNCH_DIR_VARIABLE: str(Path.cwd()), RUN_DIR_VARIABLE: str(run_dir)}
    return os.environ | folders | {PLACE_VARIABLE: "local"}


PLACE = Place(
    name="local",
    plan=lambda job, options, resume: plan(job, resume.run_dir),
    submit=submit,
    attach=attach,
    options=("dashboard",),
)
