"""Head: determines the schema of each split from its first records, before training."""

from __future__ import annotations

import contextlib
import pickle
import sys
from itertools import islice
from typing import Any, NamedTuple

from stoker.chain.chain import Chain
from stoker.chain.collating import all_of, collated
from stoker.errors import SchemaError, UsageError
from stoker.protocol import BlockReport, Schema, Shard
from stoker.read.sources import Source, drawing

PROBE_RECORDS = 4
PROBE_S = 30.0
"""Deadline; after it the run starts anyway, and its first block fixes the schema."""


class ProbeResult(NamedTuple):
    refused: str | None = None
    schemas: tuple[Schema, ...] = ()
    made: tuple[dict[str, Any], BlockReport] | None = None


def fix_schemas(
    sources: dict[str, Any], chains: dict[str, Chain], block_records: int
) -> dict[str, Any]:
    """Set the schemas that every block of a split must have on the chains of a job.

    If Ray is connected, a task on this host runs the chains, since a record may crash its process; otherwise
    this process does. If that gives no schema (for example because the first records are bad or need another
    host), and for a `ray.data.Dataset`, the first block of the run fixes it.
    """
    asked = {
        split: (source, shard, chains[split])
        for split, source in sources.items()
        if (shard := next(iter(source.shards(block_records, None)), None)) is not None
    }
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        answers = _in_tasks(asked)
    else:
        answers = {split: probe(*parts) for split, parts in asked.items()}
    for split, answer in answers.items():
        if answer.refused is not None:
            raise UsageError(f"{split}: {answer.refused}")
        chains[split].schemas = answer.schemas
    return {split: answer.made for split, answer in answers.items() if answer.made}


def probe(source: Source, shard: Shard, chain: Chain) -> ProbeResult:
    try:
        with drawing("probe"):
            records = list(islice(source.read(shard, None), PROBE_RECORDS))
            columns, report = chain.run(records, 0)
            if chain.collate and report.rows:
                collated(chain.collate, all_of([(columns, 0, report.rows)])[0], "probe")
    except (SchemaError, UsageError) as error:
        return ProbeResult(str(error))
    except Exception:
        return ProbeResult()  # the run reports it where it happens
    return ProbeResult(None, report.schemas, (columns, report) if columns else None)


def _in_tasks(asked: dict[str, tuple[Source, Shard, Chain]]) -> dict[str, ProbeResult]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    task = ray.remote(_probe_packed).options(
        name="schema", num_cpus=0, max_retries=0, scheduling_strategy=here
    )
    answers = {
        split: task.remote(ray.cloudpickle.dumps((source.for_workers(), *others)))
        for split, (source, *others) in asked.items()
    }
    found = dict.fromkeys(asked, ProbeResult())
    for split, answer in answers.items():
        # Not cancelled: where that meets the task's answer, Ray ends this process.
        with contextlib.suppress(ray.exceptions.RayError):
            found[split] = ray.get(answer, timeout=PROBE_S)
    return found


def _probe_packed(packed: bytes) -> ProbeResult:
    return probe(*pickle.loads(packed))  # noqa: S301 - written by the head
