"""Head: checks a job and opens its data before a cluster forms.

opened = check(resolved)          imports PyTorch only if the recipe does
opened = check_chains(opened)     may import PyTorch
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.config.loading import Resolved
from stoker.config.schema import Config, refuse_missing
from stoker.errors import Problems, UsageError
from stoker.events.sinks import Sink
from stoker.recipe import SOURCE_FOLDER, Recipe, load_object, load_recipe
from stoker.scripts.script_checks import SCRIPT_FOLDER, find_script, refuse_foreign_keys
from stoker.serve.opening import Data, discover, open_data, open_sources
from stoker.storage.filesystems import listing_once
from stoker.train import resume as resuming
from stoker.train.recipe_work import (
    check_optimizer,
    refuse_impossible,
    refuse_unfit,
)
from stoker.train.stopping import check_monitors

Opened = tuple[Config, Data]
"""The configuration with the parameters found in the data, and the opened data."""


def check(resolved: Resolved, data_too: bool = True) -> Opened | None:
    """Reject everything that can be checked without the chains; `data_too` also opens the data."""
    config, problems, opened = resolved.config, Problems(), None
    with problems:
        refuse_missing(config)
    with problems:
        own_sinks(config)
    if config.script is not None:
        with problems:
            refuse_foreign_keys(resolved)
        with problems:
            find_script(config)
    else:
        with problems:
            resuming.check_path(config)
        with problems:
            if ":" in config.train.strategy:
                load_object(config.train.strategy, SOURCE_FOLDER, "train.strategy")
        with problems:
            check_recipe(resolved)
        with problems:
            opened = without_ray(lambda: open_sources_of(resolved)) if data_too else None
        with problems:
            found = opened[0] if opened else config
            recipe = load_recipe(found.recipe, found.params, SOURCE_FOLDER)
            if opened:
                refuse_unfit(found, recipe, opened[1].totals)
            elif type(recipe).metrics is Recipe.metrics:
                check_monitors(config, recipe, has_val=True)
    problems.refuse()
    return opened


def check_chains(opened: Opened | None) -> Opened | None:
    """Make the chains and try them on the first records."""
    if opened is None:
        return None
    config, data = opened
    return without_ray(lambda: (config, open_data(config, data)))


def check_recipe(resolved: Resolved) -> None:
    train, problems = resolved.config.train, Problems()
    recipe = load_recipe(resolved.config.recipe, resolved.config.params, SOURCE_FOLDER)
    with problems:
        recipe.check(resolved)
    with problems:
        if type(recipe).model is Recipe.model:
            raise UsageError(
                f"recipe: {type(recipe).__name__} does not say what to train: define model()"
            )
    with problems:
        refuse_impossible(recipe, train)
    with problems:
        if type(recipe).optimizer is Recipe.optimizer and train.optimizer not in ("sgd", "adamw"):
            check_optimizer(train.optimizer)
    problems.refuse()


def without_ray(open_it: Callable[[], Opened]) -> Opened | None:
    """Data that is opened before a cluster forms; None if the recipe reads with Ray."""
    try:
        opened = open_it()
    except Exception as error:
        ray: Any = sys.modules.get("ray")
        if "ray.data" in sys.modules or (
            ray and isinstance(error.__cause__, ray.exceptions.RayError)
        ):
            return None
        raise
    # Datasets created before ray.init() cannot be used after it.
    return None if "ray.data" in sys.modules else opened


def open_sources_of(resolved: Resolved) -> Opened:
    with listing_once():
        config = discover(resolved)
        return config, open_sources(config)


def open_all(resolved: Resolved) -> Opened:
    config, data = open_sources_of(resolved)
    return config, open_data(config, data)


def own_sinks(config: Config) -> list[Callable[[Path, Config], Sink]]:
    source = SOURCE_FOLDER / SCRIPT_FOLDER if config.script is not None else SOURCE_FOLDER
    return [
        load_object(path, source, "tracking.sinks", offers=Sink) for path in config.tracking.sinks
    ]
