"""Laptop: plan the hosts of a rehearsal from a job and its `rehearsal` section. No side effects."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.job import Job, examples_root
from launcher.rehearsal import faults
from stoker.bootstrap.raynode import HOST_CPUS_VARIABLE
from stoker.bootstrap.topology import Topology, TopologyError, resolve
from stoker.errors import UsageError
from stoker.place import BACKEND_VARIABLE
from stoker.schema import Config

GPU_TYPE, CPU_TYPE = "ml.g5.xlarge", "ml.c5.xlarge"
MAX_HOSTS, MAX_GROUPS = 100, 5
CODE_CHANNEL = "code"
ARCHIVE = "sourcedir.tar.gz"
_NETWORK = "10.77.0"


@dataclass(frozen=True)
class PlannedHost:
    """Laptop: one emulated host."""

    name: str
    group: str
    instance_type: str
    address: str
    delay_s: float
    """Seconds after the start; infinite for a host that never starts."""


@dataclass(frozen=True)
class PlannedChannel:
    """Laptop: local data that is mounted on every host as an input channel."""

    parameter: str
    source: Path

    @property
    def target(self) -> str:
        """Path below `/opt/ml/`; a single file is placed in the channel's folder, as on SageMaker."""
        folder = f"input/data/{self.parameter}"
        return folder if self.source.is_dir() else f"{folder}/{self.source.name}"

    @property
    def path_on_host(self) -> str:
        return f"/opt/ml/{self.target}"


def plan_hosts(config: Config) -> tuple[PlannedHost, ...]:
    """Laptop: plan `gpu=1,cpu=2:ml.c5.2xlarge` as hosts algo-1, algo-2, … in that order.

    Raises:
        UsageError: every problem found.
    """
    settings = config.rehearsal
    problems: list[str] = []
    groups: list[tuple[str, int, str]] = []
    for part in settings.hosts.split(","):
        found = re.fullmatch(r"\s*([^=:]{1,64})=(\d+)(?::([\w.-]+))?\s*", part)
        if not found or not 1 <= int(found[2]) <= MAX_HOSTS:
            problems.append(f"rehearsal.hosts: {part!r} is not group=count or group=count:type")
        elif found[1] in [name for name, _, _ in groups]:
            problems.append(f"rehearsal.hosts: the group {found[1]!r} is listed twice")
        else:
            groups.append((found[1], int(found[2]), found[3] or ""))
    if len(groups) > MAX_GROUPS:
        problems.append(f"rehearsal.hosts: {len(groups)} groups; SageMaker allows {MAX_GROUPS}")
    if problems:
        raise UsageError(*problems)
    hosts: list[PlannedHost] = []
    for name, count, given in groups:
        instance_type = given or _type_for(name, groups, config.cluster.gpu_group)
        for _ in range(count):
            number = len(hosts) + 1
            host = f"algo-{number}"
            late = settings.join_delay.get(host, 0)
            delay = float("inf") if late == "never" else float(late)
            address = f"{_NETWORK}.{number + 1}"
            hosts.append(PlannedHost(host, name, instance_type, address, delay))
    names = [host.name for host in hosts]
    for host in settings.join_delay:
        if host not in names:
            problems.append(f"rehearsal.join_delay: no host {host!r}; use one of {', '.join(names)}")
    if len(hosts) > MAX_HOSTS:
        problems.append(f"rehearsal.hosts: {len(hosts)} hosts; at most {MAX_HOSTS}")
    if problems:
        raise UsageError(*problems)
    return tuple(hosts)


def plan_faults(config: Config, hosts: tuple[PlannedHost, ...]) -> tuple[faults.Fault, ...]:
    """Laptop: parse and check the configured faults.

    Raises:
        UsageError: every problem found.
    """
    names = [host.name for host in hosts]
    planned, problems = [], []
    for text in config.rehearsal.faults:
        try:
            planned.append(faults.parse(text, names))
        except ValueError as error:
            problems.append(f"rehearsal.faults: {error}")
    if problems:
        raise UsageError(*problems)
    return tuple(planned)


