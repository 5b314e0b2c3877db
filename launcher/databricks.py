"""Notebook: what Databricks offers a run: the notebook's MLflow experiment and Unity Catalog volumes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stoker.redaction import scrub

RUNTIME_VARIABLE = "DATABRICKS_RUNTIME_VERSION"
VOLUMES = "/Volumes/"
LOCAL_DISK = Path("/local_disk0/tmp")
"""The driver's own disk."""
COPY_EVERY_S = 20.0


@dataclass(frozen=True)
class Tracked:
    """Notebook: MLflow as Databricks provides it."""

    overrides: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """The notebook's credentials, which a child process cannot ask for itself."""
    note: str = ""


def inside() -> bool:
    """Notebook: whether this process runs on Databricks."""
    return RUNTIME_VARIABLE in os.environ


def on_volume(path: str) -> bool:
    """Notebook: whether a path lies in a Unity Catalog volume."""
    return path.startswith(VOLUMES)


def scratch() -> Path:
    """Notebook: the folder for run directories that are copied to a volume."""
    return (LOCAL_DISK if LOCAL_DISK.is_dir() else Path(tempfile.gettempdir())) / "stoker-runs"


def mlflow_of_notebook() -> Tracked:
    """Notebook: the configuration that sends a run to the notebook's experiment.

    The experiment is that of `mlflow.set_experiment`, which sets a variable, or the notebook's own.
    """
    if importlib.util.find_spec("mlflow") is None:
        return Tracked(note="MLflow: not installed, so this run is not tracked; %pip install mlflow-skinny")
    from mlflow import MlflowClient
    from mlflow.tracking.default_experiment.registry import get_experiment_id
    from mlflow.utils.databricks_utils import get_databricks_env_vars

    try:
        environment = get_databricks_env_vars("databricks")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        number = os.environ.get("MLFLOW_EXPERIMENT_ID") or (None if name else get_experiment_id())
        if number is not None:
            name = MlflowClient("databricks").get_experiment(number).name
    except Exception as error:  # whatever the client meets on a foreign platform; the run does not need it
        cause = " ".join(str(error).split()) or type(error).__name__
        return Tracked(note=f"MLflow: off, because the workspace did not answer as expected: {cause}")
    if not name:
        return Tracked(
            note="MLflow: off, because this process has no experiment; call mlflow.set_experiment('/Users/…')"
        )
    return Tracked(
        ("tracking.mlflow.uri=databricks", f"tracking.mlflow.experiment={json.dumps(name)}"), environment
    )


class Copies:
    """Notebook: copies a run directory to a volume, which can neither append to a file nor change part of it.

    Args:
        source: the run directory on this machine's disk.
        target: its folder in the volume.
        tell: receives a line when copying fails.
    """

    def __init__(self, source: Path, target: Path, tell: Callable[[str], None]) -> None:
        self.source, self.target, self.tell = source, target, tell
        self._copied: dict[str, tuple[int, int]] = {}
        self._ended = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)

    def start(self) -> None:
        """Copy what is new every `COPY_EVERY_S`."""
        self._thread.start()

    def finish(self) -> None:
        """Copy the rest.

        Raises:
            OSError: the volume does not take it.
        """
        self.stop()
        self.copy()

    def stop(self) -> None:
        """Copy nothing more."""
        self._ended.set()
        self._thread.join()

    def copy(self) -> None:
        """Copy the files that have changed since the last call.

        Raises:
            OSError: the first problem; it does not keep the other files from being copied.
        """
        problem: OSError | None = None
        for path in sorted(self.source.rglob("*")):
            try:
                self._copy_file(path)
            except FileNotFoundError as error:
                if path.exists():  # else it was renamed meanwhile
                    problem = problem or error
            except OSError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _copy_file(self, path: Path) -> None:
        stat = path.stat()
        name, state = str(path.relative_to(self.source)), (stat.st_size, stat.st_mtime_ns)
        if path.name.startswith(".") or not path.is_file() or self._copied.get(name) == state:
            return
        target = self.target / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        self._copied[name] = state

    def _work(self) -> None:
        while not self._ended.wait(COPY_EVERY_S):
            try:
                self.copy()
                self._failing = False
            except OSError as error:
                if not self._failing:
                    self.tell(scrub(f"{self.target}: cannot be written now ({error.strerror}); trying again"))
                self._failing = True
