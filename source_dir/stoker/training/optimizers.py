"""Train worker: the optimiser and its schedule, both timm's where the recipe has none of its own."""

from __future__ import annotations

import math
from typing import Any

from stoker.config import UsageError
from stoker.recipe import Recipe
from stoker.schema import Config, TrainConfig
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


def make_scheduler(optimizer: Any, config: Config, steps_per_epoch: int | None) -> Any:
    """Train worker: timm's scheduler, stepped once per optimiser step; None where the rate is constant.

    Args:
        optimizer: what it schedules.
        config: `train.scheduler`, `train.warmup_epochs`, `train.epochs`.
        steps_per_epoch: optimiser steps, which turn epochs into steps; the head refuses a schedule where
            they are not known.
    """
    from timm.scheduler import CosineLRScheduler, PolyLRScheduler, StepLRScheduler

    train = config.train
    if train.scheduler == "none" and not train.warmup_epochs and train.layer_decay is None:
        return None
    per_epoch = steps_per_epoch or 1
    common: dict[str, Any] = {
        "warmup_t": round(train.warmup_epochs * per_epoch),
        "warmup_lr_init": min(WARMUP_LR, train.lr) if train.scale_lr == "none" else train.lr,
        "t_in_epochs": False,
    }
    total = train.epochs * per_epoch
    scheduler: Any
    if train.scheduler == "cosine":
        scheduler = CosineLRScheduler(optimizer, t_initial=total, **common)
    elif train.scheduler == "linear":
        scheduler = PolyLRScheduler(optimizer, t_initial=total, power=1.0, **common)
    elif train.scheduler == "step":
        every = max(train.epochs // 3, 1) * per_epoch
        scheduler = StepLRScheduler(optimizer, decay_t=every, decay_rate=0.1, **common)
    else:
        # Never decays: warm-up and layer decay, which timm's schedulers apply, are what is wanted.
        scheduler = StepLRScheduler(optimizer, decay_t=1, decay_rate=1.0, **common)
    scheduler.step_update(0)
    return scheduler


def learning_rate(optimizer: Any) -> float:
    """Train worker: the present rate; with layer decay that of the last layers, which is the largest."""
    return float(max(group["lr"] for group in optimizer.param_groups))
