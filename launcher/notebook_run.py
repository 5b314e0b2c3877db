"""Notebook: the process of a job that `stoker.run` starts: its lines, its end, and what stops it."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import runs
from launcher.job import COMMAND, Job
from launcher.places.local import PROCESS_FILE, PastRun
from launcher.places.ray import jobs as ray_jobs
from stoker import figures
from stoker.config.redaction import scrub
from stoker.errors import UsageError
from stoker.hosts.copies import Copies
from stoker.hosts.raynode import end_with_parent
from stoker.place import PACKAGE_VARIABLE, STOP_FILE

POLL_S = 0.5
REACH_S = 10.0


@dataclass(frozen=True)
class RunResult:
    """Notebook: how a run ended."""

    code: int
    """0 done, 1 failed, 2 wrong usage or data, 130 or 143 stopped."""
    run_dir: Path
    """`summary.json`, `events.jsonl`, `report.html`, `checkpoints/`, `model/`."""
    summary: dict[str, Any] = field(repr=False)
    """The content of `summary.json`; empty if the run was refused."""
    error: str = ""
    """The cause of a failure in one line."""

    @property
    def status(self) -> str:
        """succeeded, failed, interrupted, or refused before anything was written."""
        without = {2: "refused", 130: "interrupted", 143: "interrupted"}.get(self.code, "failed")
        return str(self.summary.get("status", without))

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        return dict(self.summary.get("metrics", {}).get("last", {}))

    @property
    def best(self) -> dict[str, float]:
        """The best value of each metric."""
        return dict(self.summary.get("metrics", {}).get("best", {}))


@dataclass(frozen=True)
class NotebookRequest:
    """Notebook: a run before it is started."""

    job: Job
    run_dir: Path
    """On this machine's disk, or on a file system that all hosts share."""
    lasting: Path | None
    """On object storage that all hosts mount: checkpoints and model, and a copy of the run directory."""
    cluster: str | None
    """Address of the Ray cluster; None: one is started on this machine."""
    environment: dict[str, str] = field(repr=False)
    notes: tuple[str, ...] = ()

    def render(self) -> str:
        """The request as it is printed before the run."""
        rows = [f"cluster  {self.cluster or 'of this machine'}", f"results  {self.lasting or self.run_dir}"]
        mlflow = self.job.resolved.config.tracking.mlflow
        if mlflow.uri:
            origin = self.job.resolved.origins.get("tracking.mlflow.uri", "default")
            rows.append(f"mlflow   {mlflow.uri} {mlflow.experiment or self.job.name} ({origin})")
        return scrub("\n".join([*rows, *(f"note: {note}" for note in self.notes)]))


def submit(request: NotebookRequest) -> NotebookRun:
    """Notebook: stage the source and start the job's process.

    Raises:
        UsageError: nothing listens at the cluster's address, the source is too large for it, or the run
            directory cannot be written.
    """
    local = request.cluster is None
    if request.cluster is not None:
        refuse_unreachable(request.cluster)
    new, earlier = not request.run_dir.exists(), _written(request.run_dir)
    code = request.run_dir / "code" if local else Path(tempfile.mkdtemp(prefix="stoker-code-")) / "code"
    try:
        shutil.rmtree(code, ignore_errors=True)  # code of a resumed run
        request.job.stage(code)
        package = code.parent / "job.zip"
        request.run_dir.mkdir(parents=True, exist_ok=True)
        if not local:
            content = ray_jobs.package(code)
            if len(content) > ray_jobs.PACKAGE_LIMIT_BYTES:
                raise UsageError(
                    f"source_dir: {figures.size(len(content))} of source, but Ray accepts at most 100 MB;"
                    " move data to storage that the hosts share"
                )
            package.touch(mode=0o600)
            package.write_bytes(content)
        latest = runs.point_latest(request.run_dir) if local else None
        environment = os.environ | request.environment | ({} if local else {PACKAGE_VARIABLE: str(package)})
        process = subprocess.Popen(
            [sys.executable, *COMMAND[1:]],
            cwd=code,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # The kernel's interrupts go to its process group; the job gets one each from `wait`.
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    except BaseException as error:
        if not local:
            shutil.rmtree(code.parent, ignore_errors=True)
        if new:
            runs.forget(request.run_dir, None)
        if isinstance(error, OSError):
            raise UsageError(f"output_dir: {request.run_dir} cannot be written: {error}") from None
        raise
    if request.lasting is None:
        (request.run_dir / PROCESS_FILE).write_text(str(process.pid))
    return NotebookRun(request, process, None if local else code.parent, new, latest, earlier)


def refuse_unreachable(cluster: str) -> None:
    """Notebook: refuse an address at which nothing listens; Ray itself would try again for minutes.

    Raises:
        UsageError: says why.
    """
    host, _, port = cluster.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"address: no Ray cluster at {cluster}: {why}; is it still running?") from None


