"""Notebook or job task: `stoker.run(…)`: a job as a child process, on the Ray cluster of this process.

    result = stoker.run("job.yaml", "train.epochs=3")

The child runs the command that every place runs, so a crash of the job leaves the notebook as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import secrets
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from launcher import databricks, runs
from launcher.commands import check_recipe, refuse_unsupported
from launcher.job import Job, beside, example_file, open_job
from launcher.notebook_run import NotebookRequest, RunResult, submit
from launcher.places import place_named
from launcher.places.ray import jobs as ray_jobs
from launcher.resuming import resolve
from launcher.scripts import as_overrides, located
from stoker.config.extras import refuse_missing
from stoker.config.loading import Resolved, load, parse_yaml
from stoker.config.redaction import learn_job
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.place import BACKEND_VARIABLE, LASTING_DIR_VARIABLE, LAUNCH_DIR_VARIABLE, RUN_DIR_VARIABLE

ORIGIN = "stoker.run"
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+")


class RunError(RuntimeError):
    """Notebook: a run ended with an exit code other than 0; `result` has the code and the run directory."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(f"exit code {result.code}: {result.error or result.status} (run: {result.run_dir})")
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
    if started.interrupted:
        raise RunInterrupt(result)
    if check and result.code:
        raise RunError(result)
    return result


def plan(
    config: str | Path | Mapping[str, Any],
    overrides: tuple[str, ...] = (),
    address: str = "auto",
    source_dir: str | Path | None = None,
    resume: str | None = None,
    arguments: list[str] | None = None,
) -> NotebookRequest:
    """Notebook: check the job and find the cluster; starts nothing. Arguments and errors as `run`."""
    cluster = cluster_at(address)
    place = place_named("ray" if cluster else "local")
    given, own, folder = described(config, arguments, Path(source_dir).expanduser() if source_dir else None)
    resume = str(Path(resume).expanduser()) if resume and resume[0] == "~" else resume
    words = [*own, *overrides]
    found = resolve(resume, place, load(given, words, ORIGIN).config)
    resolved, tracked = with_mlflow(given, [*words, *found.overrides()])
    learn_job(resolved.config.model_dump(mode="json"))
    script = located(resolved, folder)[1] if resolved.config.script is not None else None
    with as_they_are_now(resolved.config, script or folder or beside(resolved)):
        job = open_job(resolved, folder)
        refuse_unsupported(resolved.config, place)
        refuse_missing(resolved.config)
        if resolved.config.script is None:
            check_recipe(job, local=cluster is None)
    variables = {LAUNCH_DIR_VARIABLE: str(Path.cwd()), **tracked.environment}
    notes = [tracked.note] if tracked.note else []
    if cluster is None:
        run_dir = found.run_dir or runs.new_run_dir(job)
        variables |= {BACKEND_VARIABLE: "local", RUN_DIR_VARIABLE: str(run_dir)}
        return NotebookRequest(job, run_dir, None, None, variables, tuple(notes))
    run_dir, lasting = folders(job)
    if ray_jobs.find_token() is None:
        notes.append("no token: anyone who can reach this cluster can run code on it")
    variables |= {BACKEND_VARIABLE: "ray", RUN_DIR_VARIABLE: str(run_dir), "RAY_TRAIN_V2_ENABLED": "1"}
    variables |= {"RAY_ADDRESS": cluster} | ({LASTING_DIR_VARIABLE: str(lasting)} if lasting else {})
    return NotebookRequest(job, run_dir, lasting, cluster, variables, tuple(notes))


def cluster_at(address: str) -> str | None:
    """Notebook: the cluster's `host:port`; None for one of this machine.

    Raises:
        UsageError: there is none, or the address has another form.
    """
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


def described(
    config: str | Path | Mapping[str, Any], arguments: list[str] | None, source_dir: Path | None
) -> tuple[Path | Mapping[str, Any] | None, list[str], Path | None]:
    """Notebook: (YAML file or content, overrides, source folder) of whatever describes the job."""
    if isinstance(config, str) and ("\n" in config or (": " in config and not Path(config).exists())):
        config = parse_yaml(config, "config")
    if isinstance(config, Mapping):
        if source_dir is None and here_is_recipe(config):
            source_dir = Path.cwd()
        _, own = as_overrides(None, arguments)
        return config, own, source_dir
    path = Path(example_file(str(config)) if str(config).startswith("example:") else config).expanduser()
    file, own = as_overrides(path, arguments)
    return file, own, source_dir


def here_is_recipe(config: Mapping[str, Any]) -> bool:
    """Notebook: whether the current folder has the module of a job's recipe."""
    module = str(config.get("recipe", "")).partition(":")[0].split(".")[0]
    return bool(module) and (Path(f"{module}.py").is_file() or Path(module).is_dir())


def with_mlflow(
    given: Path | Mapping[str, Any] | None, words: list[str]
) -> tuple[Resolved, databricks.Tracked]:
    """Notebook: the configuration; on Databricks, MLflow is the notebook's unless the job sets it."""
    resolved = load(given, words, ORIGIN)
    if not databricks.inside() or any(key.startswith("tracking.mlflow.") for key in resolved.origins):
        return resolved, databricks.Tracked()
    tracked = databricks.mlflow_of_notebook()
    ours = {word.partition("=")[0]: "Databricks" for word in tracked.overrides}
    resolved = load(given, [*words, *tracked.overrides], ORIGIN)
    return replace(resolved, origins=resolved.origins | ours), tracked


def folders(job: Job) -> tuple[Path, Path | None]:
    """Notebook: the run directory of a run on a cluster and, for a volume, where what lasts is written.

    Raises:
        UsageError: the hosts do not share `output_dir`, or it cannot be written.
    """
    output = job.resolved.config.output_dir
    if not Path(output).is_absolute():
        raise UsageError(
            f"output_dir: must be an absolute folder that all hosts of the cluster share (got {output!r});"
            " on Databricks, one in a volume: /Volumes/<catalog>/<schema>/<volume>/runs"
        )
    if not databricks.on_volume(output):
        return _own(runs.new_run_dir(job)), None
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output_dir: {output} cannot be written: {error.strerror}") from None
    taken = _own(runs.named(job, Path(output)))
    return databricks.scratch() / taken.name, taken


@contextlib.contextmanager
def as_they_are_now(config: Config, folder: Path | None) -> Iterator[None]:
    """Notebook: import a job's modules anew in this block; the notebook's own are back after it.

    A notebook's process lives on, and the job's own process reads the files as they are now.

    Args:
        config: names modules.
        folder: the job's source, all of whose modules are meant; None: Stoker's own.
    """
    top = {path.stem for path in folder.iterdir()} if folder is not None and folder.is_dir() else set()
    named = (name for name in (config.recipe, config.data.prepare) if name and ":" in name)
    top |= {name.partition(":")[0].partition(".")[0] for name in named}
    top -= {"stoker", "launcher", "__main__"}
    # Also of environments below this one, as on Databricks: some packages cannot be imported twice.
    installed = re.compile(rf"{re.escape(sysconfig.get_path('stdlib'))}/|.*/(site|dist)-packages/")

    def users() -> dict[str, ModuleType]:
        found = {}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in top:
                at = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
                if at and not installed.match(at):
                    found[name] = module
        return found

    before = users()
    for name in before:
        del sys.modules[name]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for name in users():
            del sys.modules[name]
        sys.modules.update(before)


def _own(run_dir: Path) -> Path:
    """A name that no other run gets: tasks that start in the same second see no folder of each other yet."""
    return run_dir.with_name(f"{run_dir.name}-{secrets.token_hex(2)}")
