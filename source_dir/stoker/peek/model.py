"""Laptop: `peek JOB --model`: a training and a validation step on this CPU, before paying for a cluster."""

from __future__ import annotations

from itertools import islice
from typing import Any

from stoker.data.feed.feed import as_one_batch
from stoker.data.opening import Data
from stoker.errors import UsageError, where_raised
from stoker.peek.looking import sampled
from stoker.peek.problems import Problem
from stoker.recipe import Batch, Recipe
from stoker.schema import Config
from stoker.training.worker import at_least_float32, count_records, loss_of

MOST = 8
"""Records of the batch; batch norm needs more than one."""


def try_model(config: Config, recipe: Recipe, data: Data) -> tuple[list[str], list[Problem]]:
    """Laptop: create the model and take a step on a small batch of each split, as a train worker does.

    Args:
        config: the job, with discovered parameters.
        recipe: its recipe.
        data: its opened splits.

    Returns:
        What was found, a line each, and the problems that would end a run.
    """
    import torch

    if recipe.own_loop:
        return ["the model was not tried: the recipe runs its own training loop"], []
    torch.manual_seed(config.seed)
    lines, place = [], "model"
    try:
        model = recipe.model()
        lines.append(f"model: {sum(p.numel() for p in model.parameters()):,} parameters")
        for place, split in (("training_step", "train"), ("validation_step", "val")):
            if split not in data.sources:
                continue
            batch = _batch(config, recipe, data, split)
            if count_records(batch) < 2:
                lines.append(f"{place}: not tried, because fewer than two of the first records are usable")
                continue
            loss = _train(model, recipe, batch) if split == "train" else _validate(model, recipe, batch)
            if not torch.isfinite(loss):
                return lines, [Problem("error", f"{place}: the loss of the first records is {loss.item()}")]
            lines.append(f"{place}: loss {loss.item():.4g} of {count_records(batch)} records")
    except UsageError as error:
        return lines, [Problem("error", text) for text in error.problems]
    except Exception as error:
        return lines, [Problem("error", f"{place}: {where_raised(error)}")]
    return lines, []


def _batch(config: Config, recipe: Recipe, data: Data, split: Any) -> Batch:
    """A batch after `on_device`; empty if none of the first records can be used."""
    chain = data.chains[split]
    count = max(2, min(config.train.batch_size, MOST))
    columns, report = chain.run(islice(sampled(data.sources[split], config, split, count), count), 0)
    batch = as_one_batch(chain, columns, report) if columns else {}
    module = recipe.on_device(split) if batch else None
    return module(batch) if module is not None else batch


def _train(model: Any, recipe: Recipe, batch: Batch) -> Any:
    loss = loss_of(recipe.training_step(model.train(), batch))
    loss.backward()
    if not any(p.grad is not None for p in model.parameters()):
        raise UsageError("training_step: the loss has no gradient with respect to any parameter")
    return loss.detach()


def _validate(model: Any, recipe: Recipe, batch: Batch) -> Any:
    import torch

    with torch.no_grad():
        result = recipe.validation_step(model.eval(), batch)
    if "preds" in result and "target" in result:
        for metric in recipe.metrics().values():
            metric.update(at_least_float32(result["preds"]), result["target"])
    return loss_of(result)
