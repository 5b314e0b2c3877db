"""Head: sends a run's metrics, files and model to MLflow without ever delaying training.

One thread does all communication and sends in batches what has gathered. MLflow's own asynchronous logging
drops a batch after some attempts, and holds the process at its end until a dead server answers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stoker
from stoker.config.redaction import redact, scrub
from stoker.config.schema import Config, MlflowConfig
from stoker.events import kinds
from stoker.events.kinds import Event, HostCpu
from stoker.events.runs import flat_config
from stoker.events.sinks import Scalars, Sink
from stoker.events.summary import Status, Summary
from stoker.place import COMMIT_FILE, RunPlace
from stoker.storage.checkpoint_store import CheckpointStore, open_store

SEND_EVERY_S = 2.0
RETRY_EVERY_S = 15.0
LAST_RETRY_S = 3.0
INTERRUPTED_S = 20.0
"""Limit after an interruption, whatever `close_timeout_s` says: the instance may be reclaimed."""
STATE = "mlflow.json"
ELSEWHERE = ("sagemaker.", "vertex.", "slurm.", "rehearsal.")
STATUS: dict[Status, str] = {"succeeded": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
METRICS_PER_BATCH = 500
PARAMS_PER_BATCH = 100
LONGEST_PARAM = 6000
LONGEST_TAG = 5000
ARTIFACTS = ("config.yaml", "summary.json", "report.html", "quarantine.jsonl")
NOT_ALLOWED = re.compile(r"[^\w\-. :/]")

MetricRow = tuple[str, float, int, int]
"""Name, value, time in ms since 1970, global step."""


class MlflowSink(Sink):
    def __init__(
        self,
        settings: MlflowConfig,
        name: str,
        run_dir: Path,
        tags: dict[str, str],
        model_dir: Path | None = None,
        kept: CheckpointStore | None = None,
        *,
        tell: Callable[[str], None],
    ) -> None:
        self.settings, self.run_dir, self.model_dir, self.tell = settings, run_dir, model_dir, tell
        # Shown and written, with secrets removed; the client gets `settings.uri`.
        self.uri, self.experiment = str(redact(settings.uri)), settings.experiment or name
        self.tags = {**tags, **redact(settings.tags)}
        self.stores = [open_store(str(run_dir)), *([kept] if kept is not None else [])]
        self.run_id = next(filter(None, map(self._known_id, self.stores)), None)
        self.model_version: str | None = None
        self.model_sent = False
        self.client: Any = None
        self.opened = False
        self.url: str | None = None
        self.rows: deque[MetricRow] = deque()
        """Not sent so far."""
        self.failing: str | None = None
        """The last error; None while the server accepts data."""
        self.complete = False
        """Whether the server has all that the end of the run sends: best values, tags, model, files, status."""
        self.scalars = Scalars()
        known = kinds.Resumed, kinds.RecordsCounted, kinds.EpochEnded, kinds.MetricsLogged
        for event in kinds.read_events(run_dir / "events.jsonl", known):
            self.scalars.of(event)  # totals go on from those of an earlier start
        self._closing = threading.Event()
        self._summary = Summary()
        prepare_client(settings.timeout_s)
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def on_event(self, event: Event) -> None:
        values, at = self.scalars.of(event), round(1000 * event.time)
        if not isinstance(event, HostCpu) or self.settings.system_metrics:
            self.rows += [
                (name, float(value), at, self.scalars.step) for name, value in values.items()
            ]

    def close(self, summary: Summary) -> None:
        self._summary = summary
        limit = self.settings.close_timeout_s
        if summary.status == "interrupted":
            limit = min(limit, INTERRUPTED_S)
        self._closing.set()
        self._thread.join(limit)
        if self._thread.is_alive():
            self.failing = f"not done within {limit:.0f} s"
        if not self.complete:
            self.tell(
                f"MLflow at {self.uri} lacks part of this run ({self.failing}): {len(self.rows)} metric values,"
                f" and the tags, files, model and status of its end; all of it is in {self.run_dir}"
            )

    def about(self) -> dict[str, Any]:
        about = {
            "uri": self.uri,
            "experiment": self.experiment,
            "run_id": self.run_id,
            "url": self.url,
            "registered_model": self.settings.registered_model if self.model_version else None,
            "model_version": self.model_version,
        }
        return {"mlflow": {key: value for key, value in about.items() if value is not None}}

    def _work(self) -> None:
        pause = SEND_EVERY_S
        while not self._closing.wait(pause):
            pause = SEND_EVERY_S if self._attempt(self._send) else RETRY_EVERY_S
        if not self._attempt(self._end):
            time.sleep(LAST_RETRY_S)
            self._attempt(self._end)

    def _attempt(self, send: Callable[[], None]) -> bool:
        try:
            send()
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            text = f"{type(error).__name__}: {text}" if len(text) < 300 else text[:300]
            if self.failing is None and not self._closing.is_set():
                self.tell(f"MLflow at {self.uri} does not accept data ({text}); training continues")
            self.failing = text
            return False
        if self.failing is not None:
            self.tell(f"MLflow at {self.uri} answers again; missing data has been sent")
        self.failing = None
        return True

    def _send(self) -> None:
        self._open()
        while self.rows:
            batch = [self.rows[n] for n in range(min(len(self.rows), METRICS_PER_BATCH))]
            try:
                self._log(batch)
            except Exception as error:
                if getattr(error, "error_code", "") != "INVALID_PARAMETER_VALUE":
                    raise
                # Sent again, they would hold up all that follows.
                refused = f"MLflow refuses {len(batch)} metrics up to step {batch[-1][3]}: {error}"
                self.tell(refused[:300])
            for _ in batch:
                self.rows.popleft()

    def _end(self) -> None:
        summary = self._summary
        self._send()
        best, now = summary.metrics.best, round(1000 * time.time())
        self._log([(f"best/{name}", value, now, summary.steps) for name, value in best.items()])
        tags = {
            "stoker.status": summary.status,
            "stoker.error": summary.error,
            "stoker.bottleneck": summary.bottleneck,
            "stoker.train_workers": summary.train_workers or None,
        }
        self._set_tags({key: scrub(str(value)) for key, value in tags.items() if value is not None})
        exported = any(
            e.get("format") == "torch_export" and not e.get("error") for e in summary.exports
        )
        if exported and self.model_dir and summary.status == "succeeded" and not self.model_sent:
            if (self.model_dir / "model.pt2").is_file():
                self.model_version = log_model(self.settings, str(self.run_id), self.model_dir)
            else:
                self.tell("MLflow: the model is on the host of train worker 0, so it is not sent")
            self.model_sent = True
        summary.tracking |= self.about()
        summary.write(self.run_dir)
        for name in ARTIFACTS:
            if (self.run_dir / name).is_file():
                self.client.log_artifact(self.run_id, str(self.run_dir / name))
        self.client.set_terminated(self.run_id, STATUS.get(summary.status, "FINISHED"))
        self.complete = True

    def _known_id(self, store: CheckpointStore) -> str | None:
        """The run of an earlier start that wrote to this server and experiment."""
        try:
            content = json.loads(store.content(STATE))
            same = (content["uri"], content["experiment"]) == (self.uri, self.experiment)
            return content["run_id"] if same else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep_id(self) -> None:
        """Write the run's id where a restart looks for it; the checkpoints' folder comes with the first one."""
        content = {"uri": self.uri, "experiment": self.experiment, "run_id": self.run_id}
        for store in list(self.stores):
            with contextlib.suppress(OSError):
                store.write_note(STATE, json.dumps(content, indent=1))
                self.stores.remove(store)

    def _open(self) -> None:
        if not self.opened:
            from mlflow import MlflowClient

            self.client = MlflowClient(tracking_uri=self.settings.uri)
            if (run := self._known_run()) is None:
                found = self.client.get_experiment_by_name(self.experiment)
                number = found and found.experiment_id
                number = number or self.client.create_experiment(self.experiment)
                name = self.settings.run_name or self.run_dir.name
                run = self.client.create_run(number, run_name=name, tags=self.tags)
            self.run_id = run.info.run_id
            uri = (self.settings.uri or "").rstrip("/")
            if uri.startswith(("http://", "https://")):
                self.url = f"{uri}/#/experiments/{run.info.experiment_id}/runs/{self.run_id}"
            self._set_params(run.data.params)
            self.opened = True
        self._keep_id()

    def _known_run(self) -> Any:
        from mlflow.exceptions import MlflowException

        if self.run_id is None:
            return None
        try:
            run = self.client.get_run(self.run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if run.info.lifecycle_stage != "active":
            return None
        self.client.update_run(self.run_id, status="RUNNING")
        self._set_tags(self.tags)
        return run

    def _set_params(self, known: dict[str, str]) -> None:
        """MLflow cannot change existing parameters, so changed values become tags."""
        from mlflow.entities import Param

        texts = {
            NOT_ALLOWED.sub("_", key): str(value)[:LONGEST_PARAM]
            for key, value in flat_config(self.run_dir).items()
            if not key.startswith(ELSEWHERE) or self.tags.get("stoker.place", "") in key
        }
        new = [Param(key, value) for key, value in texts.items() if key not in known]
        for start in range(0, len(new), PARAMS_PER_BATCH):
            self.client.log_batch(self.run_id, params=new[start : start + PARAMS_PER_BATCH])
        changed = {key: value for key, value in texts.items() if known.get(key, value) != value}
        self._set_tags({f"stoker.changed.{key}": value for key, value in changed.items()})

    def _set_tags(self, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        if tags:
            pairs = [RunTag(key, str(value)[:LONGEST_TAG]) for key, value in tags.items()]
            self.client.log_batch(self.run_id, tags=pairs)

    def _log(self, rows: list[MetricRow]) -> None:
        from mlflow.entities import Metric

        found = [
            Metric(NOT_ALLOWED.sub("_", name), value, at, step) for name, value, at, step in rows
        ]
        if found:
            self.client.log_batch(self.run_id, metrics=found)


def prepare_client(timeout_s: int) -> None:
    """Configure MLflow's client, before its import; the user's environment takes precedence."""
    for name, value in {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(timeout_s),
        # Failed requests are sent again later, so retrying here is pointless.
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


def log_model(settings: MlflowConfig, run_id: str, folder: Path) -> str | None:
    """Log the exported program as an MLflow model, which loads without Stoker and the recipe."""
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

    mlflow.set_tracking_uri(settings.uri)
    disable_logging()  # it prints each registration
    with mlflow.start_run(run_id=run_id):
        info = mlflow.pytorch.log_model(
            program.module(),
            name="model",
            serialization_format="pt2",
            signature=ModelSignature(schema(about["inputs"]), schema(about["outputs"])),
            input_example=columns[0] if single else tuple(columns),
            registered_model_name=settings.registered_model,
            # Inferring them would load the model in another process.
            pip_requirements=[f"torch=={torch.__version__.split('+')[0]}", "numpy"],
            metadata={"checkpoint": about.get("checkpoint"), "recipe": about.get("recipe")},
        )
    version = info.registered_model_version
    return None if version is None else str(version)


def mlflow_sinks(
    config: Config, place: RunPlace, kept: CheckpointStore, tell: Callable[[str], None]
) -> list[MlflowSink]:
    settings = config.tracking.mlflow
    if not settings.uri:
        return []
    tags = {
        "mlflow.source.name": config.script or config.recipe,
        "mlflow.source.type": "JOB",
        "stoker.version": stoker.__version__,
        "stoker.place": place.name,
    }
    with contextlib.suppress(OSError):
        commit = Path(stoker.__file__).resolve().parents[1] / COMMIT_FILE
        tags["mlflow.source.git.commit"] = commit.read_text().strip()
    return [
        MlflowSink(settings, config.name, place.run_dir, tags, place.model_dir, kept, tell=tell)
    ]
