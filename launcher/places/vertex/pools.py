"""Laptop: a job's host groups as Vertex AI worker pools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.config.schema import Config
from stoker.events import google
from stoker.hosts.services.vertex import POOLS_VARIABLE


@dataclass(frozen=True)
class Pool:
    """Laptop: hosts of one machine type and the configuration key that defines them."""

    group: str
    machine_type: str
    accelerator: str | None
    count: int | None
    """GPUs per host, as configured."""
    replicas: int
    key: str
    """`vertex.gpu`, or `vertex.pools.1`."""

    @property
    def gpus(self) -> int:
        """GPUs per host."""
        if self.count is not None:
            return self.count
        attached = self.accelerator is not None and self.machine_type.startswith(google.ATTACHES)
        return google.built_in_gpus(self.machine_type) or int(attached)

    @property
    def gpu_type(self) -> str | None:
        """The accelerator type as Vertex AI names it; None without GPUs."""
        return (self.accelerator or google.built_in_accelerator(self.machine_type)) if self.gpus else None


def pools_of(config: Config) -> tuple[Pool, ...]:
    """Laptop: the pools in the configuration, in its order; one group may have several."""
    settings = config.vertex
    listed = [("gpu", settings.gpu, "vertex.gpu"), ("cpu", settings.cpu, "vertex.cpu")]
    listed += [(pool.name, pool, f"vertex.pools.{index}") for index, pool in enumerate(settings.pools)]
    return tuple(
        Pool(name, hosts.machine_type, hosts.accelerator, hosts.count, hosts.replicas, key)
        for name, hosts, key in listed
        if hosts.machine_type
    )


def replicas_by_pool(sizes: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Laptop: groups with their number of hosts as worker pools: the first pool has exactly one replica.

    >>> replicas_by_pool([("gpu", 3), ("cpu", 4)])
    [('gpu', 1), ('gpu', 2), ('cpu', 4)]
    """
    (first, count), *others = sizes
    rest = [(first, count - 1)] if count > 1 else []
    return [(first, 1), *rest, *others]


def worker_pools(pools: Sequence[Pool]) -> list[tuple[Pool, int]]:
    """Laptop: the job's worker pools in order, each with its number of replicas."""
    numbered = replicas_by_pool([(str(index), pool.replicas) for index, pool in enumerate(pools)])
    return [(pools[int(index)], replicas) for index, replicas in numbered]


def pools_variable(pools: Sequence[tuple[str, str, int]]) -> dict[str, str]:
    """Laptop: the environment variable that tells hosts group, machine type and GPUs of every worker pool."""
    told = {
        f"workerpool{number}": {"group": group, "type": kind, "gpus": gpus}
        for number, (group, kind, gpus) in enumerate(pools)
    }
    return {POOLS_VARIABLE: json.dumps(told)}


def training_group(config: Config, pools: Sequence[Pool]) -> str | None:
    """Laptop: the group that trains: the one configured, else the only one with GPUs, else the only one."""
    groups = list(dict.fromkeys(pool.group for pool in pools))
    if named := config.cluster.gpu_group:
        return named if named in groups else None
    with_gpus = list(dict.fromkeys(pool.group for pool in pools if pool.gpus))
    if len(with_gpus) == 1:
        return with_gpus[0]
    return groups[0] if len(groups) == 1 else None
