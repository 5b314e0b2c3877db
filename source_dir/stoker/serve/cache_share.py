"""Head: which share of a run's records is cached, decided once.

Records of the cached and of the direct path may differ in pixels, so what is cached must not depend on what a
host has room for at the moment: the share is fixed at the start and saved in the data cursor.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from statistics import fmean
from typing import Any

from stoker.chain.chain import Chain
from stoker.config.schema import Config
from stoker.errors import CacheError
from stoker.protocol import Shard
from stoker.read.host_cache import CacheSpec, homes_of, size_in_cache
from stoker.read.sources import IndexedSource, Source
from stoker.serve.pool import chain_hosts
from stoker.serve.shards import host_cache

MOST_RECORDS, MOST_FILES, PER_FILE = 64, 4, 16
"""How many records tell how large they are, spread over the split; of a source that only reads sequentially,
the first ones of a few shards."""
SAMPLE_S, DEADLINE_S = 10.0, 60.0
"""Time for making them, and for all answers, since processes have to start."""
MARGIN = 0.95
"""Share of the room to fill: what does not fit after all costs more than without a cache."""


def share_that_fits(
    config: Config, splits: dict[str, tuple[Source, Chain]], totals: dict[str, int | None], cache: CacheSpec
) -> float:
    """The share of the records that the caches of the present hosts have room for.

    1 if a split cannot count its records, or if sizes or room cannot be measured: each host then caches the
    records that it encounters first.
    """
    counts = {split: count for split in splits if (count := totals[split])}
    if counts.keys() != splits.keys():
        return 1.0
    samples = {split: sample(source) for split, (source, _) in splits.items()}
    sizes = _sizes([(*splits[split], shards) for split, shards in samples.items()])
    rooms = _rooms(config, cache)
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


def _rooms(config: Config, cache: CacheSpec) -> list[int]:
    """Bytes that each host that preprocesses may cache; a host that does not answer is left out."""
    import ray

    hosts = chain_hosts(config, ray.get_runtime_context().get_node_id(), ray.nodes(), Counter())
    hosts = [host for host in hosts if not host.trains] or hosts
    return [found for found in _on([host.node for host in hosts], _room, cache) if found is not None]


def _room(cache: CacheSpec) -> int:
    try:
        return host_cache(cache, "").usage[1]
    except CacheError:
        return 0  # its chain workers report it


def _sizes(parts: list[tuple[Source, Chain, list[Shard]]]) -> list[list[int]]:
    """Bytes in the cache of some records of each split, made in a task, which may die of a record."""
    import ray

    packed = ray.cloudpickle.dumps([(source.for_workers(), chain, shards) for source, chain, shards in parts])
    return _on([ray.get_runtime_context().get_node_id()], _sizes_of, packed)[0] or [[]]


def _sizes_of(packed: bytes) -> list[list[int]]:
    found = []
    for source, chain, shards in pickle.loads(packed):  # noqa: S301 - written by the head
        sizes, ends = list[int](), time.monotonic() + SAMPLE_S

        def keep(record: Any, sizes: list[int] = sizes) -> int:
            sizes.append(size_in_cache(record))
            return 0

        for shard in shards:
            if time.monotonic() < ends:
                chain.run(islice(source.read(shard, None), PER_FILE), 0, keep)
        found.append(sizes)
    return found


def _on(nodes: list[str], what: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function returns on each of some hosts; None: it raised, or did not answer in time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    calls = [
        ray.remote(what)
        .options(
            name="cache",
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(*arguments)
        for node in nodes
    ]
    done = ray.wait(calls, num_returns=len(calls), timeout=DEADLINE_S)[0] if calls else []
    found = dict.fromkeys(calls)
    for call in done:
        with contextlib.suppress(ray.exceptions.RayError):
            found[call] = ray.get(call)
    return list(found.values())
