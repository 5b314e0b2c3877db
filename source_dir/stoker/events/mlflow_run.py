"""Head, or laptop for a replay: one MLflow run, through MLflow's client. Every call may raise."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stoker.config.redaction import scrub
from stoker.config.schema import MlflowConfig
from stoker.events.summary import Status, Summary

STATUS: dict[Status, str] = {"succeeded": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
METRICS_PER_BATCH = 500
PARAMS_PER_BATCH = 100
LONGEST_PARAM = 6000
LONGEST_TAG = 5000
ARTIFACTS = ("config.yaml", "summary.json", "report.html", "quarantine.jsonl")
NOT_ALLOWED = re.compile(r"[^\w\-. :/]")
"""Characters not allowed in MLflow's names of metrics and parameters."""


def prepare_client(timeout_s: int) -> None:
    """Head: configure MLflow's client, before its import; the user's environment takes precedence.

    Args:
        timeout_s: deadline of one request.
    """
    for name, value in {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(timeout_s),
        # Failed requests are sent again later, from events.jsonl, so retrying here is pointless.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_CONFIGURE_LOGGING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "urllib3", "databricks"):
        # Otherwise they print a warning for each attempt.
        logger = logging.getLogger(name)
        logger.handlers[:] = logging.getLogger("stoker").handlers or [logging.NullHandler()]
        logger.propagate = False


class MlflowRun:
    """Head: a run that exists on the server; created by `open_run`."""

    def __init__(self, client: Any, settings: MlflowConfig, run: Any) -> None:
        self.client, self.settings = client, settings
        self.run_id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id

    @property
    def url(self) -> str | None:
        """The run's address for a browser; None if unknown."""
        uri = (self.settings.uri or "").rstrip("/")
        if not uri.startswith(("http://", "https://")):
            return None
        return f"{uri}/#/experiments/{self.experiment_id}/runs/{self.run_id}"

    def set_params(self, params: dict[str, Any]) -> None:
        """Set parameters; MLflow cannot change existing ones, so changed values become tags."""
        from mlflow.entities import Param

        known = self.client.get_run(self.run_id).data.params
        texts = {NOT_ALLOWED.sub("_", key): str(value)[:LONGEST_PARAM] for key, value in params.items()}
        new = [Param(key, value) for key, value in texts.items() if key not in known]
        for start in range(0, len(new), PARAMS_PER_BATCH):
            self.client.log_batch(self.run_id, params=new[start : start + PARAMS_PER_BATCH])
        self.set_tags(
            {f"stoker.changed.{k}": v for k, v in texts.items() if k in known and known[k] != v},
        )

    def set_tags(self, tags: dict[str, str]) -> None:
        """Set tags, overwriting equal keys."""
        from mlflow.entities import RunTag

        if tags:
            pairs = [RunTag(key, str(value)[:LONGEST_TAG]) for key, value in tags.items()]
            self.client.log_batch(self.run_id, tags=pairs)

    def log(self, metrics: Iterable[tuple[str, float, int, int]]) -> None:
        """Log metrics in one request: (name, value, time in ms since 1970, global step)."""
        from mlflow.entities import Metric

        rows = [Metric(NOT_ALLOWED.sub("_", name), value, at, step) for name, value, at, step in metrics]
        if rows:
            self.client.log_batch(self.run_id, metrics=rows)

    def log_model(self, folder: Path, name: str | None) -> str | None:
        """Log the exported program as an MLflow model, which loads without Stoker and the recipe.

        Args:
            folder: contains model.pt2 and model.json.
            name: register the model under this name; None: do not register it.

        Returns:
            The registered version.
        """
        import mlflow
        import mlflow.pyfunc  # before disable_logging: importing it enables the messages again
        import mlflow.pytorch
        import numpy as np
        import torch
        from mlflow.models import ModelSignature
        from mlflow.types.schema import Schema, TensorSpec
        from mlflow.utils.logging_utils import disable_logging

        about = json.loads((folder / "model.json").read_text())
        program = torch.export.load(folder / "model.pt2")
        columns = [value.numpy() for value in program.example_inputs[0]]
        single = len(columns) == 1

        def schema(specs: list[dict[str, Any]]) -> Any:
            # A single tensor has no name, so that predict() takes and returns plain arrays.
            names = [None] if len(specs) == 1 else [spec["name"] for spec in specs]
            shapes = [(-1, *spec["shape"][1:]) for spec in specs]
            types = [np.dtype(spec["dtype"]) for spec in specs]
            return Schema([TensorSpec(*about) for about in zip(types, shapes, names, strict=True)])

        mlflow.set_tracking_uri(self.settings.uri)
        disable_logging()  # it prints each registration
        with mlflow.start_run(run_id=self.run_id):
            info = mlflow.pytorch.log_model(
                program.module(),
                name="model",
                serialization_format="pt2",
                signature=ModelSignature(schema(about["inputs"]), schema(about["outputs"])),
                input_example=columns[0] if single else tuple(columns),
                registered_model_name=name,
                # Inferring them would load the model in another process.
                pip_requirements=[f"torch=={torch.__version__.split('+')[0]}", "numpy"],
                metadata={"checkpoint": about.get("checkpoint"), "recipe": about.get("recipe")},
            )
        version = info.registered_model_version
        return None if version is None else str(version)

    def log_files(self, run_dir: Path) -> None:
        """Upload the run's files that exist."""
        for name in ARTIFACTS:
            if (run_dir / name).is_file():
                self.client.log_artifact(self.run_id, str(run_dir / name))

    def end(self, status: Status) -> None:
        """Set the final status of the run."""
        self.client.set_terminated(self.run_id, STATUS.get(status, "FINISHED"))


def open_run(
    settings: MlflowConfig, experiment: str, run_name: str, run_id: str | None, tags: dict[str, str]
) -> MlflowRun:
    """Head: the run to write to: an earlier one if the run resumes, or a new one.

    Args:
        settings: the server.
        experiment: created if absent.
        run_name: of a new run.
        run_id: of an earlier start; if the server no longer has it, a new run is created.
        tags: of the run.
    """
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=settings.uri)
    if run_id is not None:
        run = known_run(client, run_id)
        if run is not None:
            client.update_run(run_id, status="RUNNING")
            opened = MlflowRun(client, settings, run)
            opened.set_tags(tags)
            return opened
    found = client.get_experiment_by_name(experiment)
    experiment_id = found.experiment_id if found is not None else client.create_experiment(experiment)
    return MlflowRun(client, settings, client.create_run(experiment_id, run_name=run_name, tags=tags))


def known_run(client: Any, run_id: str) -> Any:
    """Head: a run by its id; None if the server does not have it, or it was deleted."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if is_unknown(error):
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def is_unknown(error: Exception) -> bool:
    """Head: whether the server answers that the object does not exist."""
    return getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST"


def is_refused(error: Exception) -> bool:
    """Head: whether the server rejects the data, so that sending it again is pointless."""
    return getattr(error, "error_code", "") in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


def end_tags(summary: Summary) -> dict[str, str]:
    """Head: tags set at the end of a run."""
    values = {
        "stoker.status": summary.status,
        "stoker.error": summary.error,
        "stoker.bottleneck": summary.bottleneck,
        "stoker.train_workers": summary.train_workers or None,
    }
    return {key: scrub(str(value)) for key, value in values.items() if value is not None}
