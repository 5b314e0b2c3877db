"""Laptop: a job's worker pools and its CustomJob request, with what is checked before anything is uploaded.

Pure: no calls to Google Cloud. All rules run, so that the user sees every problem at once.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stoker.config.places import VertexConfig
from stoker.errors import UsageError
from stoker.events import prices
from stoker.events.prices import google_prices
from stoker.hosts.services.vertex import MOUNTS, POOLS_VARIABLE, gcs_folder
from stoker.place import PLACE_VARIABLE
from stoker_launcher.job import COMMAND, Job, find_data_uploads
from stoker_launcher.places.remote import (
    CloudRequest,
    HostGroup,
    cost_table,
    pruned,
    shared_problems,
    training_group,
    with_training_group,
)
from stoker_launcher.places.vertex import google_cloud

CODE_ON_HOST = "/tmp/stoker-code"  # noqa: S108 - in a container of its own
ARCHIVE = "code.tar.gz"
One = TypeVar("One")
RESERVED_VARIABLES = (
    "AIP_",
    "CLOUD_ML_",
    "CLUSTER_SPEC",
    "TF_CONFIG",
    "RAY_AUTH_",
    "RAY_ADDRESS",
    "STOKER_",
)


def pools_of(settings: VertexConfig) -> Iterator[HostGroup]:
    listed = [("gpu", settings.gpu, "vertex.gpu"), ("cpu", settings.cpu, "vertex.cpu")]
    listed += [
        (pool.name, pool, f"vertex.pools.{index}") for index, pool in enumerate(settings.pools)
    ]
    for name, hosts, key in listed:
        kind, accelerator, asked = hosts.machine_type, hosts.accelerator, hosts.count
        if not kind:
            continue
        gpus = asked if asked is not None else prices.built_in_gpus(kind) or int(bool(accelerator))
        gpu_name = (accelerator or prices.built_in_accelerator(kind) or "") if gpus else ""
        known = prices.GOOGLE_MACHINES.get(kind)
        vcpus = known.vcpus if known else None
        yield HostGroup(name, kind, hosts.replicas, key, vcpus, gpus, gpu_name)


def replicas_by_pool(sizes: Sequence[tuple[One, int]]) -> list[tuple[One, int]]:
    """Groups with their number of hosts as worker pools: the first pool has exactly one replica.

    >>> replicas_by_pool([("gpu", 3), ("cpu", 4)])
    [('gpu', 1), ('gpu', 2), ('cpu', 4)]
    """
    (first, count), *others = sizes
    rest = [(first, count - 1)] if count > 1 else []
    return [(first, 1), *rest, *others]


def pools_variable(pools: Sequence[tuple[str, str, int]]) -> dict[str, str]:
    """The environment variable that tells hosts group, machine type and GPUs of every worker pool."""
    told = {
        f"workerpool{number}": {"group": group, "type": kind, "gpus": gpus}
        for number, (group, kind, gpus) in enumerate(pools)
    }
    return {POOLS_VARIABLE: json.dumps(told)}


@dataclass(frozen=True)
class VertexRequest(CloudRequest):
    section = "vertex"
    project: str = ""

    @property
    def code_uri(self) -> str:
        return f"{self.base_uri}/{ARCHIVE}"

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.region}"

    @property
    def settings(self) -> VertexConfig:
        return self.job.resolved.config.vertex

    def title(self) -> str:
        return f"Vertex AI custom job {self.name} in {self.parent}"

    def costs(self) -> str:
        settings, pools = self.settings, self.groups
        prices, seconds = google_prices(settings), settings.max_runtime_s
        return cost_table(pools, "vertex.max_runtime_s", seconds, prices) + "; without disks"

    def for_command_line(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.body["jobSpec"]
        return spec

    def copy_command(self, source: Path, target: str) -> list[str]:
        # It can follow links to files, but not to folders.
        links = (path for path in source.rglob("*") if path.is_symlink() and path.is_dir())
        if link := next(links, None):
            raise UsageError(
                f"--request: {link} is a link to a folder, which gcloud leaves out; copy it"
            )
        how = ["rsync", "-r", "--no-ignore-symlinks"] if source.is_dir() else ["cp"]
        return ["gcloud", "storage", *how, str(source), target]

    def create_command(self, file: Path) -> list[str]:
        create = ["gcloud", "ai", "custom-jobs", "create", f"--project={self.project}"]
        create += [f"--region={self.region}", f"--display-name={self.name}", f"--config={file}"]
        create += [f"--labels={','.join(f'{k}={v}' for k, v in self.body['labels'].items())}"]
        return [*create, *([f"--kms-key={self.settings.kms_key}"] if self.settings.kms_key else [])]


def container_command(code_uri: str) -> list[str]:
    """The command of a container: unpack the code from the mounted bucket and run it.

    `exec` makes Python process 1, so that SIGTERM reaches it. The service may restart a container where it
    was, with the code of its first start.
    """
    archive = shlex.quote(str(gcs_folder(code_uri)))
    unpack = f"rm -rf {CODE_ON_HOST} && python -m tarfile -e {archive} {CODE_ON_HOST}"
    return ["/bin/bash", "-c", f"{unpack} && cd {CODE_ON_HOST} && exec {' '.join(COMMAND)}"]


def request_of(job: Job, name: str, project: str, gcs_uri: str) -> VertexRequest:
    """Build the whole request, valid or not, with all objects below `gcs_uri`; `problems` checks it."""
    config = job.resolved.config
    pools, region = tuple(pools_of(config.vertex)), config.vertex.region
    if trains := training_group(config, pools):
        job = with_training_group(job, trains)
    local = {name: path for name, path in job.data.items() if not path.startswith(f"{MOUNTS}/")}
    data = find_data_uploads(local, gcs_uri)
    data_at = {item.parameter: item.path_in(str(gcs_folder(item.uri))) for item in data}
    if config.script is not None:
        data_at |= {
            name: str(gcs_folder(uri))
            for name, uri in config.params.items()
            if uri.startswith("gs://")
        }
    made = VertexRequest(job, name, region, gcs_uri, pools, {}, {}, data, data_at, project=project)
    made.body.update(pruned(_body(made), made.keys))
    return made


def _body(made: VertexRequest) -> dict[str, Any]:
    settings = made.settings

    # A label value allows lower-case letters, digits, `_` and `-`.
    label = "".join(
        sign if sign.isalnum() or sign in "_-" else "-" for sign in made.job.name.lower()
    )[:63]
    scheduling = {
        "timeout": f"{settings.max_runtime_s}s",
        "restartJobOnWorkerRestart": settings.restart,
        "strategy": "SPOT" if settings.spot else "STANDARD",
    }
    return {
        "displayName": made.name,
        "jobSpec": {
            "workerPoolSpecs": _pool_specs(made),
            "scheduling": scheduling,
            "serviceAccount": settings.service_account,
            "network": settings.network,
            "persistentResourceId": settings.persistent_resource,
            "tensorboard": settings.tensorboard,
            "baseOutputDirectory": {"outputUriPrefix": made.base_uri},
        },
        "labels": {"stoker-job": label, **settings.labels},
        "encryptionSpec": {"kmsKeyName": settings.kms_key},
    }


def _pool_specs(made: VertexRequest) -> list[dict[str, Any]]:
    settings = made.settings
    if not made.groups:
        return []
    listed = replicas_by_pool([(pool, pool.count) for pool in made.groups])
    told = pools_variable([(pool.name, pool.type, pool.gpus or 0) for pool, _ in listed])
    variables = {PLACE_VARIABLE: "vertex", **told, **settings.environment}
    env = [{"name": name, "value": value} for name, value in variables.items()]
    program = {"imageUri": settings.image, "command": container_command(made.code_uri), "env": env}
    disk = {"bootDiskType": settings.boot_disk_type, "bootDiskSizeGb": settings.boot_disk_gb}
    return [
        {
            "machineSpec": {
                "machineType": pool.type,
                "acceleratorType": pool.gpu_name or None,
                "acceleratorCount": pool.gpus or None,
            },
            "replicaCount": replicas,
            "diskSpec": disk,
            "containerSpec": program,
        }
        for pool, replicas in listed
    ]


def problems(request: VertexRequest, has_project: bool) -> list[str]:
    """What is wrong before anything is uploaded; the client library's own types have the last word."""
    settings, pools = request.settings, request.groups
    absent = {
        "project: not set, and the credentials name none; set it, or run `gcloud auth application-default"
        " login`": not has_project,
        "gcs_uri: not set; name a bucket of the job's region: gs://bucket/prefix": (
            settings.gcs_uri is None
        ),
        "image: not set; name an image with Python 3.11 to 3.13 and PyTorch 2.6 or newer, from Artifact"
        " Registry or Docker Hub (docs/vertex.md)": not settings.image,
        "pools: given together with vertex.gpu or cpu, and all would be billed; keep one form": bool(
            settings.pools and (settings.gpu.machine_type or settings.cpu.machine_type)
        ),
        "gpu.machine_type: no hosts requested; name a machine type, for example g2-standard-8": (
            not pools
        ),
    }
    found = [f"vertex.{line}" for line, holds in absent.items() if holds]
    uri = settings.gcs_uri
    if uri is not None and not re.fullmatch(r"gs://[^/\s]+(/[^*?#\[\]'\s]*)?", uri):
        found.append(f"vertex.gcs_uri: must be gs://bucket/prefix (got {uri!r})")
    for name in dict.fromkeys(pool.name for pool in pools):
        if len({(one.type, one.gpu_name, one.gpus) for one in pools if one.name == name}) > 1:
            differ = "differ in machine or GPUs; give them own names"
            found.append(f"vertex.pools: pools of the group {name!r} {differ}")
    for name in settings.environment:
        if name.startswith(RESERVED_VARIABLES):
            found.append(f"vertex.environment.{name}: set by Stoker or Vertex AI; remove it")
    shown = {"vertex.environment": settings.environment, "vertex.labels": settings.labels}
    remedy = "a gs:// URI, or /gcs/<bucket>/…"
    found += shared_problems(request, shown, "Secret Manager", remedy)
    found += google_cloud.rejected(request.body)
    return list(dict.fromkeys(found))
