"""Laptop: a job's host groups as Vertex AI worker pools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.job import COMMAND, Job
from launcher.places.sagemaker.training_job import pruned
from launcher.source import DataUpload, find_data_uploads
from stoker.config.loading import Resolved
from stoker.config.places import VertexConfig
from stoker.config.schema import Config
from stoker.events import google
from stoker.hosts.services.vertex import POOLS_VARIABLE, folder_of
from stoker.place import BACKEND_VARIABLE


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


CODE_ON_HOST = "/tmp/stoker-code"  # noqa: S108 - in a container of its own
ARCHIVE = "code.tar.gz"
PACKAGE = "stoker_job-1.0.tar.gz"
PACKAGE_MODULE = "stoker_job.task"
PREBUILT = "-docker.pkg.dev/vertex-ai/training/"
"""Part of the names of Google's prebuilt training containers."""


@dataclass(frozen=True)
class Draft:
    """Laptop: a request that has not been checked yet.

    Attributes:
        job: the job to stage, with the training group set in its configuration.
        name: display name, and the folder below `gcs_uri`.
        body: the CustomJob, in the REST API's JSON form.
        keys: path in `body` → configuration key, for error messages.
        data: local data to upload.
        data_at: recipe parameter → path of its data on the hosts.
    """

    job: Job
    name: str
    project: str
    region: str
    gcs_uri: str
    pools: tuple[Pool, ...]
    body: dict[str, Any]
    keys: dict[str, str]
    data: tuple[DataUpload, ...]
    data_at: dict[str, str]

    @property
    def base_uri(self) -> str:
        """Everything of this job: code, model, checkpoints, run directory."""
        return f"{self.gcs_uri}/{self.name}"

    @property
    def code_uri(self) -> str:
        """The archive of the staged code, or the package that contains it."""
        return f"{self.base_uri}/{ARCHIVE if self.settings.entry == 'container' else PACKAGE}"

    @property
    def parent(self) -> str:
        """The resource in which the job is created."""
        return f"projects/{self.project}/locations/{self.region}"

    @property
    def settings(self) -> VertexConfig:
        """The section `vertex`."""
        return self.job.resolved.config.vertex


def container_command(code_uri: str) -> list[str]:
    """Laptop: the command of a container: unpack the code from the mounted bucket and run it.

    `exec` makes Python process 1, so that SIGTERM reaches it. The service may restart a container where it
    was, with the code of its first start.
    """
    unpack = f"rm -rf {CODE_ON_HOST} && python -m tarfile -e {folder_of(code_uri)} {CODE_ON_HOST}"
    return ["/bin/bash", "-c", f"{unpack} && cd {CODE_ON_HOST} && exec {' '.join(COMMAND)}"]


def draft(job: Job, name: str, project: str, gcs_uri: str) -> Draft:
    """Laptop: build the whole request, valid or not; `checks.problems` checks it.

    Args:
        job: the job to run.
        name: the job's display name.
        project: Google Cloud project.
        gcs_uri: `gs://bucket/prefix` for all of this job's objects.
    """
    config = job.resolved.config
    settings, pools = config.vertex, pools_of(config)
    if trains := training_group(config, pools):
        cluster = config.cluster.model_copy(update={"gpu_group": trains})
        config = config.model_copy(update={"cluster": cluster})
        job = replace(job, resolved=Resolved(config, job.resolved.origins))
    data = find_data_uploads(job.data, gcs_uri)
    keys: dict[str, str] = {}
    made = Draft(job, name, project, settings.region, gcs_uri, pools, {}, keys, data, _data_at(data))
    made.body.update(_body(made))
    return made


def _body(made: Draft) -> dict[str, Any]:
    settings, keys = made.settings, made.keys
    keys.update(
        {
            "displayName": "name",
            "labels": "vertex.labels",
            "encryptionSpec": "vertex.kms_key",
            "jobSpec.scheduling.timeout": "vertex.max_runtime_s",
            "jobSpec.baseOutputDirectory": "vertex.gcs_uri",
        }
    )
    for field, key in (
        ("serviceAccount", "service_account"),
        ("persistentResourceId", "persistent_resource"),
        ("network", "network"),
        ("tensorboard", "tensorboard"),
    ):
        keys[f"jobSpec.{field}"] = f"vertex.{key}"
    body: dict[str, Any] = pruned(
        {
            "displayName": made.name,
            "jobSpec": {
                "workerPoolSpecs": _pool_specs(made),
                "scheduling": {
                    "timeout": f"{settings.max_runtime_s}s",
                    "restartJobOnWorkerRestart": settings.restart,
                    "strategy": "SPOT" if settings.spot else "STANDARD",
                },
                "serviceAccount": settings.service_account,
                "network": settings.network,
                "persistentResourceId": settings.persistent_resource,
                "tensorboard": settings.tensorboard,
                "baseOutputDirectory": {"outputUriPrefix": made.base_uri},
            },
            "labels": {"stoker-job": _label(made.job.name), **settings.labels},
            "encryptionSpec": {"kmsKeyName": settings.kms_key},
        }
    )
    return body


def _pool_specs(made: Draft) -> list[dict[str, Any]]:
    settings = made.settings
    if not made.pools:
        return []
    listed = worker_pools(made.pools)
    told = pools_variable([(pool.group, pool.machine_type, pool.gpus) for pool, _ in listed])
    variables = {BACKEND_VARIABLE: "vertex", **told, **settings.environment}
    env = [{"name": name, "value": value} for name, value in variables.items()]
    specs = []
    for number, (pool, replicas) in enumerate(listed):
        where = f"jobSpec.workerPoolSpecs[{number}]"
        made.keys[f"{where}.replicaCount"] = f"{pool.key}.replicas"
        made.keys[f"{where}.machineSpec.machineType"] = f"{pool.key}.machine_type"
        made.keys[f"{where}.machineSpec.acceleratorType"] = f"{pool.key}.accelerator"
        made.keys[f"{where}.machineSpec.acceleratorCount"] = f"{pool.key}.count"
        made.keys[f"{where}.diskSpec"] = "vertex.boot_disk_gb"
        spec: dict[str, Any] = {
            "machineSpec": {
                "machineType": pool.machine_type,
                "acceleratorType": pool.gpu_type,
                "acceleratorCount": pool.gpus or None,
            },
            "replicaCount": replicas,
            "diskSpec": {
                "bootDiskType": settings.boot_disk_type,
                "bootDiskSizeGb": settings.boot_disk_gb,
            },
        }
        if settings.entry == "container":
            made.keys[f"{where}.containerSpec.imageUri"] = "vertex.image"
            command = container_command(made.code_uri)
            spec["containerSpec"] = {"imageUri": settings.image, "command": command, "env": env}
        else:
            made.keys[f"{where}.pythonPackageSpec.executorImageUri"] = "vertex.image"
            spec["pythonPackageSpec"] = {
                "executorImageUri": settings.image,
                "packageUris": [made.code_uri],
                "pythonModule": PACKAGE_MODULE,
                "env": env,
            }
        specs.append(spec)
    return specs


def _data_at(data: tuple[DataUpload, ...]) -> dict[str, str]:
    found = {}
    for item in data:
        folder = str(folder_of(item.uri))
        found[item.parameter] = folder if item.source.is_dir() else f"{folder}/{item.source.name}"
    return found


def _label(name: str) -> str:
    """A label value allows lower-case letters, digits, `_` and `-`."""
    return "".join(sign if sign.isalnum() or sign in "_-" else "-" for sign in name.lower())[:63]
