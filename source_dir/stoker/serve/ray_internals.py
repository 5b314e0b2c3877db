"""Every call that is not part of Ray's public API, with its reason. Written for Ray 2.60.

tests/unit/test_rooms.py pins that version: recheck this file when it changes.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import uuid
from collections.abc import Collection, Iterator
from typing import Any

from stoker.messages import Origin
from stoker.serve.statistics import CHANGING, Operator, RecentBlocks, operators

RAY_VERSION = "2.60"
ADD_UP_EVERY_S = 0.5


def buffer_blocks(context: Any, blocks: int) -> None:
    """Head: how many blocks a task may buffer before the executor takes the first.

    The default of 2 starves the ticket source and the chain workers, because the executor polls every 0.1 s.
    """
    context._max_num_blocks_in_streaming_gen_buffer = blocks


def read_environment_again() -> None:
    """Script, before it starts or joins a cluster: apply the token that is now in the environment.

    Ray reads its authentication mode and token once, when its library loads; a script may have loaded it
    long before it creates its loaders.
    """
    from ray import _raylet

    library: Any = _raylet
    library.Config.initialize("")
    library.AuthenticationTokenLoader.instance().reset_cache()


def origin_of(reference: Any) -> Origin:
    """Head: the task that made a block, and the block's index within that task, from 0.

    A bundle does not name its task. An object id is its task's id plus its number among the task's objects:
    number 1 is the generator, and each block is followed by its metadata.
    """
    index = int.from_bytes(reference.binary()[-4:], "little")
    return reference.task_id().hex(), index // 2 - 1


def keep_blocks_whole() -> None:
    """Chain worker, in its own process: keep what it yields as one block.

    A `target_max_block_size` of one byte makes Ray Data pass on each yielded block at once instead of
    collecting more first; but it would also split larger blocks.
    """
    from ray.data._internal.output_buffer import BlockOutputBuffer

    BlockOutputBuffer._exceeded_block_size_slice_limit = lambda self, block: False


def ended_jobs() -> set[str]:
    """Head: ids of the Ray jobs whose driver has ended, also by SIGKILL. Written for Ray 2.60."""
    from ray._private.worker import global_worker

    jobs = global_worker.gcs_client.get_all_job_info(
        skip_submission_job_info_field=True, skip_is_running_tasks_field=True
    )
    return {job.hex() for job, about in jobs.items() if about.is_dead}


def draining_nodes() -> set[str]:
    """Head: nodes that the cluster is about to take away, such as spot hosts. No public API lists them."""
    import ray

    return set(ray._private.state.state.get_draining_nodes())


class HostRequest:
    """Head: a run's request for hosts, sent to the cluster's autoscaler.

    The public `request_resources` keeps a single request per cluster, that of its last caller, until another
    call replaces it. The actor of Ray Data adds up the requests of all jobs and lets them expire, so that the
    hosts of a killed job are released.

    Args:
        resource: custom resource of which each of the hosts has 1.
    """

    def __init__(self, resource: str) -> None:
        from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as of_ray_data

        self._resource, self._id = resource, f"stoker-{uuid.uuid4().hex}"
        self._actor = of_ray_data.get_or_create_autoscaling_coordinator()

    def send(self, count: int, expires_s: float) -> None:
        """Request this many hosts in all, including those that have joined; does not wait."""
        hosts = [{self._resource: 1}] * count
        self._actor.request_resources.remote(requester_id=self._id, resources=hosts, expire_after_s=expires_s)


class FixedCluster:
    """Head: replaces Ray Data's cluster autoscaler, which requests hosts for the tasks that are queued.

    How many hosts pay off depends on training, which it does not see: `Scaler` decides, `Pool` finds them.
    """

    def try_trigger_scaling(self) -> None:
        """Do nothing: there are no hosts to request."""

    def on_executor_shutdown(self) -> None:
        """Do nothing: there are no hosts to release."""

    def get_total_resources(self) -> Any:
        """Unlimited: the planner bounds what is in flight.

        Ray Data would reserve object store memory for as many blocks as a task may buffer. If that exceeds
        the store, it starts no task while another operator runs one, as the ticket source always does.
        """
        from ray.data import ExecutionResources

        return ExecutionResources(cpu=1e6, gpu=1e6, memory=2**60, object_store_memory=2**60)


def add_up_rarely(manager: Any) -> None:
    """Head: let Ray Data's resource manager add up what operators use only now and then.

    Its scheduler does so three times per round, which is 40 % of its CPU time, to compare the sums with
    limits that `FixedCluster` makes infinite.

    Args:
        manager: the class.
    """
    add_up = manager.update_usages
    if hasattr(add_up, "__wrapped__"):
        return

    @functools.wraps(add_up)
    def rarely(self: Any) -> None:
        now = time.monotonic()
        if now - getattr(self, "_added_up", 0.0) >= ADD_UP_EVERY_S:
            self._added_up = now
            add_up(self)

    manager.update_usages = rarely


def keep_recent_blocks(operator: Any) -> None:
    """Head: let operators that are constructed from now on keep `RecentBlocks`, not every block's statistics.

    Args:
        operator: the class.
    """
    construct = operator.__init__
    if hasattr(construct, "__wrapped__"):
        return

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **options: Any) -> None:
        construct(self, *args, **options)
        self._output_blocks_stats = RecentBlocks()

    operator.__init__ = constructed


class Execution:
    """Head: an execution of a dataset whose actor pool is controlled from outside.

    Ray Data's autoscaler looks at the number of calls in flight. It does not know which hosts come first or
    what train workers need, so it gets a fixed size: minimum and maximum are always equal. It would also end
    the first idle actor, wherever that runs, and none if all are busy.
    """

    def __init__(self, dataset: Any) -> None:
        from ray.data._internal.execution import streaming_executor
        from ray.data._internal.execution.operators.map_operator import MapOperator

        streaming_executor.create_cluster_autoscaler = lambda *_, **__: FixedCluster()
        add_up_rarely(streaming_executor.ResourceManager)
        keep_recent_blocks(MapOperator)
        self._executor = dataset._create_executor()
        self._bundles = dataset._build_bundle_iterator(self._executor)
        self._pools: list[Any] = []
        self._leaving: set[str] = set()

    def blocks(self) -> Iterator[Any]:
        """Head: references of non-empty blocks as they arrive."""
        for bundle in self._bundles:
            for entry in bundle.blocks:
                if entry.metadata.num_rows:
                    yield entry.ref

    def _pool(self) -> Any:
        """The pool of the chain workers; None while the execution starts."""
        if not self._pools:
            topology = getattr(self._executor, "_topology", None) or ()
            self._pools = [pool for op in topology for pool in op.get_autoscaling_actor_pools()]
            for pool in self._pools:
                self._steer(pool)
        return self._pools[-1] if self._pools else None

    def actors(self) -> dict[str, str]:
        """Head: running actors: id → node."""
        pool = self._pool()
        states = list(pool._running_actors.items()) if pool else []
        return {actor._actor_id.hex(): state.actor_location for actor, state in states}

    def pending(self) -> int:
        """Head: number of actors that are starting."""
        pool = self._pool()
        return pool.num_pending_actors() if pool else 0

    def resize(self, size: int, leaving: Collection[str]) -> None:
        """Head: set the number of actors.

        Args:
            size: at least 1; does not include those that leave.
            leaving: ids of actors that get no more calls and end when their calls are done.
        """
        pool = self._pool()
        if pool is None:
            return
        self._leaving.clear()
        self._leaving.update(leaving)
        staying = len(pool._running_actors) + pool.num_pending_actors() - len(self._leaving)
        # Start the missing actors first, then end the others.
        size += len(self._leaving) if staying < size else 0
        pool._config = dataclasses.replace(pool._config, min_size=size, max_size=size, initial_size=size)

    def _steer(self, pool: Any) -> None:
        """Make the pool respect which actors leave."""
        rank = pool._update_rank

        def leaves(actor: Any) -> bool:
            return actor._actor_id.hex() in self._leaving

        def update_rank(actor: Any, state: Any, died: bool) -> None:
            rank(actor=actor, state=state, died=died or leaves(actor))

        def end_idle() -> bool:
            states = pool._running_actors.items()
            idle = [a for a, state in states if not state.num_tasks_in_flight and leaves(a)]
            if idle:
                pool._release_running_actor(idle[0])
            return bool(idle)

        pool._update_rank, pool._try_remove_idle_actor = update_rank, end_idle

    def kill(self, actor_id: str) -> None:
        """Head: end the process of a hung actor; Ray restarts it and its calls."""
        import ray

        pool = self._pool()
        for actor in list(pool._running_actors) if pool else ():
            if actor._actor_id.hex() == actor_id:
                ray.kill(actor, no_restart=False)

    def statistics(self) -> tuple[str, list[Operator]]:
        """Head: Ray Data's counters and timings, as its own text and by operator."""
        with CHANGING:
            summary = self._executor.get_stats().to_summary()
            lists = [stats for operator in self._executor._topology for stats in operator.get_stats().items()]
            earlier = {name: dict(vars(blocks)) for name, blocks in lists if isinstance(blocks, RecentBlocks)}
        return operators(summary, earlier)

    def shutdown(self) -> None:
        """Head: end the execution."""
        self._executor.shutdown(force=True)


