"""Notebook or job task: `stoker.run(…)`: a job as a child process, on the Ray cluster of this process.

    result = stoker.run("job.yaml", "train.epochs=3")

The child runs the command that every place runs, so a crash of the job leaves the notebook as it is.
On Databricks, results may go to a Unity Catalog volume.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.config.loading import load, parse_yaml
from stoker.config.redaction import learn_job, scrub
from stoker.config.schema import refuse_missing
from stoker.errors import StokerError, UsageError
from stoker.hosts.output import Copies
from stoker.place import (
    LASTING_DIR_VARIABLE,
    LAUNCH_DIR_VARIABLE,
    PACKAGE_VARIABLE,
    PLACE_VARIABLE,
    RUN_DIR_VARIABLE,
)
from stoker_launcher import run_directory
from stoker_launcher.commands import check_recipe, refuse_unsupported
from stoker_launcher.job import (
    Job,
    as_overrides,
    example_file,
    holds_recipe,
    open_job,
    project_of,
    write_private,
)
from stoker_launcher.places import place_named
from stoker_launcher.places import ray as ray_jobs
from stoker_launcher.places.local import outlast, started
from stoker_launcher.run_directory import PastRun, resolve_resume, written

ORIGIN = "stoker.run"
POLL_S = 0.2
LINES = "lines"
"""What the job writes, which its cell shows: a file outlives an interrupt of the cell better than a pipe."""
REACH_S = 10.0
VOLUMES = "/Volumes/"
LOCAL_DISK = Path("/local_disk0/tmp")
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+")


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


class RunError(StokerError):
    """Notebook: a run ended with an exit code other than 0; `result` has the code and the run directory."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(
            f"exit code {result.code}: {result.error or result.status} (run: {result.run_dir})"
        )
        self.result = result


