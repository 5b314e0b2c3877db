"""Laptop: a job's worker pools and its CustomJob request. Pure: no calls to Google Cloud."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from launcher.job import COMMAND, Job
from launcher.places.remote import (
    CloudRequest,
    HostGroup,
    Keyed,
    cost_table,
    pruned,
    training_group,
    with_training_group,
)
from launcher.source import find_data_uploads, pack, private_archive
from stoker.config.places import VertexConfig, VertexHostsConfig
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.events import prices
from stoker.events.prices import google_prices
from stoker.hosts.services.vertex import POOLS_VARIABLE, folder_of
from stoker.place import PLACE_VARIABLE

CODE_ON_HOST = "/tmp/stoker-code"  # noqa: S108 - in a container of its own
ARCHIVE = "code.tar.gz"
PACKAGE = "stoker_job-1.0.tar.gz"
PACKAGE_MODULE = "stoker_job.task"
One = TypeVar("One")
PREBUILT = "-docker.pkg.dev/vertex-ai/training/"
"""Part of the names of Google's prebuilt training containers."""
_SETUP = f"""from setuptools import setup

setup(name="stoker_job", version="1.0", packages=["stoker_job"], package_data={{"stoker_job": ["{ARCHIVE}"]}})
"""
_TASK = f'''"""Every host: unpack the job's code and run it in place of this process."""

import os
import shutil
import sys
import tarfile
from pathlib import Path

code = Path({CODE_ON_HOST!r})
shutil.rmtree(code, ignore_errors=True)
code.mkdir()
with tarfile.open(Path(__file__).with_name({ARCHIVE!r})) as archive:
    archive.extractall(code, filter="data")
os.chdir(code)
os.execv(sys.executable, [sys.executable, *{COMMAND[1:]!r}])
'''


@dataclass(frozen=True)
class WorkerPool(HostGroup):
    """Hosts of one machine type; one group may have several pools."""

    accelerator: str | None = None
    asked: int | None = None
    """GPUs per host, as configured."""


def _pool(name: str, hosts: VertexHostsConfig, key: str) -> WorkerPool:
    kind, accelerator = str(hosts.machine_type), hosts.accelerator
    attached = accelerator is not None and kind.startswith(prices.ATTACHES)
    gpus = hosts.count if hosts.count is not None else prices.built_in_gpus(kind) or int(attached)
    gpu_name = (accelerator or prices.built_in_accelerator(kind) or "") if gpus else ""
    known = prices.GOOGLE_MACHINES.get(kind)
    vcpus = known.vcpus if known else None
    return WorkerPool(name, kind, hosts.replicas, key, vcpus, gpus, gpu_name, None, accelerator, hosts.count)


