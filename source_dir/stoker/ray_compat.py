"""Every call that is not part of Ray's public API. Each is looked for before it is used, and none is needed
for correctness."""

from __future__ import annotations

import contextlib
import uuid
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