class RunInterrupt(KeyboardInterrupt):
    """Notebook: the cell was interrupted, and the run has stopped; `result` has its run directory."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(f"stopped with exit code {result.code} (run: {result.run_dir})")
        self.result = result


def run(
    config: str | Path | Mapping[str, Any],
    *overrides: str,
    address: str = "auto",
    source_dir: str | Path | None = None,
    resume: str | None = None,
    arguments: list[str] | None = None,
    check: bool = True,
) -> RunResult:
    """Notebook: run a job on the Ray cluster of this process, or on one of this machine.

    The job's lines appear as they come. Interrupting the cell stops the job with a checkpoint; a second
    interrupt stops it at once.

    Args:
        config: the job: a YAML file, its text, a dictionary, your script (`train.py`), or `example:digits`.
        overrides: `section.key=value`.
        address: `auto`, the cluster that `ray.util.spark.setup_ray_cluster` or `ray.init` gave this process;
            `host:port` of another one that has this machine as a node; `local`, a new one of this machine.
        source_dir: your folder with recipes; default: that of the YAML file, or the current one.
        resume: as `--resume` of the command line.
        arguments: of a script.
        check: raise if the run does not succeed.

    Returns:
        How it ended: exit code, run directory, metrics.

    Raises:
        UsageError: the job or the cluster is wrong; nothing was started.
        RunError: the run did not succeed, and `check` is true.
        RunInterrupt: the cell was interrupted, and the run has stopped.
    """
    request = plan(config, overrides, address, source_dir, resume, arguments)
    print(request.render(), flush=True)
    started = submit(request)
    result = started.wait()
    if started.interrupts:
        raise RunInterrupt(result)
    if check and result.code:
        raise RunError(result)
    return result


@dataclass(frozen=True)
class NotebookRequest:
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
        rows = [
            f"cluster  {self.cluster or 'of this machine'}",
            f"results  {self.lasting or self.run_dir}",
        ]
        return scrub("\n".join([*rows, *(f"note: {note}" for note in self.notes)]))


def plan(
    config: str | Path | Mapping[str, Any],
    overrides: tuple[str, ...] = (),
    address: str = "auto",
    source_dir: str | Path | None = None,
    resume: str | None = None,
    arguments: list[str] | None = None,
) -> NotebookRequest:
    cluster = cluster_at(address)
    place = place_named("ray" if cluster else "local")
    given, own, folder = parse_job(
        config, arguments, Path(source_dir).expanduser() if source_dir else None
    )
    resume = str(Path(resume).expanduser()) if resume and resume[0] == "~" else resume
    words = [*own, *overrides]
    found = resolve_resume(resume, place, load(given, words, ORIGIN).config)
    resolved, notes = load(given, [*words, *found.overrides()], ORIGIN), list[str]()
    learn_job(resolved.config.model_dump(mode="json"))
    with forgotten(project_of(resolved, folder)[1].source_dir):
        job = open_job(resolved, folder)
        refuse_unsupported(resolved.config, place)
        refuse_missing(resolved.config)
        if resolved.config.script is None:
            check_recipe(job)
    variables = mlflow_credentials(resolved.config.tracking.mlflow.uri)
    variables[LAUNCH_DIR_VARIABLE] = str(Path.cwd())
    if cluster is None:
        run_dir, lasting = found.run_dir or _own(run_directory.new_run_dir(job)), None
        variables[PLACE_VARIABLE] = "local"
    else:
        run_dir, lasting = folders(job)
        if ray_jobs.find_token() is None:
            notes.append("no token: anyone who can reach this cluster can run code on it")
        variables |= {PLACE_VARIABLE: "ray", "RAY_TRAIN_V2_ENABLED": "1", "RAY_ADDRESS": cluster}
        variables |= {LASTING_DIR_VARIABLE: str(lasting)} if lasting else {}
    variables[RUN_DIR_VARIABLE] = str(run_dir)
    return NotebookRequest(job, run_dir, lasting, cluster, variables, tuple(notes))


def cluster_at(address: str) -> str | None:
    if address == "local":
        return None
    found = address
    if address == "auto":
        found = os.environ.get("RAY_ADDRESS", "")
        ray = sys.modules.get("ray")
        if not found and ray is not None and ray.is_initialized():
            found = str(ray.get_runtime_context().gcs_address)
        if not found:
            raise UsageError(
                "address='auto': this process has no Ray cluster; call ray.util.spark.setup_ray_cluster(…)"
                " first, or pass address='local'"
            )
    if not _HOST_AND_PORT.fullmatch(found):
        raise UsageError(
            f"address: must be auto, local or host:port, the first value that setup_ray_cluster returns"
            f" (got {found!r}); jobs for a dashboard's address are sent with stoker --on ray"
        )
    return found


def parse_job(
    config: str | Path | Mapping[str, Any], arguments: list[str] | None, source_dir: Path | None
) -> tuple[Path | Mapping[str, Any] | None, list[str], Path | None]:
    """(YAML file or content, overrides, source folder) of whatever describes the job."""
    if isinstance(config, str) and ("\n" in config or ": " in config):
        config = parse_yaml(config, "config")
    if isinstance(config, Mapping):
        if source_dir is None and holds_recipe(Path(), str(config.get("recipe", ""))):
            source_dir = Path.cwd()
        return config, as_overrides(None, arguments)[1], source_dir
    named = example_file(str(config)) if str(config).startswith("example:") else config
    return *as_overrides(Path(named).expanduser(), arguments), source_dir


def mlflow_credentials(uri: str | None) -> dict[str, str]:
    """Databricks: the notebook's credentials for MLflow, which a child process cannot ask for itself."""
    if uri != "databricks":
        return {}
    from mlflow.utils.databricks_utils import get_databricks_env_vars

    try:
        return dict(get_databricks_env_vars(uri))
    except Exception as error:  # on another platform
        cause = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"tracking.mlflow.uri: no credentials for {uri}: {cause}") from error


def folders(job: Job) -> tuple[Path, Path | None]:
    """The run directory of a run on a cluster and, for a volume, where what lasts is written."""
    output = job.resolved.config.output_dir
    if not Path(output).is_absolute():
        raise UsageError(
            f"output_dir: must be an absolute folder that all hosts of the cluster share (got {output!r});"
            " on Databricks, one in a volume: /Volumes/<catalog>/<schema>/<volume>/runs"
        )
    if not output.startswith(VOLUMES):
        return _own(run_directory.new_run_dir(job)), None
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output_dir: {output} cannot be written: {error.strerror}") from None
    taken = _own(run_directory.new_run_path(job, Path(output)))
    scratch = LOCAL_DISK if LOCAL_DISK.is_dir() else Path(tempfile.gettempdir())
    return scratch / "stoker-runs" / taken.name, taken


def _own(run_dir: Path) -> Path:
    """A name that no other run gets: tasks that start in the same second see no folder of each other yet."""
    return run_dir.with_name(f"{run_dir.name}-{secrets.token_hex(2)}")


