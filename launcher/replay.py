"""Laptop: `submit.py replay RUN`: sends a finished run, or its missing parts, to MLflow."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stoker.config.extras import refuse_missing
from stoker.config.loading import describe
from stoker.config.schema import Config, MlflowConfig, TrackingConfig
from stoker.errors import UsageError
from stoker.events.mlflow_sender import MlflowSender, run_tags
from stoker.events.runs import flat_config
from stoker.events.summary import Summary

SECTION = "tracking.mlflow."


def replay(run: str, uri: str | None, registered_model: str | None) -> int:
    """Laptop: bring MLflow up to date with a run directory.

    Args:
        run: the run directory.
        uri: the server; default: the run's own `tracking.mlflow.uri`.
        registered_model: register the model under this name; default: the run's own.

    Returns:
        The exit code: 1 if the server did not accept everything.

    Raises:
        UsageError: the run does not exist or is still running, or no server is named.
    """
    run_dir = Path(run).resolve()
    summary = _summary(run_dir)
    config = flat_config(run_dir)
    settings = _settings(config, uri, registered_model)
    if not settings.uri:
        raise UsageError(f"{run}: was not tracked by MLflow; name a server with --uri http://…")
    refuse_missing(Config(tracking=TrackingConfig(mlflow=settings)))
    tags = run_tags(config.get("script") or config["recipe"], summary.backend, run_dir / "code")

    def tell(text: str) -> None:
        print(text, file=sys.stderr)

    sender = MlflowSender(settings, config["name"], run_dir, tags, run_dir / "model", tell=tell)
    sender.start()
    sender.close(summary)
    if sender.done:
        print(f"sent: {summary.tracking['mlflow'].get('url') or summary.tracking['mlflow']['run_id']}")
    return 0 if sender.done else 1


def _summary(run_dir: Path) -> Summary:
    try:
        summary = Summary.model_validate_json((run_dir / "summary.json").read_text())
    except (OSError, ValidationError) as error:
        raise UsageError(f"{run_dir}: not a run directory: {str(error).splitlines()[0]}") from None
    if summary.status == "running":
        raise UsageError(f"{run_dir}: still running or ended without a result; replay needs a finished run")
    return summary


def _settings(config: dict[str, Any], uri: str | None, registered_model: str | None) -> MlflowConfig:
    given = {"uri": uri, "registered_model": registered_model}
    # Only the MLflow keys: a run of an earlier version may contain removed keys.
    known = {name: config[SECTION + name] for name in MlflowConfig.model_fields if SECTION + name in config}
    tags = SECTION + "tags."
    known["tags"] = {key.removeprefix(tags): config[key] for key in config if key.startswith(tags)}
    try:
        return MlflowConfig(**{**known, **{key: value for key, value in given.items() if value}})
    except ValidationError as error:
        raise UsageError(*(describe(e, MlflowConfig, "tracking.mlflow") for e in error.errors())) from None
