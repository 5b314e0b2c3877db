"""Head: opens and checks a job's data, and starts the actor that serves it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

from stoker.chain.chain import Chain
from stoker.chain.collating import collate_of
from stoker.chain.probing import fix_schemas
from stoker.chain.stages import cache_key, prefix_length, refuse_nothing_to_keep
from stoker.config.loading import Resolved
from stoker.config.schema import Config
from stoker.errors import CacheError, UsageError, where_raised
from stoker.protocol import DataCursor, Pad, Plan, Schema, Shard
from stoker.read.host_cache import CacheSpec, homes_of, size_in_cache
from stoker.read.identity import identity_of, kind_of
from stoker.read.sources import IndexedSource, Source, drawing
from stoker.recipe import SOURCE_FOLDER, Recipe, from_recipe, load_recipe, with_types
from stoker.serve.pool import chain_hosts
from stoker.serve.shards import DatasetSource, host_cache

if TYPE_CHECKING:
    from stoker.serve.passes import Passes


@dataclass
class Data:
    """The opened and checked splits of a job."""

    sources: dict[str, Any]
    chains: dict[str, Any]
    totals: dict[str, int | None]
    recipe: Any = None
    """The recipe that opened them, which may hold what `read` has found."""
    samples: dict[str, Any] = field(default_factory=dict)
    """Split → what its chain made of the first records: columns and report."""
    _identities: dict[str, str] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """Lines on what lies beside the records and is not read."""
        beside = [note for source in self.sources.values() for note in source.notes]
        return [*dict.fromkeys(beside)]

    def identity(self, split: str) -> str:
        """What a checkpoint knows the records of a split by."""
        if split not in self._identities:
            self._identities[split] = identity_of(self.sources[split])
        return self._identities[split]


def discover(resolved: Resolved) -> Config:
    """The configuration, with the parameters that the recipe derives from its data."""
    config = with_types(resolved.config)
    recipe = load_recipe(config.recipe, config.params, SOURCE_FOLDER)
    with drawing(f"{config.seed}/recipe"):
        found = from_recipe(recipe, "discover")
    return config.model_copy(update={"params": {**config.params, **found}})


def open_data(config: Config, data: Data | None = None) -> Data:
    """Get splits and chains from the recipe and check them before training."""
    data = open_splits(config, data)
    data.samples = fix_schemas(data.sources, data.chains, config.data.block_records)
    pads = data.chains["train"].pads
    refuse_absent_pads(pads, [chain.schemas for chain in data.chains.values()])
    train, wanted = data.chains["train"], config.data.bucket_by
    # Before its last schema, that of its blocks, is that of the records for collate.
    if train.collate and wanted and train.schemas and wanted not in train.schemas[-2].columns:
        raise UsageError(
            f"data.bucket_by: no record has {wanted!r}; columns: {', '.join(train.schemas[-2].columns)}"
        )
    return data


def open_sources(config: Config) -> Data:
    """Get the splits from the recipe and check them, without their chains, which may need PyTorch."""
    recipe = load_recipe(config.recipe, config.params, SOURCE_FOLDER)
    pads = pads_of(recipe)
    if recipe.collates and pads:
        raise UsageError(
            f"recipe: {type(recipe).__name__} has both pad and collate; pad in collate"
        )
    if not recipe.collates and config.data.bucket_by not in (None, *pads):
        raise UsageError(
            f"data.bucket_by: {config.data.bucket_by!r} is not a column that the recipe pads; it pads:"
            f" {', '.join(pads) or 'none'}"
        )
    data = Data({}, {}, {}, recipe)
    for split in ("train", "val"):
        # Seed random splits (such as torch's random_split), so that both splits divide the records alike.
        with drawing(f"{config.seed}/recipe"):
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
        else:
            source = DatasetSource(source)
        data.sources[split] = source
        refuse_other_classes(data)
        data.totals[split] = source.count()
    return data


def open_splits(config: Config, data: Data | None = None) -> Data:
    """As `open_data`, before any record runs through its chain."""
    from stoker.chain.chain import Chain
    from stoker.chain.entries import as_stages

    data = data or open_sources(config)
    recipe = data.recipe
    pads = pads_of(recipe)
    for split in data.sources:
        with drawing(f"{config.seed}/recipe"):
            stages = as_stages(from_recipe(recipe, "preprocess", split))
        prefix = 0
        # Do not cache records that differ in every epoch; for training, that is an error below.
        if keeps(config) and not data.sources[split].random:
            prefix = prefix_length(stages)
        data.chains[split] = Chain(
            stages,
            config.seed,
            config.tracking.record_ids,
            prefix,
            config.data.max_pixels,
            pads,
            config.data.bucket_by,
            collate_of(config.recipe, config.params) if recipe.collates else None,
        )
    if keeps(config):
        if (source := data.sources["train"]).random:
            of_torch = hasattr(source, "dataset")
            remedy = "read_torch(…, cacheable=True)" if of_torch else "random = False"
            raise UsageError(
                f"data.cache: {config.recipe}.read('train'): {kind_of(source)} may draw random numbers as it"
                f" reads; if not, declare {remedy}, and a cache would repeat the first epoch's; or set"
                " data.cache=none"
            )
        refuse_nothing_to_keep(data.chains["train"].stages)
    return data


def pads_of(recipe: Recipe) -> dict[str, Pad]:
    try:
        declared = {n: p if isinstance(p, Pad) else Pad(p) for n, p in dict(recipe.pad).items()}
    except Exception as error:
        raise UsageError(
            f"recipe: {type(recipe).__name__}.pad failed: {where_raised(error)}"
        ) from error
    for name, (value, multiple) in declared.items():
        if not (isinstance(value, int | float) and isinstance(multiple, int) and multiple >= 1):
            raise UsageError(
                f"recipe: pad of column {name!r} is {value!r} to a multiple of {multiple!r}; give a number or"
                " stoker.data.Pad(value, multiple=8)"
            )
    return declared


def refuse_absent_pads(pads: dict[str, Pad], schemas: list[tuple[Schema, ...]]) -> None:
    columns = [name for found in schemas if found for name in found[-1].of_records().columns]
    for name in pads:
        if all(schemas) and name not in columns:
            raise UsageError(
                f"recipe: pad names column {name!r}, which no record has; columns: {', '.join(columns)}"
            )


def keeps(config: Config) -> bool:
    """Whether hosts cache records; a run of one epoch reads nothing twice."""
    return config.data.cache != "none" and config.train.epochs > 1


def cache_note(config: Config) -> str:
    if config.data.cache != "none" and not keeps(config):
        return f"data.cache: {config.data.cache} has no effect in a run of one epoch"
    return ""


def refuse_other_classes(data: Data) -> None:
    of = {split: source.classes() for split, source in data.sources.items()}
    train, val = of.get("train"), of.get("val")
    if train is not None and val is not None and train != val:
        raise UsageError(
            f"classes: the splits differ, and so would their labels: {', '.join(train)} in train,"
            f" {', '.join(val)} in val"
        )


def plan_of(passes: Passes, data: Data) -> Plan:
    validation = data.identity("val") if "val" in data.sources else ""
    return passes.identity(data.identity("train"), validation)


def start_coordinator(
    config: Config,
    data: Data,
    workers: int,
    first_epoch: int = 0,
    position: dict[str, Any] | None = None,
) -> Any:
    """Start the actor between Ray Data and the train workers on this host; it produces at once."""
    import ray

    from stoker.serve.actor import Coordinator
    from stoker.serve.cursor import refuse_other_data
    from stoker.serve.passes import Passes
    from stoker.serve.service import start_service

    kept = {
        split: cache_key(split, data.identity(split), chain.stages[: chain.prefix])
        for split, chain in data.chains.items()
        if chain.prefix
    }
    schemas = {split: chain.schemas for split, chain in data.chains.items()}
    begun = DataCursor.model_validate(position) if position is not None else None
    cache = share = None
    if kept and config.data.cache != "none":
        most = None if config.data.cache_gb is None else int(config.data.cache_gb * 1e9)
        cache = CacheSpec(config.data.cache, secrets.token_hex(6), most, config.data.cache_folder)
        share = config.data.cache_share or (begun.plan.cache_share if begun else None)
        if share is None:
            splits = {split: (data.sources[split], data.chains[split]) for split in kept}
            share = share_that_fits(config, splits, data.totals, cache)
        for split in kept:
            data.chains[split].share = share
    chains = {split: ray.cloudpickle.dumps(chain) for split, chain in data.chains.items()}
    passes = Passes(config, data.sources, chains, cache, kept, schemas, share)
    plan = plan_of(passes, data)
    if begun is not None:
        refuse_other_data(begun, plan)
    coordinator = start_service(
        Coordinator,
        config,
        3 * workers + 32,
        {},
        passes=passes,
        totals=data.totals,
        plan=plan,
    )
    coordinator.begin.remote(coordinator, 0, workers, first_epoch, position)
    return coordinator


MOST_RECORDS, MOST_FILES, PER_FILE = 64, 4, 16
"""How many records tell how large they are, spread over the split; of a source that only reads sequentially,
the first ones of a few shards."""
SAMPLE_S, DEADLINE_S = 10.0, 60.0
"""Time for making them, and for all answers, since processes have to start."""
MARGIN = 0.95
"""Share of the room to fill: what does not fit after all costs more than without a cache."""


def share_that_fits(
    config: Config,
    splits: dict[str, tuple[Source, Chain]],
    totals: dict[str, int | None],
    cache: CacheSpec,
) -> float:
    """The share of the records that the caches of the present hosts have room for.

    1 if a split cannot count its records, or if sizes or room cannot be measured: each host then caches the
    records that it encounters first.
    """
    import ray

    counts = {split: count for split in splits if (count := totals[split])}
    if counts.keys() != splits.keys():
        return 1.0
    here, samples, sizes = ray.get_runtime_context().get_node_id(), dict[str, list[Shard]](), []
    for split, (source, chain) in splits.items():
        samples[split] = sample(source)
        # In a task, which may die of a record.
        found = _on([here], _sizes, source.for_workers(), chain, samples[split])[0]
        sizes.append(found or [])
    rooms = _rooms(config, cache, here)
    if not all(sizes) or not any(rooms):
        return 1.0
    needed = sum(count * fmean(found) for count, found in zip(counts.values(), sizes, strict=True))
    homed = all(
        homes_of(counts[split], config.data.block_records)
        if isinstance(source, IndexedSource)
        else all(shard.home for shard in samples[split])
        for split, (source, _) in splits.items()
    )
    # Without homes, each host encounters all records in time.
    return min(1.0, MARGIN * (sum(rooms) if homed else min(rooms)) / needed)


def sample(source: Source) -> list[Shard]:
    """Shards of a split at equal distances, in the order of its files."""
    shards = source.shards(1, None)
    most = min(len(shards), MOST_RECORDS if isinstance(source, IndexedSource) else MOST_FILES)
    return [shards[number * len(shards) // most] for number in range(most)]


def _rooms(config: Config, cache: CacheSpec, here: str) -> list[int]:
    """Bytes that each host that preprocesses may cache; a host that does not answer is left out."""
    import ray

    hosts = chain_hosts(config, here, ray.nodes(), Counter())
    hosts = [host for host in hosts if not host.trains] or hosts
    rooms = _on([host.node for host in hosts], _room, cache)
    return [room for room in rooms if room is not None]


def _room(cache: CacheSpec) -> int:
    try:
        return host_cache(cache, "").usage[1]
    except CacheError:
        return 0  # its chain workers report it


def _sizes(source: Source, chain: Chain, shards: list[Shard]) -> list[int]:
    """Bytes in the cache of some records of a split."""
    sizes, ends = list[int](), time.monotonic() + SAMPLE_S

    def keep(record: Any) -> int:
        sizes.append(size_in_cache(record))
        return 0

    for shard in shards:
        if time.monotonic() < ends:
            chain.run(islice(source.read(shard, None), PER_FILE), 0, keep)
    return sizes


def _on(nodes: list[str], what: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function returns on each of some hosts; None: it raised, or did not answer in time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(what)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    named = [task.options(name="cache", scheduling_strategy=place) for place in places]
    calls = [each.remote(*arguments) for each in named]
    done = ray.wait(calls, num_returns=len(calls), timeout=DEADLINE_S)[0] if calls else []
    found = dict.fromkeys(calls)
    for call in done:
        with contextlib.suppress(ray.exceptions.RayError):
            found[call] = ray.get(call)
    return list(found.values())