class NotebookRun:
    """Notebook: a running job, whose lines are shown by `wait`."""

    def __init__(
        self,
        request: NotebookRequest,
        process: subprocess.Popen[bytes],
        staged: Path | None,
        new: bool,
        latest: str | None,
        earlier: int,
    ) -> None:
        self.request, self.process, self.staged, self.new, self.latest = request, process, staged, new, latest
        self._earlier = earlier
        self.interrupted = False
        self._asked = 0
        self._errors: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._copies = None
        if request.lasting is not None:
            self._copies = Copies({request.run_dir: request.lasting}, self._lines.put)
            self._copies.start()
        # A read in this thread would lose what it has when the cell is interrupted.
        threading.Thread(target=self._read, name="lines", daemon=True).start()

    def wait(self) -> RunResult:
        """Show the job's lines until it ends; forwards interrupts and SIGTERM to it."""
        with self._terminated_too():
            while True:
                try:
                    if self._show():
                        break
                except KeyboardInterrupt:
                    self._interrupt()
            code = self.process.wait()
            (self.request.run_dir / STOP_FILE).unlink(missing_ok=True)
            with _uninterrupted():
                return self._concluded(code)

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(line.decode(errors="replace").rstrip("\n"))
        self._lines.put(None)

    def _show(self) -> bool:
        """Show what there is; whether the job has ended."""
        while True:
            try:
                line = self._lines.get(timeout=POLL_S)
            except queue.Empty:
                # A process that the job left behind may hold the pipe open.
                return self.process.poll() is not None
            if line is None:
                return True
            if self.request.lasting is not None:  # where its files will be, not where they are now
                line = line.replace(str(self.request.run_dir), str(self.request.lasting))
            if line.startswith("error: "):
                self._errors.append(line.removeprefix("error: "))
            print(line, flush=True)

    def _interrupt(self) -> None:
        """The first one asks for a checkpoint and the end, the second one for the end; the third kills."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL if self._asked > 1 else signal.SIGINT)
        self._asked += 1
        self.interrupted = True

    @contextlib.contextmanager
    def _terminated_too(self) -> Iterator[None]:
        """Forward SIGTERM, with which services cancel a task, to the job."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self.process.send_signal(signal.SIGTERM))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _concluded(self, code: int) -> RunResult:
        code, request = (128 - code if code < 0 else code), self.request
        # After a start that failed at once, a resumed run's directory has the summary of the start before.
        summary = PastRun(request.run_dir).summary() if _written(request.run_dir) != self._earlier else {}
        refused = code == 2 and self.new and not summary.get("steps")
        error = "" if code == 0 else "; ".join(self._errors) or str(summary.get("error") or "")
        run_dir = request.lasting or request.run_dir
        if self._copies is not None and refused:
            self._copies.stop()
            shutil.rmtree(run_dir, ignore_errors=True)
        elif self._copies is not None:
            if problem := self._copies.finish():
                run_dir, code = request.run_dir, code or 1
                error = f"{problem}; the run is in {run_dir}"
            else:
                shutil.rmtree(request.run_dir, ignore_errors=True)
        if self.staged is not None:
            shutil.rmtree(self.staged, ignore_errors=True)
        if refused:
            runs.forget(request.run_dir, self.latest)
            summary = {}
        if summary.get("status") == "starting":
            summary = {}
        return RunResult(code, run_dir, summary, scrub(error))


def _written(run_dir: Path) -> int:
    """When the run's summary was last written; 0 if it has none."""
    with contextlib.suppress(OSError):
        return (run_dir / "summary.json").stat().st_mtime_ns
    return 0


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore interrupts while the results are put in their place: half of them would look like all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
