"""Notebook or job task: `stoker.run(…)`: a job as a child process, on the Ray cluster of this process.

    result = stoker.run("job.yaml", "train.epochs=3")

The child runs the command that every place runs, so a crash of the job leaves the notebook as it is.
On Databricks, MLflow is the notebook's experiment, and results may go to a Unity Catalog volume.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from stoker import figures
from stoker.config.loading import Resolved, load, parse_yaml
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
    STOP_FILE,
)
from stoker_launcher import run_directory
from stoker_launcher.commands import check_recipe, refuse_unsupported
from stoker_launcher.job import (
    Job,
    Project,
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
DATABRICKS_VARIABLE = "DATABRICKS_RUNTIME_VERSION"
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
        mlflow = self.job.resolved.config.tracking.mlflow
        if mlflow.uri:
            origin = self.job.resolved.origins.get("tracking.mlflow.uri", "default")
            rows.append(f"mlflow   {mlflow.uri} {mlflow.experiment or self.job.name} ({origin})")
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
    resolved, credentials, notes = with_mlflow(given, [*words, *found.overrides()])
    learn_job(resolved.config.model_dump(mode="json"))
    with as_they_are_now(project_of(resolved, folder)[1]):
        job = open_job(resolved, folder)
        refuse_unsupported(resolved.config, place)
        refuse_missing(resolved.config)
        if resolved.config.script is None:
            check_recipe(job)
    variables = {LAUNCH_DIR_VARIABLE: str(Path.cwd()), **credentials}
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


def with_mlflow(
    given: Path | Mapping[str, Any] | None, words: list[str]
) -> tuple[Resolved, dict[str, str], list[str]]:
    """The configuration; on Databricks, MLflow is the notebook's unless the job sets it.

    With it come the notebook's credentials, which a child process cannot ask for itself, and notes.
    """
    resolved = load(given, words, ORIGIN)
    set_by_job = any(key.startswith("tracking.mlflow.") for key in resolved.origins)
    if DATABRICKS_VARIABLE not in os.environ or set_by_job:
        return resolved, {}, []
    name, environment, note = _mlflow_of_notebook()
    if not name:
        return resolved, {}, [note]
    own = {"tracking.mlflow.uri": "databricks", "tracking.mlflow.experiment": name}
    resolved = load(given, [*words, *(f"{key}={value}" for key, value in own.items())], ORIGIN)
    origins = resolved.origins | dict.fromkeys(own, "Databricks")
    return replace(resolved, origins=origins), environment, []


def _mlflow_of_notebook() -> tuple[str, dict[str, str], str]:
    """The experiment of `mlflow.set_experiment`, which sets a variable, or the notebook's own."""
    if importlib.util.find_spec("mlflow") is None:
        return "", {}, "MLflow: not installed, so runs are not tracked; %pip install mlflow-skinny"
    from mlflow import MlflowClient
    from mlflow.tracking.default_experiment.registry import get_experiment_id
    from mlflow.utils.databricks_utils import get_databricks_env_vars

    try:
        environment = get_databricks_env_vars("databricks")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        number = os.environ.get("MLFLOW_EXPERIMENT_ID") or (None if name else get_experiment_id())
        if number is not None:
            name = MlflowClient("databricks").get_experiment(number).name
    except Exception as error:  # on a foreign platform; the run does not need it
        cause = " ".join(str(error).split()) or type(error).__name__
        return "", {}, f"MLflow: off, because the workspace did not answer as expected: {cause}"
    note = "MLflow: off, because this process has no experiment; call mlflow.set_experiment('/Users/…')"
    return name or "", environment, note


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
def as_they_are_now(project: Project) -> Iterator[None]:
    """Import a job's modules anew in this block, as its own process will; the notebook's are back after it."""
    config, folder = project.config, project.source_dir
    named = [name.partition(":")[0] for name in (config.recipe, config.data.prepare) if name]
    top = {name.partition(".")[0] for name in named}
    top |= {path.stem for path in folder.iterdir()} if folder is not None else set()
    top -= {"stoker", "stoker_launcher", "__main__", *sys.stdlib_module_names}

    def installed(module: ModuleType) -> bool:  # some packages cannot be imported twice
        about = vars(module)
        return "-packages/" in f"{about.get('__file__')} {about.get('__path__')}"

    def own() -> dict[str, ModuleType]:
        names = [name for name in [*sys.modules] if name.split(".")[0] in top]
        return {name: sys.modules.pop(name) for name in names if not installed(sys.modules[name])}

    before = own()
    importlib.invalidate_caches()
    try:
        yield
    finally:
        own()
        sys.modules.update(before)


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
        packed = {} if local else {PACKAGE_VARIABLE: str(_packed(code))}
        with (scratch / LINES).open("wb") as lines:
            process = started(
                code,
                os.environ | request.environment | packed,
                stdout=lines,
                stderr=subprocess.STDOUT,
                # The kernel's interrupts go to its process group; the job gets one each from `wait`.
                start_new_session=True,
            )
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if new:
            run_directory.remove_refused(run_dir, None)
        if isinstance(error, OSError):
            raise UsageError(f"output_dir: {run_dir} cannot be written: {error}") from None
        raise
    return NotebookRun(request, process, scratch, new, latest, earlier)


def _packed(code: Path) -> Path:
    content = ray_jobs.package(code)
    if len(content) > ray_jobs.PACKAGE_LIMIT_BYTES:
        raise UsageError(
            f"source_dir: {figures.size(len(content))} of source, but Ray accepts at most 100 MB;"
            " move data to storage that the hosts share"
        )
    write_private(code.parent / "job.zip", content)
    return code.parent / "job.zip"


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
        (here / STOP_FILE).unlink(missing_ok=True)
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
