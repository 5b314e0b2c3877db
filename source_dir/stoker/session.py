"""Your script: logging to the run and the checkpoint folder. Imports the standard library only.

    stoker.log({"loss": loss.item()}, step)
    torch.save(state, stoker.checkpoint_dir() / "last.pt")

Outside a job, `log` prints one line and the folder is `./checkpoints`.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EVENTS_VARIABLE = "STOKER_EVENTS"
"""The file to which the script appends events and from which its train worker reads them."""
CHECKPOINTS_VARIABLE = "STOKER_CHECKPOINT_DIR"
CPU_HOSTS_VARIABLE = "STOKER_CPU_HOSTS"
"""`cluster.cpu_hosts` as JSON, for the script's loaders."""
SUPERVISOR_VARIABLE, NAMESPACE = "STOKER_SUPERVISOR", "stoker"
"""In all processes of a Ray script: the name of the actor that receives events, and its namespace."""
ATTEMPT_VARIABLE = "STOKER_ATTEMPT"
"""Identical in all train workers of a group start; changes with the next start."""
JOB_VARIABLE = "STOKER_JOB"
"""An id shared by all ranks of a run."""

_last_step = 0


def log(metrics: Mapping[str, Any], step: int | None = None, rank: int | None = 0) -> None:
    """Your script: log the metrics of a step to events.jsonl, the console, TensorBoard and MLflow.

    Args:
        metrics: name → number, or tensor with one element.
        step: the global step; default: the last logged step + 1.
        rank: log on this rank only; None: log on every rank, as `rank-1/loss`.

    Raises:
        TypeError: a value is not a number.
    """
    global _last_step
    join()
    own = int(os.environ.get("RANK") or 0)
    if rank not in (None, own):
        return
    prefix = f"rank-{own}/" if rank is None else ""
    values = {f"{prefix}{name}": _number(name, value) for name, value in metrics.items()}
    _last_step = _last_step + 1 if step is None else int(step)
    if EVENTS_VARIABLE in os.environ or SUPERVISOR_VARIABLE in os.environ:
        tell("metrics", step=_last_step, rank=own, metrics=values)
    else:
        print(metrics_line(_last_step, values), flush=True)


def checkpoint_dir() -> Path:
    """Your script: the run's checkpoint folder, created if missing; it survives restarts."""
    folder = Path(os.environ.get(CHECKPOINTS_VARIABLE) or "checkpoints").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tell(event: str, **values: Any) -> None:
    """Your script: send an event to the run; does nothing outside a job."""
    path = os.environ.get(EVENTS_VARIABLE)
    if path:
        append(path, event, values)
    elif SUPERVISOR_VARIABLE in os.environ:
        import ray

        supervisor = ray.get_actor(os.environ[SUPERVISOR_VARIABLE], namespace=NAMESPACE)
        supervisor.take.remote({"time": round(time.time(), 3), "event": event, **values})


@functools.cache
def join() -> None:
    """Train worker of a Ray script's trainer: report once where it runs."""
    if SUPERVISOR_VARIABLE in os.environ and EVENTS_VARIABLE not in os.environ:
        import ray

        node = ray.get_runtime_context().get_node_id()
        tell("train_worker", rank=int(os.environ.get("RANK") or 0), node=node)


def append(path: str, event: str, values: Mapping[str, Any]) -> None:
    """The script's host: write an event to the file of `EVENTS_VARIABLE`."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **values}) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        # One write, so that lines of several processes do not interleave.
        os.write(file, line.encode())
    finally:
        os.close(file)


def metrics_line(step: int, metrics: Mapping[str, float | None]) -> str:
    shown = [
        f"{name} {'not finite' if value is None else f'{value:.6g}'}"
        for name, value in metrics.items()
    ]
    return "  ".join([f"step {step}", *shown])


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__name__
        raise TypeError(
            f"stoker.log: {name!r} is a {kind}; pass numbers or one-element tensors"
        ) from None
