"""Laptop: `peek JOB --model`: a training and a validation step on this CPU, before paying for a cluster."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

from launcher.advise.peek.looking import sampled
from launcher.advise.peek.problems import Problem
from stoker.config.schema import Config
from stoker.errors import UsageError, where_raised
from stoker.recipe import Batch, Recipe, Split, class_names_of
from stoker.serve.opening import Data
from stoker.train.evaluation import try_validation
from stoker.train.feed import as_one_batch
from stoker.train.state import Worker, count_records, loss_of

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

    problems = list[Problem]()
    torch.manual_seed(config.seed)
    worker = Worker(config, recipe, None, 0, 0, 1, torch.device("cpu"))
    worker.classes = class_names_of(recipe, data.sources["train"].classes())
    lines, place = [], "model"
    try:
        worker.model = recipe.model()
        lines.append(f"model: {sum(p.numel() for p in worker.model.parameters()):,} parameters")
        steps: list[tuple[str, Split]] = [("training_step", "train"), ("validation_step", "val")]
        for place, split in steps:
            if split not in data.sources:
                continue
            worker.modules[split] = recipe.on_device(split) or torch.nn.Identity()
            batch, notes = _batch(config, data, split), list[str]()
            if count_records(batch) < 2:
                lines.append(f"{place}: not tried, because fewer than two of the first records are usable")
                continue
            if split == "train":
                metrics = {"loss": _train(worker, batch)}
            else:
                metrics, notes = try_validation(worker, batch)
                metrics = {name.removeprefix("val/"): value for name, value in metrics.items()}
            if not math.isfinite(metrics.get("loss", 0.0)):
                return lines, [
                    Problem("error", f"{place}: the loss of the first records is {metrics['loss']}")
                ]
            shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            lines.append(f"{place}: {shown or 'no loss, no metrics'} of {count_records(batch)} records")
            problems += [Problem("warning", f"{place}: {note}") for note in notes]
    except UsageError as error:
        return lines, [Problem("error", text) for text in error.problems]
    except Exception as error:
        return lines, [Problem("error", f"{place}: {where_raised(error)}")]
    return lines, problems


def _batch(config: Config, data: Data, split: Any) -> Batch:
    """A batch as from the feed; empty if none of the first records can be used."""
    chain = data.chains[split]
    count = max(2, min(config.train.batch_size, MOST))
    columns, report = chain.run(islice(sampled(data.sources[split], config, split, count), count), 0)
    return as_one_batch(chain.collate, columns, report) if columns else {}


def _train(worker: Worker, batch: Batch) -> float:
    model = worker.model.train()
    loss = loss_of(worker.recipe.training_step(model, worker.modules["train"](batch)))
    loss.backward()
    if not any(p.grad is not None for p in model.parameters()):
        raise UsageError("training_step: the loss has no gradient with respect to any parameter")
    return float(loss.detach())
