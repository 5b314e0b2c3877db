"""Anywhere: packages that only some jobs need. Imports none of them."""

from __future__ import annotations

import importlib.util

from stoker.config.schema import Config
from stoker.errors import UsageError

ONNX = {"onnx": "onnx>=1.19", "onnxscript": "onnxscript>=0.5", "onnxruntime": "onnxruntime>=1.22"}
MLFLOW = {"mlflow": "mlflow-skinny>=3"}
DASHBOARD = dict.fromkeys(("aiohttp_cors", "opencensus", "prometheus_client"), "ray[default]")


def needed(config: Config) -> dict[str, dict[str, str]]:
    """Anywhere: the packages a job needs beyond `requirements.txt`.

    Returns:
        Name of the extra → module → the line for `requirements.txt`.
    """
    wanted = {}
    if "onnx" in config.export:
        wanted["onnx"] = ONNX
    if config.tracking.mlflow.uri:
        wanted["mlflow"] = MLFLOW
    if config.cluster.dashboard:
        wanted["dashboard"] = DASHBOARD
    return wanted


def requirement_lines(config: Config) -> list[str]:
    """Laptop: the lines to add to the staged `requirements.txt` for this job."""
    return [line for modules in needed(config).values() for line in modules.values()]


def refuse_missing(config: Config) -> None:
    """Head: raise if packages for the job are not installed, before a cluster is formed.

    Raises:
        UsageError: one line per extra, with the pip command that installs it.
    """
    keys = {"onnx": "export: onnx", "mlflow": "tracking.mlflow.uri", "dashboard": "cluster.dashboard"}
    problems = []
    for extra, modules in needed(config).items():
        absent = [line for module, line in modules.items() if importlib.util.find_spec(module) is None]
        if absent:
            words = " ".join(f"'{line}'" for line in dict.fromkeys(absent))
            problems.append(f"{keys[extra]} needs packages that are not installed here: pip install {words}")
    if problems:
        raise UsageError(*problems)
