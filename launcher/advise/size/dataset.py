"""Laptop: the cost per row of a recipe's `ray.data.Dataset`, and rows of it for the chain.

with a Ray cluster on this machine: open the recipe's data → run the dataset for some seconds
without it:                         profile the chain on the rows, as for every other source
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.advise.size.nodes import ray_nodes
from stoker.config.loading import Resolved
from stoker.config.schema import Config
from stoker.entry.job_checks import open_all, without_ray
from stoker.errors import UsageError, explain
from stoker.hosts import machine
from stoker.messages import BadRecord, Record, Shard
from stoker.ray_compat import Sampling
from stoker.read.sources import Source
from stoker.serve.datasets import DatasetSource, as_records
from stoker.serve.opening import Data

if TYPE_CHECKING:
    import numpy as np

STORE_MB = 1024
KEPT_BYTES = 64 * 2**20
"""Rows for the chain; each profile process holds them."""
SLICE_ROWS = 64
DEADLINE_S = 180.0
"""For the first row: a dataset with a global sort or shuffle yields none before it has read everything."""


@dataclass(frozen=True)
class Opened:
    """Laptop: a job's data, ready to be profiled without Ray."""

    config: Config
    data: Data
    stages: list[dict[str, Any]]
    """The dataset's own operators, as `chain` in summary.json; empty for other sources."""

    @property
    def cpu_s(self) -> float:
        """CPU-seconds per sample of the dataset's own operators."""
        return sum(float(stage["cpu_ms_per_sample"]) for stage in self.stages) / 1000


class SampledRows(DatasetSource):
    """Laptop and profile process: rows that a dataset has yielded before, in place of its blocks.

    Args:
        tables: a few rows each.
    """

    def __init__(self, tables: list[Any]) -> None:
        super().__init__(None)
        self.tables = tables

    def shards(self, records: int, order: np.random.Generator | None) -> list[Shard]:
        """Laptop: one per table."""
        rows = [len(table) for table in self.tables]
        return [Shard("", 0, count, count, (i,), name="rows") for i, count in enumerate(rows)]

    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        """Profile process: as a chain worker reads a block."""
        yield from as_records(self.tables[shard.items[0]])

    def for_workers(self) -> Source:
        """Laptop: the rows themselves."""
        return self


def open_for_profile(resolved: Resolved, seconds: float, tell: Callable[[str], None]) -> Opened:
    """Laptop: open a job's data; run a `ray.data.Dataset` for `seconds` to get rows and their cost.

    Args:
        resolved: the job.
        seconds: how long the dataset runs, on all cores, after its first row.
        tell: receives a line per measurement.

    Raises:
        UsageError: as `open_data`; or the dataset fails, or yields no row.
    """
    opened = without_ray(lambda: open_all(resolved))
    if opened is not None:
        return Opened(*opened, [])
    cores = machine.cores()
    with ray_nodes(cores, STORE_MB):
        config, data = open_all(resolved)
        source = data.sources["train"]
        if not isinstance(source, DatasetSource):
            return Opened(config, data, [])
        tell(f"the dataset's own operators on all cores, {seconds:.0f} s")
        tables, costs, whole = run_dataset(source.dataset, seconds, cores)
    data.sources["train"] = SampledRows(tables)
    data.totals["train"] = whole
    stages = [
        {"stage": f"ray.data: {name}", "cpu_ms_per_sample": round(1000 * cost, 4), "bytes_out": 0}
        for name, cost in costs.items()
    ]
    return Opened(config, data, stages)


def run_dataset(dataset: Any, seconds: float, cores: int) -> tuple[list[Any], dict[str, float], int | None]:
    """Laptop, connected to a cluster: run a dataset for a while.

    Returns:
        Tables of a few rows each; CPU seconds per row of each operator; the number of rows, if the
        dataset ended in time.

    Raises:
        UsageError: the dataset fails, or yields no row.
    """
    import ray
    from ray.data.block import BlockAccessor

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    execution = Sampling(dataset)
    over = threading.Event()

    def end() -> None:
        over.set()
        execution.shutdown()

    timer = threading.Timer(DEADLINE_S, end)
    timer.start()
    tables: list[Any] = []
    kept = rows = 0
    try:
        for reference in execution.blocks():
            if not rows:
                timer.cancel()
                timer.join()
                timer = threading.Timer(seconds, end)
                timer.start()
            block = BlockAccessor.for_block(ray.get(reference))
            rows += block.num_rows()
            for first in range(0, block.num_rows() if kept < KEPT_BYTES else 0, SLICE_ROWS):
                part = block.slice(first, min(first + SLICE_ROWS, block.num_rows()), copy=True)
                tables.append(part)
                kept += BlockAccessor.for_block(part).size_bytes()
    except Exception as error:
        # Work in progress at the end of the time may fail because of it.
        if not (rows and over.is_set()):
            raise UsageError(f"size: the dataset failed: {explain(error)}") from error
    finally:
        timer.cancel()
        timer.join()  # nothing of Ray may be in use when this process disconnects
        execution.shutdown()
    if not rows and over.is_set():
        raise UsageError(
            f"size: the dataset yielded no row within {DEADLINE_S:.0f} s; run the job for an epoch and pass"
            " its run directory: --from RUN"
        )
    if not rows:
        raise UsageError("size: the dataset has no row")
    return tables, execution.cpu_per_row(cores), None if over.is_set() else rows
