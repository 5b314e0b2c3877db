"""Head: opens and checks a job's data, and starts the actor that serves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.bootstrap.topology import label
from stoker.config import Resolved, UsageError
from stoker.data.coordinator import Coordinator
from stoker.data.position import Plan, Position
from stoker.recipe import Recipe, load_recipe, where_raised
from stoker.schema import Config

GROUP_LABEL = "stoker.group"
SOURCE_FOLDER = Path(__file__).resolve().parents[2]


@dataclass
class Data:
    """Head: the splits of a job, opened and checked."""

    sources: dict[str, Any]
    chains: dict[str, Any]
    totals: dict[str, int | None]


def discover(resolved: Resolved) -> Config:
    """Head: the configuration with the parameters that the recipe finds in its data.

    Raises:
        UsageError: the recipe cannot find them.
    """
    config = resolved.config
    recipe = load_recipe(config.recipe, config.params, SOURCE_FOLDER)
    found = from_recipe(recipe, "discover")
    return config.model_copy(update={"params": {**config.params, **found}})


def open_data(config: Config) -> Data:
    """Head: ask the recipe for its splits and chains and check them before training.

    Raises:
        UsageError: nothing to read, damaged files, or a chain that cannot be run.
    """
    from stoker.data.chain import Chain
    from stoker.data.sources import Source
    from stoker.data.transforms import as_stages

    recipe = load_recipe(config.recipe, config.params, SOURCE_FOLDER)
    data = Data({}, {}, {})
    for split in ("train", "val"):
        source = from_recipe(recipe, "read", split)
        if source is None and split == "train":
            raise UsageError(f"{config.recipe}: read('train') returned nothing to train on")
        if source is None:
            continue
        if isinstance(source, Source):
            source.check()
        elif not hasattr(source, "map_batches"):
            raise UsageError(
                f"{config.recipe}: read({split!r}) returned {type(source).__name__}, neither a Source nor a"
                " ray.data.Dataset"
            )
        data.sources[split] = source
        data.totals[split] = source.count() if isinstance(source, Source) else None
        stages = as_stages(from_recipe(recipe, "preprocess", split))
        data.chains[split] = Chain(stages, config.seed, config.tracking.record_ids)
    return data


def from_recipe(recipe: Recipe, method: str, *arguments: str) -> Any:
    """Head: call a method of the user's; what it raises becomes one line that says where.

    Raises:
        UsageError: the recipe's own, or wrapping whatever it raised.
    """
    try:
        return getattr(recipe, method)(*arguments)
    except UsageError:
        raise
    except Exception as error:
        name = type(recipe).__name__
        raise UsageError(
            f"recipe: {name}.{method}({', '.join(map(repr, arguments))}) failed: {where_raised(error)}"
        ) from error


def start_coordinator(
    config: Config,
    data: Data,
    workers: int,
    first_epoch: int = 0,
    position: dict[str, Any] | None = None,
) -> Any:
    """Head: the actor between Ray Data and the train workers, on this host; it produces at once.

    Args:
        config: the job.
        data: its opened splits.
        workers: train workers.
        first_epoch: where training starts.
        position: where in that epoch, from a checkpoint.

    Raises:
        UsageError: the data or its order are not those of the position.
    """
    import ray

    from stoker.data.sources import Source

    plan = plan_of(config, data)
    if position is not None:
        Position.model_validate(position).check(plan)
    node = ray.get_runtime_context().get_node_id()
    tasks = int(ray.cluster_resources().get("CPU", 1))
    actor = ray.remote(Coordinator).options(
        num_cpus=0,
        max_concurrency=2 * workers + tasks + 16,
        label_selector={ray._raylet.RAY_NODE_ID_KEY: node},
    )
    coordinator = actor.remote(
        EpochDatasets(config, data.sources, {k: ray.cloudpickle.dumps(v) for k, v in data.chains.items()}),
        data.totals,
        plan=plan,
        by_row=not isinstance(data.sources["train"], Source),
        batch_size=config.train.batch_size,
        remainder=config.data.remainder,
        budget=config.data.bad_record_budget,
        epochs=config.train.epochs,
        direct=config.data.transport == "direct",
    )
    coordinator.begin.remote(coordinator, 0, workers, first_epoch, position)
    return coordinator


def plan_of(config: Config, data: Data) -> Plan:
    """Head: what fixes the order of the training records of an epoch."""
    from stoker.data.sources import Source

    source = data.sources["train"]
    return Plan(
        seed=config.seed,
        shuffle=config.data.shuffle,
        order=config.data.order,
        block_records=config.data.block_records,
        fingerprint=source.fingerprint() if isinstance(source, Source) else type(source).__name__,
    )


class EpochDatasets:
    """Head: (split, epoch) → the Ray Data execution that produces it."""

    def __init__(self, config: Config, sources: dict[str, Any], chains: dict[str, bytes]) -> None:
        self.config, self.sources, self.chains = config, sources, chains

    def __call__(
        self, split: str, epoch: int, attempt: int, reporter: Any, start: Position | None = None
    ) -> Any:
        from stoker.data.pipeline import EpochPlan, configure_ray_data, epoch_dataset

        config = self.config.data
        configure_ray_data(exact=config.order == "exact")
        groups = [label(group) for group in config.preprocess_on]
        selector = {GROUP_LABEL: f"in({','.join(groups)})"} if groups else None
        plan = EpochPlan(
            chain=self.chains[split],
            seed=self.config.seed,
            # Validation is the same in every epoch.
            epoch=epoch if split == "train" else 0,
            split=split,
            shuffle=config.shuffle and split == "train",
            # An epoch that goes on is cut as it was when it began.
            block_records=start.plan.block_records if start else config.block_records,
            books=(attempt, split, epoch),
        )
        options = {"label_selector": selector} if selector else {}
        return epoch_dataset(plan, self.sources[split], reporter, options, start)
