"""Runs chain workers by Ray Data: each holds a lease, and works until the service ends it.

    leases  →  map_batches(ChainWorker), an actor per lease  →  rows of statistics

Ray Data starts, places and restarts the workers, and ends those whose lease is over. The workers that are
missing at a moment start together: all of them at the beginning, and later those of hosts that join.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, TypedDict

from stoker.serve.chain_worker import ChainWorker
from stoker.serve.pool import Pool

CPUS = 0.5
"""CPUs that a chain worker requests from Ray. Less than 1, so that a host can also take the workers of a lost
host until their leases are ended; `Pool` decides how many run."""
START_S = 180.0
"""Workers that have not reported after this time are started again."""
TEXTS = 20
"""Number of executions whose statistics are kept as text."""


class Operator(TypedDict):
    """What chain workers did in all; times are summed over them."""

    name: str
    tasks: int
    rows: int
    bytes: int
    cpu_s: float
    wall_s: float


class Leases:
    """Part of the service.

    Args:
        service: its handle.
        run: names the folders of blocks.
        pool: the hosts.
        failed: takes the error that ends an execution.
    """

    def __init__(self, service: Any, run: str, pool: Pool, failed: Callable[[BaseException], None]) -> None:
        self._service, self._run, self._pool, self._failed = service, run, pool, failed
        self._lock = threading.Lock()
        self._numbers = count()
        self._starting: dict[int, tuple[float, Counter[str]]] = {}
        """By execution: since when, and how many workers it has still to start, by node."""
        self._threads: list[threading.Thread] = []
        self._datasets: list[Any] = []
        self._sums: Counter[str] = Counter()

    def entered(self, node: str) -> None:
        """A worker has started on a node."""
        with self._lock:
            for _, starting in self._starting.values():
                if starting[node] > 0:
                    starting[node] -= 1
                    return

    def look(self) -> None:
        """Start the workers that are missing."""
        now = time.monotonic()
        with self._lock:
            self._starting = {
                number: (since, nodes)
                for number, (since, nodes) in self._starting.items()
                if now - since < START_S and nodes.total() > 0
            }
            starting = sum((nodes for _, nodes in self._starting.values()), Counter[str]())
            places = self._pool.missing(starting)
            if not places:
                return
            number = next(self._numbers)
            self._starting[number] = now, Counter(places)
        thread = threading.Thread(target=self._execute, args=(number, places), name="leases", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the end of all leases."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def statistics(self) -> tuple[str, list[Operator]]:
        """Ray Data's own text about the latest executions, and the sums of all leases that are over."""
        text = "\n".join(dataset.stats() for dataset in self._datasets[-TEXTS:])
        with self._lock:
            sums = Counter(self._sums)
        if not sums["tasks"]:
            return text, []
        whole = {name: int(sums[name]) for name in ("tasks", "rows", "bytes")}
        times = {name: round(float(sums[name]), 3) for name in ("cpu_s", "wall_s")}
        return text, [Operator(name="MapBatches(ChainWorker)", **whole, **times)]  # type: ignore[typeddict-item]

    def _execute(self, number: int, places: list[str]) -> None:
        try:
            dataset = self._dataset(places)
            self._datasets = [*self._datasets, dataset][-TEXTS:]
            for rows in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                self._add(rows.to_pylist())
        except Exception as error:
            self._failed(error)
        finally:
            with self._lock:
                self._starting.pop(number, None)

    def _dataset(self, places: list[str]) -> Any:
        import ray
        from ray.data import ActorPoolStrategy

        nodes = iter(places)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            leases = ray.data.from_items(
                [{"lease": n} for n in range(len(places))], override_num_blocks=len(places)
            )
            leases.context.enable_progress_bars = False
            leases.context.max_errored_blocks = -1
            return leases.map_batches(
                ChainWorker,
                fn_constructor_args=(self._service, self._run),
                batch_size=None,
                batch_format="pyarrow",
                compute=ActorPoolStrategy(size=len(places), max_tasks_in_flight_per_actor=1),
                num_cpus=CPUS,
                ray_remote_args_fn=lambda: _at(nodes),
                max_restarts=-1,
                max_task_retries=-1,
            )

    def _add(self, rows: list[dict[str, Any]]) -> None:
        with self._lock:
            self._sums["tasks"] += len({row["lease"] for row in rows})
            for row in rows:
                for name, column in (("rows", "records"), ("bytes", "bytes"), ("wall_s", "seconds")):
                    self._sums[name] += row[column]
                self._sums["cpu_s"] += row["cpu_s"]


def _at(nodes: Iterator[str]) -> dict[str, Any]:
    """Options that place the next worker: on its node, or anywhere once that is lost."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = next(nodes, "")
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)} if node else {}
