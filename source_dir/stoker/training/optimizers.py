"""Train worker: the optimiser and its schedule, both timm's where the recipe has none of its own."""

from __future__ import annotations

from typing import Any

from stoker.config import UsageError
from stoker.recipe import Recipe
from stoker.schema import Config, TrainConfig
from stoker.training.strategies import plain


def make_optimizer(recipe: Recipe, model: Any, config: TrainConfig) -> Any:
    """Train worker: the recipe's optimiser, or the configured one of timm's.

    Raises:
        UsageError: timm has no such optimiser.
    """
    own = recipe.optimizer(plain(model))
    if own is not None:
        return own
    from timm.optim import create_optimizer_v2

    try:
        return create_optimizer_v2(
            model,
            opt=config.optimizer,
            lr=config.lr,
            weight_decay=config.weight_decay,
            **({"momentum": config.momentum} if config.optimizer in MOMENTUM_OPTIMIZERS else {}),
        )
    except (AssertionError, KeyError, ValueError, TypeError) as error:
        raise UsageError(f"train.optimizer: timm cannot make {config.optimizer!r}: {error}") from None


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
    """Train worker: timm's scheduler, stepped once per optimiser step; None without one.

    Args:
        optimizer: what it schedules.
        config: `train.scheduler`, `train.warmup_epochs`, `train.epochs`.
        steps_per_epoch: turns epochs into steps; the head refuses a schedule where it is not known.
    """
    if config.train.scheduler == "none" or steps_per_epoch is None:
        return None
    from timm.scheduler import create_scheduler_v2

    if config.train.scheduler == "linear":
        from torch.optim.lr_scheduler import LinearLR

        return _PerStep(LinearLR(optimizer, 1.0, 0.0, total_iters=steps_per_epoch * config.train.epochs))
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=config.train.scheduler,
        num_epochs=config.train.epochs,
        warmup_epochs=config.train.warmup_epochs,  # type: ignore[arg-type, unused-ignore]
        decay_epochs=max(config.train.epochs // 3, 1),
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
    )
    return scheduler


class _PerStep:
    """Gives a torch scheduler the interface of timm's."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step_update(self, num_updates: int) -> None:
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)
