"""Your script: what it tells its run, and where its checkpoints lie. The standard library alone.

    stoker.log({"loss": loss.item()}, step)
    torch.save(state, stoker.checkpoint_dir() / "last.pt")

Outside a job `log` prints one line and the folder is `./checkpoints`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EVENTS_VARIABLE = "STOKER_EVENTS"
"""The file that a script's process appends events to and its train worker reads."""
CHECKPOINTS_VARIABLE = "STOKER_CHECKPOINT_DIR"
JOB_VARIABLE = "STOKER_JOB"
"""An id that all ranks of a run have in common."""

_last_step = 0


def log(metrics: Mapping[str, Any], step: int | None = None, rank: int | None = 0) -> None:
    """Your script: metrics of a step, for events.jsonl, the screen, TensorBoard and MLflow.

    Args:
        metrics: name → number, or a tensor of one number.
        step: the global step; default: the one after the last that was logged.
        rank: the rank whose calls count; None: every rank's, as `rank-1/loss`.

    Raises:
        TypeError: a value is no number.
    """
    global _last_step
    own = int(os.environ.get("RANK") or 0)
    if rank not in (None, own):
        return
    prefix = f"rank-{own}/" if rank is None else ""
    values = {f"{prefix}{name}": _number(name, value) for name, value in metrics.items()}
    _last_step = _last_step + 1 if step is None else int(step)
    if EVENTS_VARIABLE in os.environ:
        tell("metrics", step=_last_step, rank=own, metrics=values)
    else:
        print(metrics_line(_last_step, values), flush=True)


def checkpoint_dir() -> Path:
    """Your script: the folder of the run's checkpoints, the same one after a restart; it exists."""
    folder = Path(os.environ.get(CHECKPOINTS_VARIABLE) or "checkpoints").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tell(event: str, **values: Any) -> None:
    """Your script: one event for the run; outside a job nobody takes it."""
    path = os.environ.get(EVENTS_VARIABLE)
    if path:
        line = json.dumps({"time": round(time.time(), 3), "event": event, **values}) + "\n"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())  # at once, so that lines of several processes do not mix
        finally:
            os.close(file)


def metrics_line(step: int, metrics: Mapping[str, float | None]) -> str:
    """Anywhere: metrics of a step in one line."""
    shown = [f"{name} {'not finite' if value is None else f'{value:.6g}'}" for name, value in metrics.items()]
    return "  ".join([f"step {step}", *shown])


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__name__
        raise TypeError(f"stoker.log: {name!r} is a {kind}; give numbers, or tensors of one number") from None
