"""Script: finds the service of its job, and registers its loaders there."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

from stoker.loader.work import LoaderChain, LoaderSource
from stoker.serve.shards import Setup
from stoker.session import CPU_HOSTS_VARIABLE

ANSWER_S = 60.0
"""Deadline of a call to the service, which answers within seconds."""


def service_of(group: str, stall_s: float) -> Any:
    """Script: return the service of this job; the first caller starts it.

    It is detached, so that it outlives the script that starts it while other ranks use it.
    """
    import ray

    from stoker.hosts.topology import NODE_LABEL
    from stoker.loader.service import LoaderService
    from stoker.serve.elastic import Hosts
    from stoker.serve.opening import BUFFER_SHARE, LEAST_BUFFER_BYTES

    node = ray.get_runtime_context().get_node_id()
    resources = ray.cluster_resources()
    cpus = int(resources.get("CPU", 1))
    actor = ray.remote(LoaderService).options(
        name=f"stoker-loader-{group}",
        namespace="stoker",
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=64 + 2 * cpus,
        label_selector={NODE_LABEL: node},
    )
    budget = max(LEAST_BUFFER_BYTES, int(BUFFER_SHARE * resources.get("object_store_memory", 0)))
    from stoker.config.places import CpuHostsConfig
    from stoker.config.schema import ClusterConfig, Config
    from stoker.sizing.scaler import Scaler

    options = CpuHostsConfig.model_validate_json(os.environ.get(CPU_HOSTS_VARIABLE, "{}"))
    config = Config(cluster=ClusterConfig(cpu_hosts=options))
    scaler = Scaler(options) if options.max else None
    service = actor.remote(Hosts(config, node), budget, stall_s, scaler, node, cpus)
    service.enter.remote(service, ray.get_runtime_context().get_job_id())
    return service


def forget(service: Any, split: str) -> None:
    """Script, when a loader is collected: let go of the copies of its dataset.

    In a thread: garbage may be collected while Ray holds its locks.
    """
    import ray

    def tell() -> None:
        with suppress(Exception):  # the cluster may have ended
            service.forget.remote(split)

    if ray.is_initialized():
        threading.Thread(target=tell, name="stoker-forget", daemon=True).start()


def register(service: Any, pages: tuple[Any, Any], name: str, loader: str, iterable: bool) -> None:
    """Script: register a loader with the service and put its work into the object store.

    Args:
        service: the job's LoaderService.
        pages: packed: the location of the script's modules, and the loader's work.
        name: hash of the pages.
        loader: identifies the loader: what it registered before is dropped unless others use it.
        iterable: whether the dataset is.
    """
    import pickle

    import ray

    if ray.get(service.knows.remote(name, loader), timeout=ANSWER_S):
        return
    setup = Setup(LoaderSource(pages, iterable), pickle.dumps(LoaderChain()))  # type: ignore[arg-type]
    ray.get(service.register.remote(name, setup), timeout=ANSWER_S)
