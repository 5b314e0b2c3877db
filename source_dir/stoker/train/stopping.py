"""Train worker and head: early stopping, and the metrics that a run monitors.

`train.early_stopping` follows Lightning's EarlyStopping callback
(https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.callbacks.EarlyStopping.html), except that an
epoch with a non-finite metric counts as one without improvement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from stoker.config.schema import CheckpointConfig, Config, EarlyStoppingConfig
from stoker.errors import UsageError, nearest
from stoker.events.summary import mode_of, number
from stoker.figures import count_of
from stoker.recipe import Recipe, metrics_by_name

AUTOMATIC = {"val/acc1": "max", "val/loss": "min"}
"""What checkpoint.monitor: auto selects, the first that there is, and its mode."""
ALWAYS = ("train/loss", "lr", "perf/samples_per_s", "perf/input_wait_pct")


@dataclass
class EarlyStopping:
    monitor: str
    mode: str
    min_delta: float
    patience: int
    stopping_threshold: float | None = None
    best: float | None = None
    """The value to improve by more than `min_delta`."""
    seen: float | None = None
    wait: int = 0
    reason: str = ""

    @classmethod
    def of(cls, config: EarlyStoppingConfig) -> EarlyStopping | None:
        if config.monitor is None:
            return None
        mode = config.mode if config.mode != "auto" else mode_of(config.monitor, {})
        if mode is None:
            raise UsageError(_undirected(config.monitor, "train.early_stopping.mode"))
        return cls(
            config.monitor, mode, config.min_delta, config.patience, config.stopping_threshold
        )

    def update(self, metrics: dict[str, float]) -> None:
        value = metrics[known(self.monitor, metrics, "train.early_stopping.monitor")]
        threshold, there = self.stopping_threshold, math.isfinite(value)
        if there and (self.seen is None or self._better(value, self.seen)):
            self.seen = value
        if there and threshold is not None and self._better(value, threshold):
            self.reason = f"early stopping: {self.monitor} {value:.6g} has passed {threshold:g}"
        # An improvement of exactly min_delta does not count.
        elif there and (self.best is None or self._better(value, self.best, by=self.min_delta)):
            self.best, self.wait = value, 0
        else:
            self.wait += 1
            if self.wait >= self.patience:
                best = "no finite value yet" if self.seen is None else f"best {self.seen:.6g}"
                self.reason = (
                    f"early stopping: {self.monitor} has not improved by more than {self.min_delta:g} for"
                    f" {count_of(self.wait, 'epoch')}; {best}"
                )

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue from a saved state; it is dropped for another metric, its reason for other limits."""
        if not state or (state["monitor"], state["mode"]) != (self.monitor, self.mode):
            return
        self.best, self.wait = state["best"], state["wait"]
        self.seen = state.get("seen", self.best)
        limits = "min_delta", "patience", "stopping_threshold"
        if all(state[key] == getattr(self, key) for key in limits):
            self.reason = state["reason"]

    def _better(self, value: float, than: float, by: float = 0.0) -> bool:
        return value - by > than if self.mode == "max" else value + by < than


def monitors(config: Config) -> tuple[EarlyStoppingConfig, CheckpointConfig]:
    """What early stopping and the best checkpoint watch: one metric unless both name one."""
    early, best = config.train.early_stopping, config.checkpoint
    if early.monitor is not None and best.monitor == "auto":
        best = best.model_copy(update={"monitor": early.monitor})
    if early.monitor == best.monitor:
        mode = {"mode": best.mode if early.mode == "auto" else early.mode}
        early, best = early.model_copy(update=mode), best.model_copy(update=mode)
    return early, best


def modes(config: Config, recipe: Recipe) -> dict[str, str]:
    """min or max by metric, where the configuration or `higher_is_better` of torchmetrics says so."""
    said = dict[str, str]()
    for name, metric in metrics_by_name(recipe).items():
        if (is_better := getattr(metric, "higher_is_better", None)) is not None:
            said[f"val/{name}"] = "max" if is_better else "min"
    return said | {str(part.monitor): part.mode for part in monitors(config) if part.mode != "auto"}


def with_modes(config: Config, recipe: Recipe) -> Config:
    """The configuration with the modes of what it monitors."""
    known, (early, best) = modes(config, recipe), monitors(config)
    changed = [
        part.model_copy(update={"mode": mode})
        if part.monitor not in (None, "auto") and (mode := mode_of(str(part.monitor), known))
        else part
        for part in (early, best)
    ]
    train = config.train.model_copy(update={"early_stopping": changed[0]})
    return config.model_copy(update={"train": train, "checkpoint": changed[1]})


def monitored(config: Config, metrics: dict[str, float]) -> dict[str, Any] | None:
    """The metric, mode and value by which a checkpoint competes, and the loss, for ties; None: not finite."""
    best = monitors(config)[1]
    name = best.monitor
    if name == "auto":
        name = next((n for n in AUTOMATIC if n in metrics), "train/loss")
    value = metrics[known(name, metrics, "checkpoint.monitor")]
    if not math.isfinite(value):
        return None
    mode = best.mode if best.mode != "auto" else mode_of(name, AUTOMATIC)
    if mode is None:
        raise UsageError(_undirected(name, "checkpoint.mode"))
    loss = metrics.get("val/loss", metrics.get("train/loss"))
    return {"metric": name, "mode": mode, "value": value, "loss": number(loss)}


def known(name: str, metrics: dict[str, float], key: str) -> str:
    if name in metrics:
        return name
    raise UsageError(_unknown(name, list(metrics), key))


def check_monitors(config: Config, recipe: Recipe, has_val: bool) -> None:
    """Refuse, before training, to monitor a metric that the run will not have, or both ways."""
    early, best = config.train.early_stopping, config.checkpoint
    if {early.mode, best.mode} == {"min", "max"} and best.monitor in ("auto", early.monitor):
        raise UsageError(
            f"checkpoint.mode: {best.mode} contradicts train.early_stopping.mode: {early.mode}, of the same"
            " metric; remove one, or set checkpoint.monitor to another metric"
        )
    if best.mode != "auto" and monitors(config)[1].monitor == "auto":
        raise UsageError(
            f"checkpoint.mode: {best.mode} needs checkpoint.monitor, the metric that it is about"
        )
    asked = {
        "checkpoint.monitor": config.checkpoint.monitor,
        "train.early_stopping.monitor": config.train.early_stopping.monitor,
    }
    names = {
        key: name
        for key, name in asked.items()
        # Metrics that the run measures itself are known only after the first epoch.
        if name not in (None, "auto", *ALWAYS) and not str(name).startswith(("perf/", "data/"))
    }
    known_modes = modes(config, recipe)
    undirected = [
        _undirected(str(name), key.replace("monitor", "mode"))
        for key, name in asked.items()
        if name not in (None, "auto") and not mode_of(str(name), known_modes)
    ]
    there = [*ALWAYS]
    if has_val:
        there += ["val/loss", *(f"val/{name}" for name in metrics_by_name(recipe))]
    problems = [
        _unknown(name, there, key)
        + ("" if has_val or not name.startswith("val/") else " (no validation)")
        for key, name in names.items()
        # Metrics of several values have a name below their own for each.
        if name is not None and not any(f"{name}/".startswith(f"{one}/") for one in there)
    ]
    if problems or undirected:
        raise UsageError(*(problems or undirected))


def _undirected(name: str, key: str) -> str:
    return f"{key}: {name} does not say whether higher is better; set min or max"


def _unknown(name: str, there: list[str], key: str) -> str:
    return f"{key}: no metric {name!r}" + nearest(name, there, f"there are: {', '.join(there)}")