def pools_of(config: Config) -> tuple[WorkerPool, ...]:
    """The pools in the configuration, in its order; one group may have several."""
    settings = config.vertex
    listed = [("gpu", settings.gpu, "vertex.gpu"), ("cpu", settings.cpu, "vertex.cpu")]
    listed += [(pool.name, pool, f"vertex.pools.{index}") for index, pool in enumerate(settings.pools)]
    return tuple(_pool(name, hosts, key) for name, hosts, key in listed if hosts.machine_type)


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
    """The CustomJob, its uploads, and warnings."""

    groups: tuple[WorkerPool, ...]
    project: str = ""

    @property
    def code_uri(self) -> str:
        """The archive of the staged code, or the package that contains it."""
        return f"{self.base_uri}/{ARCHIVE if self.settings.entry == 'container' else PACKAGE}"

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.region}"

    @property
    def settings(self) -> VertexConfig:
        return self.job.resolved.config.vertex

    def pack(self, folder: Path, archive: Path) -> None:
        (_pack_package if self.archive == PACKAGE else pack)(folder, archive)

    def title(self) -> str:
        return f"Vertex AI custom job {self.name} in {self.parent}, entry {self.settings.entry}"

    def costs(self) -> str:
        settings, pools = self.settings, self.groups
        prices, seconds = google_prices(settings), settings.max_runtime_s
        return cost_table(pools, "vertex", seconds, settings.spot, prices) + "; without disks"

    def for_command_line(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.body["jobSpec"]
        return spec

    def copy_command(self, source: Path, target: str) -> list[str]:
        # It follows links to files when told so, and never those to folders.
        links = (path for path in source.rglob("*") if path.is_symlink() and path.is_dir())
        if link := next(links, None):
            raise UsageError(f"--request: {link} is a link to a folder, which gcloud leaves out; copy it")
        how = ["rsync", "-r", "--no-ignore-symlinks"] if source.is_dir() else ["cp"]
        return ["gcloud", "storage", *how, str(source), target]

    def create_command(self, file: Path) -> list[str]:
        create = ["gcloud", "ai", "custom-jobs", "create", f"--project={self.project}"]
        create += [f"--region={self.region}", f"--display-name={self.name}", f"--config={file}"]
        create += [f"--labels={','.join(f'{k}={v}' for k, v in self.body['labels'].items())}"]
        return [*create, *([f"--kms-key={self.settings.kms_key}"] if self.settings.kms_key else [])]


def _pack_package(folder: Path, archive: Path) -> None:
    """A Python package with the archive in it, as Google's prebuilt containers install it."""
    package, _, module = PACKAGE_MODULE.partition(".")
    with tempfile.TemporaryDirectory(prefix="stoker-") as scratch:
        pack(folder, Path(scratch) / ARCHIVE)
        content = (Path(scratch) / ARCHIVE).read_bytes()
    files = {
        "setup.py": _SETUP.encode(),
        "PKG-INFO": b"Metadata-Version: 2.1\nName: stoker_job\nVersion: 1.0\n",
        f"{package}/__init__.py": b"",
        f"{package}/{module}.py": _TASK.encode(),
        f"{package}/{ARCHIVE}": content,
    }
    with private_archive(archive) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{PACKAGE.removesuffix('.tar.gz')}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def container_command(code_uri: str) -> list[str]:
    """The command of a container: unpack the code from the mounted bucket and run it.

    `exec` makes Python process 1, so that SIGTERM reaches it. The service may restart a container where it
    was, with the code of its first start.
    """
    unpack = f"rm -rf {CODE_ON_HOST} && python -m tarfile -e {folder_of(code_uri)} {CODE_ON_HOST}"
    return ["/bin/bash", "-c", f"{unpack} && cd {CODE_ON_HOST} && exec {' '.join(COMMAND)}"]


def request_of(job: Job, name: str, project: str, gcs_uri: str) -> VertexRequest:
    """Build the whole request, valid or not, with all objects below `gcs_uri`; `vertex_rules` checks it."""
    config = job.resolved.config
    pools, region = pools_of(config), config.vertex.region
    if trains := training_group(config, pools):
        job = with_training_group(job, trains)
    data = find_data_uploads(job.data, gcs_uri)
    data_at = {item.parameter: item.path_in(str(folder_of(item.uri))) for item in data}
    made = VertexRequest(job, name, region, gcs_uri, pools, {}, {}, data, data_at, project=project)
    made.body.update(pruned(_body(made), made.keys))
    return made


def _body(made: VertexRequest) -> dict[str, Any]:
    settings = made.settings

    def own(key: str) -> Keyed:
        return Keyed(getattr(settings, key), f"vertex.{key}")

    scheduling = {
        "timeout": Keyed(f"{settings.max_runtime_s}s", "vertex.max_runtime_s"),
        "restartJobOnWorkerRestart": settings.restart,
        "strategy": "SPOT" if settings.spot else "STANDARD",
    }
    return {
        "displayName": Keyed(made.name, "name"),
        "jobSpec": {
            "workerPoolSpecs": _pool_specs(made),
            "scheduling": scheduling,
            "serviceAccount": own("service_account"),
            "network": own("network"),
            "persistentResourceId": own("persistent_resource"),
            "tensorboard": own("tensorboard"),
            "baseOutputDirectory": Keyed({"outputUriPrefix": made.base_uri}, "vertex.gcs_uri"),
        },
        "labels": Keyed({"stoker-job": _label(made.job.name), **settings.labels}, "vertex.labels"),
        "encryptionSpec": Keyed({"kmsKeyName": settings.kms_key}, "vertex.kms_key"),
    }


def _pool_specs(made: VertexRequest) -> list[dict[str, Any]]:
    settings = made.settings
    if not made.groups:
        return []
    listed = replicas_by_pool([(pool, pool.count) for pool in made.groups])
    told = pools_variable([(pool.name, pool.type, pool.gpus or 0) for pool, _ in listed])
    variables = {PLACE_VARIABLE: "vertex", **told, **settings.environment}
    env = [{"name": name, "value": value} for name, value in variables.items()]
    image = Keyed(settings.image, "vertex.image")
    program: dict[str, Any] = {
        "containerSpec": {"imageUri": image, "command": container_command(made.code_uri), "env": env}
    }
    if settings.entry == "package":
        program = {
            "pythonPackageSpec": {
                "executorImageUri": image,
                "packageUris": [made.code_uri],
                "pythonModule": PACKAGE_MODULE,
                "env": env,
            }
        }
    disk = {"bootDiskType": settings.boot_disk_type, "bootDiskSizeGb": settings.boot_disk_gb}
    return [
        {
            "machineSpec": {
                "machineType": Keyed(pool.type, f"{pool.key}.machine_type"),
                "acceleratorType": Keyed(pool.gpu_name or None, f"{pool.key}.accelerator"),
                "acceleratorCount": Keyed(pool.gpus or None, f"{pool.key}.count"),
            },
            "replicaCount": Keyed(replicas, f"{pool.key}.replicas"),
            "diskSpec": Keyed(disk, "vertex.boot_disk_gb"),
            **program,
        }
        for pool, replicas in listed
    ]


def _label(name: str) -> str:
    """A label value allows lower-case letters, digits, `_` and `-`."""
    return "".join(sign if sign.isalnum() or sign in "_-" else "-" for sign in name.lower())[:63]
