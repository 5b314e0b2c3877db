"""Laptop: the loss of each record of a batch with the weights of the nearest checkpoint."""

from __future__ import annotations

from typing import Any

from launcher.advise.peek.rebuild import Part
from stoker.checkpoints.format import describe, load
from stoker.config.schema import Config
from stoker.recipe import Batch, Recipe, classification_loss
from stoker.storage.checkpoint_store import Store, step_of, verify
from stoker.train.state import count_records, loss_of


def nearest_checkpoint(store: Store, step: int) -> str | None:
    """Laptop: the complete checkpoint nearest to the start of a step; the earlier one of two."""
    names = sorted(store.names(), key=lambda name: (abs(step_of(name) - (step - 1)), step_of(name)))
    return next((name for name in names if verify(store, name) is None), None)


def losses(config: Config, recipe: Recipe, store: Store, name: str, parts: list[Part]) -> list[list[float]]:
    """Laptop: the loss of each record on its own, per part, in evaluation mode."""
    import torch

    torch.manual_seed(config.seed)
    model = recipe.model()
    model.load_state_dict(load(describe(store, name)).weights)
    model.eval()
    module = recipe.on_device("train")
    smoothing = config.train.label_smoothing
    found = []
    with torch.no_grad():
        for part in parts:
            batch = module(part.batch) if module is not None else part.batch
            ones = [one(batch, row) for row in range(count_records(part.batch))]
            found.append(
                [
                    float(
                        classification_loss(model, record, smoothing)
                        if smoothing
                        else loss_of(recipe.training_step(model, record))
                    )
                    for record in ones
                ]
            )
    return found


def one(batch: Batch, row: int) -> Batch:
    """Laptop: a batch of one record."""
    return {name: _row(values, row) for name, values in batch.items()}


def _row(values: Any, row: int) -> Any:
    return values[row : row + 1]
