"""Every call that is not part of Ray's public API. Each is looked for before it is used, and none is needed
for correctness."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any


def read_environment_again() -> None:
    """Script, before it starts or joins a cluster: apply the token that is now in the environment.

    Ray reads its authentication mode and token once, when its library loads; a script may have loaded it
    long before it creates its loaders. Without this call, such a script must set the token first.
    """
    from ray import _raylet

    library: Any = _raylet
    with contextlib.suppress(AttributeError):
        library.Config.initialize("")
        library.AuthenticationTokenLoader.instance().reset_cache()


def ended_jobs() -> set[str] | None:
    """Ids of the Ray jobs whose driver has ended, also by SIGKILL; None: this Ray does not tell."""
    try:
        from ray._private.worker import global_worker

        client = global_worker.gcs_client
        jobs = client.get_all_job_info(skip_submission_job_info_field=True, skip_is_running_tasks_field=True)
        return {job.hex() for job, about in jobs.items() if about.is_dead}
    except (ImportError, AttributeError, TypeError):
        return None


def draining_nodes() -> set[str]:
    """Nodes that the cluster is about to take away, such as spot hosts.

    Empty where this Ray does not tell: then they are lost like any other.
    """
    import ray

    try:
        return set(ray._private.state.state.get_draining_nodes())
    except (AttributeError, TypeError):
        return set()


class HostRequest:
    """A run's request for hosts, sent to the cluster's autoscaler.

    The public `request_resources` keeps a single request per cluster, that of its last caller, until another
    call replaces it. The actor of Ray Data, where there is one, adds up the requests of all jobs and lets
    them expire, so that the hosts of a killed job are released.

    Args:
        resource: custom resource of which each of the hosts has 1.
    """

    def __init__(self, resource: str) -> None:
        self._resource, self._id, self._actor = resource, f"stoker-{uuid.uuid4().hex}", None
        with contextlib.suppress(ImportError, AttributeError):
            from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as of_ray_data

            self._actor = of_ray_data.get_or_create_autoscaling_coordinator()

    def send(self, count: int, expires_s: float) -> None:
        """Request this many hosts in all, including those that have joined; does not wait."""
        from ray.autoscaler.sdk import request_resources

        hosts = [{self._resource: 1}] * count
        if self._actor is None:
            request_resources(bundles=hosts)
            return
        self._actor.request_resources.remote(requester_id=self._id, resources=hosts, expire_after_s=expires_s)


class Sampling:
    """Laptop: an execution of a recipe's dataset as Ray Data would run it, to measure its cost."""

    def __init__(self, dataset: Any) -> None:
        self._executor = dataset._create_executor()
        self._bundles = dataset._build_bundle_iterator(self._executor)

    def blocks(self) -> Iterator[Any]:
        """Laptop: references of non-empty blocks as they arrive."""
        for bundle in self._bundles:
            for entry in bundle.blocks:
                if entry.metadata.num_rows:
                    yield entry.ref

    def shutdown(self) -> None:
        """Laptop: end the execution."""
        self._executor.shutdown(force=True)

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
