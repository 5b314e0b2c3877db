"""Notebook: what Databricks offers a run: the notebook's MLflow experiment and Unity Catalog volumes."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

RUNTIME_VARIABLE = "DATABRICKS_RUNTIME_VERSION"
VOLUMES = "/Volumes/"
LOCAL_DISK = Path("/local_disk0/tmp")
"""The driver's own disk."""


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
    return Tracked(("tracking.mlflow.uri=databricks", f"tracking.mlflow.experiment={name}"), environment)