class Sampling(Execution):
    """Laptop: an execution of a recipe's dataset as Ray Data would run it, to measure its cost."""

    def __init__(self, dataset: Any) -> None:
        self._executor = dataset._create_executor()
        self._bundles = dataset._build_bundle_iterator(self._executor)

    def cpu_per_row(self, processes: int) -> dict[str, float]:
        """Laptop: CPU seconds that each operator spends per row of the result.

        An execution that is cut short has read ahead. So an operator's seconds count per row of its own
        output, times the number of those rows that one row of the result needs.

        Args:
            processes: number of concurrent tasks: the first block of the first task of each is left out,
                because it includes the imports.
        """
        found: dict[str, float] = {}
        topology = list(self._executor._topology or ())
        needed = dict.fromkeys(topology[-1:], 1.0)
        for operator in reversed(topology):
            share = needed.get(operator, 0.0)
            for name, blocks in _own_blocks(operator).items():
                if warm := _warm(blocks, processes):
                    seconds = sum(block.exec_stats.cpu_time_s for block in warm)
                    each = share * seconds / sum(block.num_rows for block in warm)
                    found[name] = found.get(name, 0.0) + each
            for source in operator.input_dependencies:
                needed[source] = needed.get(source, 0.0) + share * _taken(operator, source)
        return dict(reversed(found.items()))


