"""Train worker: has a CPU host turn the records of a batch into the batch, with the recipe's `collate`.

The records of a batch lie in blocks on several hosts. A Ray task on one of these hosts fetches them, calls
`collate` and packs the result, which travels to the train worker like any block. The task is repeated if its
host is lost.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from stoker.chain.chain import use_one_thread
from stoker.chain.collating import CollateFn, all_of, collate_of, collated, seed_of
from stoker.chain.columns import schema_of
from stoker.config.schema import Config
from stoker.errors import DataError, Failure, StokerError, cause_of
from stoker.hosts.topology import GROUP_LABEL, label
from stoker.protocol import BlockSlice, Schema
from stoker.recipe import Batch
from stoker.serve.blocks.batches import refuse_other_block
from stoker.serve.blocks.client import Transport, block_transport
from stoker.serve.blocks.packing import PAGE, PAGES, pack

RETRIES = 3
MOST_AT_ONCE = 16
"""Batches of a train worker that CPU hosts make at the same time, at most."""


class CollateSpec(NamedTuple):
    collate: CollateFn
    seed: int
    split: str
    epoch: int


class Collated(NamedTuple):
    pages: BlockSlice
    ids: Any
    keys: tuple[str, ...]
    cpu_s: float


@dataclass
class HostBatch:
    """One step's batch in this host's memory; a copy to the device replaces its columns."""

    columns: Batch
    ids: Any
    keys: list[str]
    nbytes: int
    produced: float
    """`time.perf_counter()` when it was ready on the CPU host, and below, when it was here and one batch."""
    arrived: float
    collate_cpu_s: float = 0.0
    collated: float = 0.0
    padded: int = 0


class Collator:
    """One per pass, used by the threads of its feed; `data.stall_timeout_s` is the deadline for a batch."""

    def __init__(
        self, config: Config, split: str, epoch: int, ranks: int, transport: Transport, service: Any
    ) -> None:
        import ray

        cpus = int(ray.cluster_resources().get("CPU", 1))
        self.at_once = max(2, min(cpus // ranks, MOST_AT_ONCE))
        self._job = ray.put(
            CollateSpec(collate_of(config.recipe, config.params), config.seed, split, epoch)
        )
        # No CPUs: the chain workers hold them all.
        self._task = ray.remote(num_cpus=0, max_retries=RETRIES)(collate_on_host)
        self._service, self._transport = service, transport
        self._timeout_s = config.data.stall_timeout_s
        self._hosts = CollatePlacement(preprocessing_nodes(config.data.preprocess_on), self.at_once)

    def fetch(self, parts: list[BlockSlice], schema: Schema) -> HostBatch:
        for last_try in (False, False, True):
            made = self._made(parts, schema)
            produced = time.perf_counter()
            try:
                (content,), arrived = self._transport.objects(made.pages)
                break
            except DataError:  # its host was lost with it
                if last_try:
                    raise
        self._transport.drop(made.pages)
        size = made.pages.of * PAGE
        return HostBatch(content, made.ids, list(made.keys), size, produced, arrived, made.cpu_s)

    def _made(self, parts: list[BlockSlice], schema: Schema) -> Collated:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self._hosts.take(parts)
        place = NodeAffinitySchedulingStrategy(node, soft=True) if node else "DEFAULT"
        task = self._task.options(name="collate", scheduling_strategy=place)
        try:
            answer = task.remote(self._job, schema, parts, self._service, self._timeout_s)
            return cast(Collated, ray.get(answer, timeout=self._timeout_s))
        except ray.exceptions.GetTimeoutError:
            raise DataError(
                f"collate: no batch within {self._timeout_s:.0f} s (data.stall_timeout_s)"
            ) from None
        except ray.exceptions.RayError as error:
            if isinstance(cause := cause_of(error), StokerError):
                raise cause from None
            raise DataError(f"collate: {Failure.of(error)}") from error
        finally:
            self._hosts.done(node)


def collate_on_host(
    job: CollateSpec, schema: Schema, parts: list[BlockSlice], service: Any, timeout_s: float
) -> Collated:
    """CPU host: a task that makes one batch, and stores its pages as a block of this host."""
    use_one_thread()
    began = time.process_time()
    transport = _transport(service, timeout_s)
    found = [transport.rows(part) for part in parts]
    for part, (columns, _, _, length) in zip(parts, found, strict=True):
        refuse_other_block(part, schema, schema_of(columns), length)
    records, ids, keys = all_of([(columns, start, stop) for columns, start, stop, _ in found])
    seed = seed_of(job.seed, job.split, job.epoch, ids)
    pages = pack([collated(job.collate, records, seed)])
    folder, rows = transport.folder(), len(pages)
    made = BlockSlice(folder.write({PAGES: pages}), 0, rows, folder.node, rows)
    return Collated(made, ids, tuple(keys), time.process_time() - began)


_transports: dict[str, Transport] = {}


def _transport(service: Any, timeout_s: float) -> Transport:
    """CPU host: that of this process, which makes many batches."""
    if repr(service) not in _transports:
        _transports.clear()
        _transports[repr(service)] = block_transport(service, pinned=False, timeout_s=timeout_s)
    return _transports[repr(service)]


class CollatePlacement:
    """Which host makes the next batch: one that has its records, unless it has enough to do."""

    def __init__(self, nodes: list[str], at_once: int) -> None:
        self._lock = threading.Lock()
        self._busy = dict.fromkeys(nodes, 0)
        self._share = math.ceil(at_once / max(len(nodes), 1))

    def take(self, parts: list[BlockSlice]) -> str:
        """A node for a batch of these rows; empty: any. `done` must follow."""
        rows: Counter[str] = Counter()
        for part in parts:
            rows[part.node] += part.stop - part.start
        with self._lock:
            if not self._busy:
                return rows.most_common(1)[0][0]
            node = min(
                self._busy, key=lambda n: (self._busy[n] >= self._share, -rows[n], self._busy[n])
            )
            self._busy[node] += 1
            return node

    def done(self, node: str) -> None:
        with self._lock:
            if node in self._busy:
                self._busy[node] -= 1


def preprocessing_nodes(groups: list[str]) -> list[str]:
    """Nodes that may make batches: those of `data.preprocess_on`, else those without GPUs."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    wanted = [label(group) for group in groups]
    if wanted:
        return [n["NodeID"] for n in alive if n.get("Labels", {}).get(GROUP_LABEL) in wanted]
    own = ray.get_runtime_context().get_node_id()
    return [n["NodeID"] for n in alive if n["NodeID"] != own and not n["Resources"].get("GPU")]