@contextlib.contextmanager
def forgotten(folder: Path | None) -> Iterator[None]:
    """Forget the modules of a job's folder that this block imports, so that the next run reads edited ones."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            file = Path(getattr(sys.modules[name], "__file__", None) or "/")
            # A virtual environment may lie in the folder, and torch loads only once per process.
            installed = {"site-packages", "dist-packages"}
            if (
                folder
                and file.is_relative_to(folder)
                and installed.isdisjoint(file.relative_to(folder).parts)
            ):
                del sys.modules[name]


def submit(request: NotebookRequest) -> NotebookRun:
    local, run_dir = request.cluster is None, request.run_dir
    if request.cluster is not None:  # Ray itself would try again for minutes
        host, _, port = request.cluster.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        except OSError as error:
            at, why = request.cluster, error.strerror or str(error)
            raise UsageError(
                f"address: no Ray cluster at {at}: {why}; is it still running?"
            ) from None
    new, earlier = not run_dir.exists(), written(run_dir)
    scratch = Path(tempfile.mkdtemp(prefix="stoker-run-"))
    code = run_directory.replace_code(run_dir if local else scratch)
    try:
        request.job.stage(code)
        run_dir.mkdir(parents=True, exist_ok=True)
        latest = run_directory.point_latest(run_dir) if local else None
        packed = {}
        if not local:
            write_private(scratch / "job.zip", ray_jobs.package(code))
            packed = {PACKAGE_VARIABLE: str(scratch / "job.zip")}
        with (scratch / LINES).open("wb") as lines:
            process = started(
                code,
                os.environ | request.environment | packed,
                stdout=lines,
                stderr=subprocess.STDOUT,
            )
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if new:
            run_directory.remove_refused(run_dir, None)
        if isinstance(error, OSError):
            raise UsageError(f"output_dir: {run_dir} cannot be written: {error}") from None
        raise
    return NotebookRun(request, process, scratch, new, latest, earlier)


@dataclass
class NotebookRun:
    request: NotebookRequest
    process: subprocess.Popen[bytes]
    scratch: Path
    """Its lines, and on a cluster its code."""
    new: bool
    latest: str | None
    earlier: int
    """When an earlier start in the run directory wrote its summary."""
    interrupts: int = 0

    def __post_init__(self) -> None:
        self._errors: list[str] = []
        self._log = run_directory.GrowingLog(self.scratch / LINES)
        run_dir, lasting = self.request.run_dir, self.request.lasting
        self._copies = Copies({run_dir: lasting}) if lasting else None
        if self._copies is not None:
            self._copies.start()

    def wait(self) -> RunResult:
        return outlast(self.process, self._show, self._interrupt, self._concluded)

    def _show(self) -> None:
        """Show the job's lines until it ends."""
        while True:
            ended = self.process.poll() is not None
            for line in self._log.lines(ended):
                self._show_line(line)
            if ended:
                return
            time.sleep(POLL_S)

    def _show_line(self, line: str) -> None:
        if self.request.lasting is not None:  # where its files will be, not where they are now
            line = line.replace(str(self.request.run_dir), str(self.request.lasting))
        if line.startswith("error: "):
            self._errors.append(line.removeprefix("error: "))
        print(line, flush=True)

    def _interrupt(self) -> None:
        """The first one asks for a checkpoint and the end, the second one for the end; the third kills."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL if self.interrupts > 1 else signal.SIGINT)
        self.interrupts += 1

    def _concluded(self, code: int) -> RunResult:
        here, run_dir = self.request.run_dir, self.request.lasting or self.request.run_dir
        # After a start that failed at once, a resumed run's directory has the summary of the start before.
        summary = PastRun(here).summary() if written(here) != self.earlier else {}
        refused = code == 2 and self.new and not summary.get("steps")
        error = "" if code == 0 else "; ".join(self._errors) or str(summary.get("error") or "")
        if self._copies is not None and refused:
            self._copies.stop()
            shutil.rmtree(run_dir, ignore_errors=True)
        elif self._copies is not None:
            if problem := self._copies.finish():
                run_dir, code, error = here, code or 1, f"{problem}; the run is in {here}"
            else:
                shutil.rmtree(here, ignore_errors=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        if refused:
            run_directory.remove_refused(here, self.latest)
        if refused or summary.get("status") == "starting":
            summary = {}
        return RunResult(code, run_dir, summary, scrub(error))