def _own_blocks(operator: Any) -> dict[str, list[Any]]:
    """Statistics of the blocks that an operator made, by step; limits and unions pass on others' blocks."""
    upstream = {block.exec_stats for source in operator.input_dependencies for block in _blocks(source)}
    return {
        name: [block for block in blocks if block.num_rows and block.exec_stats not in upstream | {None}]
        for name, blocks in operator.get_stats().items()
    }


def _blocks(operator: Any) -> list[Any]:
    return [block for blocks in operator.get_stats().values() for block in blocks]


def _warm(blocks: list[Any], processes: int) -> list[Any]:
    """Drop the first block of each of the first tasks, if others are left."""
    first = {block.exec_stats.task_idx or 0: block for block in reversed(blocks)}
    cold = {id(first[task]) for task in sorted(first)[:processes]}
    return [block for block in blocks if id(block) not in cold] or blocks


def _taken(operator: Any, source: Any) -> float:
    """Rows of `source` per row of `operator`."""
    metrics = operator.metrics
    if metrics.average_rows_inputs_per_task and metrics.average_rows_outputs_per_task:
        return float(metrics.average_rows_inputs_per_task / metrics.average_rows_outputs_per_task)
    own = [blocks for blocks in _own_blocks(operator).values() if blocks]
    # A limit or a union passes rows on unchanged.
    took = own[-1] if own else [block for o in operator.input_dependencies for block in _blocks(o)]
    rows = sum(block.num_rows or 0 for block in took)
    return sum(block.num_rows or 0 for block in _blocks(source)) / rows if rows else 0.0
