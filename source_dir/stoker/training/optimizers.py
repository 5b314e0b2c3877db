"""Train worker: the optimiser, timm's where the recipe has none of its own, and its learning rate."""

from __future__ import annotations

import math
from typing import Any

from stoker.errors import UsageError
from stoker.recipe import Recipe
from stoker.schema import TrainConfig
from stoker.training.strategies import plain

WARMUP_LR = 1e-5
"""Where a warm-up starts, unless `train.scale_lr` gives it a rate to start from."""


def scaled_lr(config: TrainConfig, workers: int) -> float:
    """Train worker: the learning rate for batches that are larger than one worker's `batch_size`.

    A step averages over train workers × accumulate_steps batches. "linear" is the rule of Goyal et al.,
    "Accurate, Large Minibatch SGD" (arXiv 1706.02677), "sqrt" that of Krizhevsky (arXiv 1404.5997).
    """
    batches = float(workers * config.accumulate_steps)
    factors = {"none": 1.0, "linear": batches, "sqrt": math.sqrt(batches)}
    return config.lr * factors[config.scale_lr]


def make_optimizer(recipe: Recipe, model: Any, config: TrainConfig, workers: int) -> Any:
    """Train worker: the recipe's optimiser, or the configured one of timm's.

    Raises:
        UsageError: timm has no such optimiser, or cannot tell the model's layers apart.
    """
    own = recipe.optimizer(plain(model))
    if own is not None:
        return own
    from timm.optim import create_optimizer_v2

    try:
        optimizer = create_optimizer_v2(
            plain(model),
            opt=config.optimizer,
            lr=scaled_lr(config, workers),
            weight_decay=config.weight_decay,
            layer_decay=config.layer_decay,
            **({"momentum": config.momentum} if config.optimizer in MOMENTUM_OPTIMIZERS else {}),
        )
    except (AssertionError, KeyError, ValueError, TypeError) as error:
        raise UsageError(f"train.optimizer: timm cannot make {config.optimizer!r}: {error}") from None
    if config.layer_decay is not None and len({g["lr_scale"] for g in optimizer.param_groups}) == 1:
        raise UsageError(
            f"train.layer_decay: {type(plain(model)).__name__} does not say which parameters make a layer;"
            " give it timm's method group_matcher, or leave layer_decay out"
        )
    return optimizer


MOMENTUM_OPTIMIZERS = {"sgd", "nesterov", "momentum", "sgdp", "rmsprop", "lars", "sgdw"}


def check_optimizer(name: str) -> None:
    """Head: refuse an unknown optimiser before any cluster forms.

    Raises:
        UsageError: with the nearest known names.
    """
    import difflib

    from timm.optim import list_optimizers

    known = list_optimizers()
    if name.lower() not in known:
        close = difflib.get_close_matches(name.lower(), known, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(known[:12])}, …"
        raise UsageError(f"train.optimizer: timm knows no optimiser {name!r}; {hint}")


class Schedule:
    """Train worker: the learning rate by how much of the whole training is done.

    A training is done by `train.epochs` or `train.max_steps`, whichever comes first; an epoch counts by its
    records. So the rate has no state: a run that goes on with another number of train workers, or another
    batch size, is on the same curve, which ends where the training does.
    """

    def __init__(self, optimizer: Any, train: TrainConfig, records: int | None) -> None:
        """Args: as `make_schedule`; the optimiser is new and has the rates that the curve starts from."""
        self.optimizer, self.train, self.records = optimizer, train, records
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.scales = [float(group.get("lr_scale", 1.0)) for group in optimizer.param_groups]
        self.begin(0)

    def begin(self, epoch: int, samples: int = 0, step: int = 0) -> None:
        """An epoch begins, or goes on.

        Args:
            epoch: from 0 on.
            samples: records of it that are trained, over all ranks.
            step: optimiser steps since training began.
        """
        self.epoch, self.samples = epoch, samples
        self._set(step)

    def advance(self, samples: int, step: int) -> None:
        """After a step: the rate of the next one.

        Args:
            samples: records of the step, over all ranks.
            step: optimiser steps since training began.
        """
        self.samples += samples
        self._set(step)

    def _set(self, step: int) -> None:
        # An epoch may end with less than all records: bad ones, or a remainder.
        epochs = self.epoch + min(self.samples / self.records, 1.0) if self.records else 0.0
        for group, rate, scale in zip(self.optimizer.param_groups, self.rates, self.scales, strict=True):
            group["lr"] = self._rate(rate, epochs, step) * scale

    def _rate(self, rate: float, epochs: float, step: int) -> float:
        train = self.train
        if epochs < train.warmup_epochs:
            first = min(WARMUP_LR, train.lr) if train.scale_lr == "none" else train.lr
            return first + (rate - first) * epochs / train.warmup_epochs
        if train.max_steps is not None:
            epochs = max(epochs, step / train.max_steps * train.epochs)
        done = min(epochs / train.epochs, 1.0)
        if train.scheduler == "cosine":
            return rate * 0.5 * (1 + math.cos(math.pi * done))
        if train.scheduler == "linear":
            return rate * (1 - done)
        if train.scheduler == "step":
            each: float = 0.1 ** ((epochs - train.warmup_epochs) // max(train.epochs // 3, 1))
            return rate * each
        return rate


def make_schedule(recipe: Recipe, optimizer: Any, train: TrainConfig, records: int | None) -> Schedule | None:
    """Train worker: the learning rate's course; None where a recipe's own optimiser keeps its own rate.

    Args:
        recipe: may have an optimiser of its own.
        optimizer: new.
        train: the schedule and when training ends.
        records: of an epoch; None where nobody knows: the head refuses a schedule then.
    """
    own = type(recipe).optimizer is not Recipe.optimizer
    if own and train.scheduler == "none" and not train.warmup_epochs:
        return None
    return Schedule(optimizer, train, records)


def learning_rate(optimizer: Any) -> float:
    """Train worker: the present rate; with layer decay that of the last layers, which is the largest."""
    return float(max(group["lr"] for group in optimizer.param_groups))
