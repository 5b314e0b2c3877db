"""Head: the one Ray Data execution of a run: tickets → chain workers → blocks.

    read tickets (head)  →  map_batches(ChainWorker), an actor per CPU  →  blocks

Epochs follow one another without a gap, and processes stay warm for the whole run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stoker.hosts.topology import GROUP_LABEL, NODE_LABEL
from stoker.messages import Origin
from stoker.serve import ray_internals
from stoker.serve.chain_worker import ChainWorker
from stoker.serve.pool import Pool

if TYPE_CHECKING:
    from ray.data import Dataset

IN_FLIGHT = 4
"""Maximum number of calls queued per actor, so that the next one is ready when one ends."""
BUFFERED_BLOCKS = 16
"""Blocks that a task may buffer before the executor takes the first; the executor polls every 0.1 s."""
TICKETS_S = 60.0
CPUS, SHARING_CPUS = 0.5, 0.1
"""CPUs that a chain worker requests from Ray. Less than 1, so that a host can also take the workers of a lost
host; `Pool` decides how many run. With `data.share`, most workers wait for another run's."""


class Engine:
    """Head: part of the coordinator.

    Args:
        coordinator: its handle.
        pool: the hosts.
        head: this host's Ray node.
        shares: whether other runs make some of the blocks.
    """

    def __init__(self, coordinator: Any, pool: Pool, head: str, shares: bool = False) -> None:
        self._pool, self._cpus = pool, SHARING_CPUS if shares else CPUS
        self.ended = False
        """Whether it was stopped on purpose."""
        self._placed: list[str] = []
        """Nodes of the starting actors, in order."""
        self.execution = ray_internals.Execution(self._dataset(coordinator, head))

    def _dataset(self, coordinator: Any, head: str) -> Dataset:
        import ray
        from ray.data import ActorPoolStrategy, DataContext

        context = DataContext.get_current().copy()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        # Take blocks in any order: the planner orders them and bounds how many are in flight.
        context.execution_options.preserve_order = False
        context.target_max_block_size = 1
        ray_internals.buffer_blocks(context, BUFFERED_BLOCKS)
        size = max(self._pool.slots, 1)
        with DataContext.current(context):
            tickets = ray.data.read_datasource(
                ticket_source(coordinator),
                override_num_blocks=1,
                num_cpus=0,
                ray_remote_args={"label_selector": {NODE_LABEL: head}},
            )
            return tickets.map_batches(
                ChainWorker,
                fn_constructor_args=(coordinator,),
                batch_size=None,
                batch_format="pyarrow",
                compute=ActorPoolStrategy(
                    min_size=size, max_size=size, max_tasks_in_flight_per_actor=IN_FLIGHT
                ),
                num_cpus=self._cpus,
                ray_remote_args_fn=self._place,
            )

    def _place(self) -> dict[str, Any]:
        """Options that place the next actor; called from Ray Data's thread."""
        running, starting = self._actors(), self._starting()
        self._placed = self._placed[len(self._placed) - starting :]
        gone = set(self._pool.leaving)
        there = Counter(node for actor, node in running.items() if actor not in gone) + Counter(self._placed)
        node = self._pool.place(there)
        self._placed.append(node)
        if not node:
            return {}
        there_only = {NODE_LABEL: node}
        # If its host is lost, the actor restarts on another one and recomputes lost blocks.
        groups = self._pool.groups
        allowed = [{"label_selector": {GROUP_LABEL: f"in({','.join(groups)})"}}] if groups else []
        # Last resort: anywhere, without work. An actor that cannot be placed would end the run.
        return {"label_selector": there_only, "fallback_strategy": [*allowed, {"label_selector": {}}]}

    def run(self, arrived: Callable[[Origin, Any], None]) -> None:
        """Thread: run until the coordinator stops issuing tickets.

        Args:
            arrived: takes each block and its origin.
        """
        try:
            for reference in self.execution.blocks():
                arrived(ray_internals.origin_of(reference), reference)
        except Exception:
            if not self.ended:
                raise

    def look(self) -> None:
        """Called periodically: match the number and location of chain workers to the pool."""
        self._pool.workers_are(self._actors(), time.monotonic())
        self.execution.resize(max(self._pool.slots, 1), self._pool.leaving)

    def _actors(self) -> dict[str, str]:
        # Ray Data asks for the first placements while it constructs the execution.
        return self.execution.actors() if hasattr(self, "execution") else {}

    def _starting(self) -> int:
        return self.execution.pending() if hasattr(self, "execution") else len(self._placed)


def ticket_source(coordinator: Any) -> Any:
    """Head: a Ray Data source with one read task that yields tickets as the coordinator issues them."""
    import pyarrow as pa
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class Tickets(Datasource):  # type: ignore[misc]
        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(self, parallelism: int, *args: Any, **options: Any) -> list[Any]:
            def blocks() -> Iterator[Any]:
                import ray

                while True:
                    for number in ray.get(coordinator.tickets.remote(), timeout=TICKETS_S):
                        yield pa.table({"ticket": [number]})

            about = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
            return [ReadTask(blocks, about)]

    return Tickets()
