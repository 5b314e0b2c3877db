"""Train worker and head: when a run has learnt enough, and which metric says so.

Words and meaning of `train.early_stopping` are those of Lightning's EarlyStopping callback
(https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.callbacks.EarlyStopping.html), but for one: an
epoch whose metric is not a finite number has no metric, so it counts as one without improvement.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from stoker.errors import UsageError, nearest
from stoker.recipe import Recipe
from stoker.schema import Config, EarlyStoppingConfig
from stoker.tracking.summary import less_is_better

ALWAYS = ("train/loss", "lr", "perf/samples_per_s", "perf/input_wait_pct")
"""Metrics that every epoch of every run has."""


@dataclass
class EarlyStopping:
    """Train worker: looks at one metric after each epoch."""

    monitor: str
    mode: str
    """min or max."""
    min_delta: float
    patience: int
    stopping_threshold: float | None = None
    best: float | None = None
    wait: int = 0
    """Epochs without improvement."""
    reason: str = ""
    """Why training shall stop, once it shall."""

    @classmethod
    def of(cls, config: EarlyStoppingConfig) -> EarlyStopping | None:
        """The configured one; None where there is none."""
        if config.monitor is None:
            return None
        mode = mode_of(config.monitor, config.mode)
        return cls(config.monitor, mode, config.min_delta, config.patience, config.stopping_threshold)

    def update(self, metrics: dict[str, float]) -> None:
        """Take in an epoch's metrics; `reason` says afterwards whether training shall stop.

        Raises:
            UsageError: the metric is not among them.
        """
        value = metrics[known(self.monitor, metrics, "train.early_stopping.monitor")]
        threshold, there = self.stopping_threshold, math.isfinite(value)
        if there and threshold is not None and self._better(value, threshold):
            self.reason = f"early stopping: {self.monitor} {value:.6g} has passed {threshold:g}"
        # An improvement of exactly min_delta does not count.
        elif there and (self.best is None or self._better(value, self.best, by=self.min_delta)):
            self.best, self.wait = value, 0
        else:
            self.wait += 1
            if self.wait >= self.patience:
                best = "no finite value yet" if self.best is None else f"best {self.best:.6g}"
                self.reason = (
                    f"early stopping: {self.monitor} has not improved by more than {self.min_delta:g} for"
                    f" {self.wait} epoch(s); {best}"
                )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: all that it is."""
        return asdict(self)

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on counting. A state of another metric is no use, and new limits ask anew."""
        if not state or (state["monitor"], state["mode"]) != (self.monitor, self.mode):
            return
        self.best, self.wait = state["best"], state["wait"]
        if all(state[key] == getattr(self, key) for key in ("min_delta", "patience", "stopping_threshold")):
            self.reason = state["reason"]

    def _better(self, value: float, than: float, by: float = 0.0) -> bool:
        return value - by > than if self.mode == "max" else value + by < than


def mode_of(metric: str, mode: str) -> str:
    """Anywhere: min or max, where auto goes by the metric's name."""
    if mode != "auto":
        return mode
    return "min" if less_is_better(metric) else "max"


def monitored(config: Config, metrics: dict[str, float]) -> dict[str, Any] | None:
    """Train worker: by what a checkpoint competes for being the best: metric, mode and value.

    Returns:
        None where the value is not a finite number: nothing is better or worse than that.

    Raises:
        UsageError: `checkpoint.monitor` names no metric of this run.
    """
    name = config.checkpoint.monitor
    if name == "auto":
        name = next((n for n in ("val/acc1", "val/loss") if n in metrics), "train/loss")
    value = metrics[known(name, metrics, "checkpoint.monitor")]
    if not math.isfinite(value):
        return None
    return {"metric": name, "mode": mode_of(name, config.checkpoint.mode), "value": value}


def known(name: str, metrics: dict[str, float], key: str) -> str:
    """Train worker: the name, where it is one of this epoch's metrics.

    Raises:
        UsageError: it is not, with the nearest.
    """
    if name in metrics:
        return name
    raise UsageError(_unknown(name, list(metrics), key))


def check_monitors(config: Config, recipe: Recipe, has_val: bool) -> None:
    """Head: refuse, before anything is trained, to watch a metric that will not come.

    Raises:
        UsageError: one line for each such key.
    """
    asked = {
        "checkpoint.monitor": config.checkpoint.monitor,
        "train.early_stopping.monitor": config.train.early_stopping.monitor,
    }
    names = {
        key: name
        for key, name in asked.items()
        # What the run measures of itself is known after the first epoch only.
        if name not in (None, "auto", *ALWAYS) and not str(name).startswith(("perf/", "data/"))
    }
    if not names:
        return
    there = [*ALWAYS]
    if has_val:
        # Torchmetrics takes seconds to import: the default's one name is known without it.
        own = ["acc1"] if type(recipe).metrics is Recipe.metrics else list(recipe.metrics())
        there += ["val/loss", *(f"val/{name}" for name in own)]
    problems = [
        _unknown(name, there, key) + ("" if has_val or not name.startswith("val/") else " (no validation)")
        for key, name in names.items()
        if name is not None and name not in there
    ]
    if problems:
        raise UsageError(*problems)


def _unknown(name: str, there: list[str], key: str) -> str:
    return f"{key}: no metric {name!r}" + nearest(name, there, f"there are: {', '.join(there)}")
