"""Every host: SageMaker describes the job in files below `/opt/ml/input/config`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.hosts.services import Service
from stoker.hosts.topology import TopologyError
from stoker.place import SERVICE_JOB_VARIABLE, RunPlace


def base_folder() -> Path:
    return Path(os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml")  # the toolkit may set it


def resource() -> Mapping[str, Any] | None:
    file = base_folder() / "input" / "config" / "resourceconfig.json"
    if not file.is_file():
        return None
    try:
        found: dict[str, Any] = {"network_interface_name": "eth0", **json.loads(file.read_text())}
    except (OSError, ValueError, TypeError) as error:
        raise TopologyError(f"resourceconfig.json: cannot be read: {error}") from None
    return found


def place() -> RunPlace:
    base = base_folder()
    return RunPlace(
        name="sagemaker",
        run_dir=base / "output" / "data",
        checkpoint_dir=base / "checkpoints",
        model_dir=base / "model",
        killed_after_s=120.0,
        synced=True,
        failure=base / "output" / "failure",
        job=os.environ.get(SERVICE_JOB_VARIABLE) or os.environ.get("TRAINING_JOB_NAME", ""),
    )


def hyperparameters() -> dict[str, str]:
    """Hyperparameters.json without SageMaker's own keys; not every entry passes it as arguments.

    Values are text, or JSON if an SDK wrote them; `stoker.config.loading.unquoted` reads both.
    """
    file = base_folder() / "input" / "config" / "hyperparameters.json"
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TopologyError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise TopologyError(f"{file} is no mapping")
    return {
        key: str(value)
        for key, value in found.items()
        if not key.startswith(("sagemaker_", "_tuning_"))
    }


SERVICE = Service(resource=resource, place=place, given=hyperparameters)