def plan_topology(config: Config, hosts: tuple[PlannedHost, ...]) -> Topology:
    """Laptop: resolve the topology as the hosts will, so that a wrong group is found before the start.

    Raises:
        UsageError: no group can train.
    """
    try:
        return resolve(resource_config(hosts, hosts[0]), config.cluster.gpu_group)
    except TopologyError as error:
        raise UsageError(str(error)) from None


def resource_config(hosts: tuple[PlannedHost, ...], current: PlannedHost) -> dict[str, Any]:
    """Laptop: resourceconfig.json in SageMaker's form, with its text-sorted host list."""
    groups = dict.fromkeys(host.group for host in hosts)
    return {
        "current_group_name": current.group,
        "current_host": current.name,
        "current_instance_type": current.instance_type,
        "hosts": sorted(host.name for host in hosts),
        "instance_groups": [
            {
                "hosts": [host.name for host in hosts if host.group == group],
                "instance_group_name": group,
                "instance_type": next(h.instance_type for h in hosts if h.group == group),
            }
            for group in groups
        ],
        "network_interface_name": "eth0",
    }


def hyperparameters(job: Job, entry: str) -> dict[str, str]:
    """Laptop: hyperparameters.json; every value is a JSON string, as SDKs write it."""
    given = {k: json.dumps(v) for k, v in job.resolved.config.sagemaker.hyperparameters.items()}
    if entry == "container":
        return given
    archive = f"/opt/ml/input/data/{CODE_CHANNEL}/{ARCHIVE}"
    own = {
        "config": "job.yaml",
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": archive,
        "sagemaker_job_name": job.name,
        "sagemaker_region": "us-east-1",
        "sagemaker_container_log_level": 20,
    }
    return {**given, **{key: json.dumps(value) for key, value in own.items()}}


def environment(job: Job, config: Config) -> dict[str, str]:
    """Laptop: the environment of a host's program; only LANG is inherited from this machine."""
    binaries = str(Path(sys.executable).parent)
    return {
        "PATH": f"{binaries}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp",  # noqa: S108 - private to the host
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "PYTHONUNBUFFERED": "1",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "TRAINING_JOB_NAME": job.name,
        "TRAINING_JOB_ARN": f"arn:aws:sagemaker:us-east-1:000000000000:training-job/{job.name}",
        "PIP_NO_INPUT": "1",
        "PIP_RETRIES": "0",
        BACKEND_VARIABLE: "rehearsal",
        HOST_CPUS_VARIABLE: str(config.rehearsal.cpus),
        **config.sagemaker.environment,
    }


def rate_arguments(link_mbps: float | None) -> list[str]:
    """Laptop: arguments of `tc qdisc add … tbf` that limit a link's rate."""
    if link_mbps is None:
        return []
    burst = max(128 * 1024, int(link_mbps * 1e6 / 8 * 0.01))  # one offloaded segment is 64 KiB
    return ["rate", f"{link_mbps}mbit", "burst", str(burst), "latency", "100ms"]


def masked_folders(job: Job) -> list[str]:
    """Laptop: source folders to hide from hosts, except those that contain the interpreter."""
    folders = [examples_root(), *filter(None, [job.source_dir])]
    needed = [Path(sys.prefix), Path(sys.base_prefix)]
    return [
        str(folder)
        for folder in folders
        if (folder.parent / "launcher").is_dir() or folder == job.source_dir
        if not any(path.is_relative_to(folder) for path in needed)
    ]


def _type_for(name: str, groups: list[tuple[str, int, str]], gpu_group: str | None) -> str:
    if gpu_group is not None:
        return GPU_TYPE if name == gpu_group else CPU_TYPE
    if len(groups) == 1 or "gpu" in name.lower():
        return GPU_TYPE
    return CPU_TYPE
