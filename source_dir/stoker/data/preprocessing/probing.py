"""Head: determines the schema of each split from its first records, before training."""

from __future__ import annotations

import pickle
import sys
from itertools import islice
from typing import Any

from stoker.data.messages import Schema, Shard
from stoker.data.preprocessing.chain import Chain
from stoker.data.preprocessing.collating import all_of, collated
from stoker.data.preprocessing.geometry import MaskWatch, moved_alone
from stoker.data.preprocessing.stages import Stage
from stoker.data.sources.base import Source
from stoker.errors import SchemaError, UsageError

PROBE_RECORDS = 4
PROBE_S = 30.0
"""Deadline; after it the run starts anyway, and its first block fixes the schema."""


def fix_schemas(sources: dict[str, Any], chains: dict[str, Chain], block_records: int) -> None:
    """Head: set the schemas that every block of a split must have on the chains of a job.

    If Ray is connected, a task on this host runs the chains, since a record may crash its process; otherwise
    this process does. If that gives no schema (for example because the first records are bad or need another
    host), and for a `ray.data.Dataset`, the first block of the run fixes it.

    Raises:
        UsageError: columns cannot be batched, or differ between the first records.
    """
    shards = {name: next(iter(source.shards(block_records, None)), None) for name, source in sources.items()}
    wanted = {split: source for split, source in sources.items() if shards[split] is not None}
    found: dict[str, tuple[Schema, ...] | str]
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        found = _in_tasks(wanted, chains, shards)
    else:
        found = {split: probe(source, shards[split], chains[split]) for split, source in wanted.items()}
    for split, answer in found.items():
        if isinstance(answer, str):
            raise UsageError(f"{split}: {answer}")
        chains[split].schemas = answer


def probe(source: Source, shard: Shard | None, chain: Chain) -> tuple[Schema, ...] | str:
    """Head or a task there: the schemas of the first records of a shard; a text if they cannot be batched."""
    if shard is None:
        return ()
    stages, watch = chain.stages, MaskWatch()
    chain = chain.of(watch.among(stages))
    try:
        columns, report = chain.run(islice(source.read(shard, None), PROBE_RECORDS), 0)
        if chain.collate and report.rows:
            collated(chain.collate, all_of([(columns, 0, report.rows)])[0], "probe")
    except (SchemaError, UsageError) as error:
        return _moved(stages, watch) or str(error)
    except Exception:
        return ()  # the run reports it where it happens
    return _moved(stages, watch) or report.schemas


def _moved(stages: list[Stage], watch: MaskWatch) -> str:
    """Why image and masks would no longer show the same, unless the chain itself says so."""
    found = [] if moved_alone(stages) else moved_alone(stages, watch.seen)
    return "; ".join(text for text, random in found if random)


def _in_tasks(
    sources: dict[str, Source], chains: dict[str, Chain], shards: dict[str, Shard | None]
) -> dict[str, tuple[Schema, ...] | str]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    task = ray.remote(_probe_packed).options(
        name="schema", num_cpus=0, max_retries=0, scheduling_strategy=here
    )
    asked = {
        split: task.remote(ray.cloudpickle.dumps((source.for_workers(), shards[split], chains[split])))
        for split, source in sources.items()
    }
    found: dict[str, tuple[Schema, ...] | str] = {}
    for split, answer in asked.items():
        try:
            found[split] = ray.get(answer, timeout=PROBE_S)
        except ray.exceptions.RayError:
            # Not cancelled: where that meets the task's answer, Ray ends this process.
            found[split] = ()
    return found


def _probe_packed(packed: bytes) -> tuple[Schema, ...] | str:
    """A task on the head."""
    return probe(*pickle.loads(packed))  # noqa: S301 - written by the head
