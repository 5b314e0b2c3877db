"""Laptop: plan the hosts of a rehearsal from a job and its `rehearsal` section. No side effects."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.job import Job, examples_root
from launcher.rehearsal import world
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.hosts.machine import HOST_CPUS_VARIABLE
from stoker.hosts.topology import Topology, TopologyError, resolve
from stoker.place import BACKEND_VARIABLE

if TYPE_CHECKING:
    from launcher.places.rehearsal import RehearsalRequest

MAX_HOSTS = 100
_NETWORK = "10.77.0"


@dataclass(frozen=True)
class PlannedHost:
    """One emulated host."""

    name: str
    group: str
    instance_type: str
    address: str
    delay_s: float
    """Seconds after the start; infinite for a host that never starts."""


@dataclass(frozen=True)
class PlannedChannel:
    """Local data that is mounted on every host."""

    parameter: str
    source: Path
    folder: str
    """Where the hosts see the data of this parameter."""

    @property
    def path_on_host(self) -> str:
        """The folder; a single file is placed in it, as on SageMaker."""
        return self.folder if self.source.is_dir() else f"{self.folder}/{self.source.name}"


def plan_hosts(config: Config) -> tuple[PlannedHost, ...]:
    """Plan `gpu=1,cpu=2:ml.c5.2xlarge` as hosts in that order."""
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
    shape = shape_of(config)
    if len(groups) > shape.most_groups:
        most = f"{shape.service} allows {shape.most_groups}"
        problems.append(f"rehearsal.hosts: {len(groups)} groups; {most}")
    if problems:
        raise UsageError(*problems)
    hosts: list[PlannedHost] = []
    named = shape.host_names([(name, count) for name, count, _ in groups])
    for name, count, given in groups:
        trains = _trains(name, groups, config.cluster.gpu_group)
        instance_type = given or (shape.gpu_type if trains else shape.cpu_type)
        for _ in range(count):
            number = len(hosts) + 1
            host = named[number - 1]
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


def plan_faults(config: Config, hosts: tuple[PlannedHost, ...]) -> tuple[world.Fault, ...]:
    """Parse and check the configured faults."""
    names = [host.name for host in hosts]
    planned, problems = [], []
    for text in config.rehearsal.faults:
        try:
            planned.append(world.parse(text, names))
        except ValueError as error:
            problems.append(f"rehearsal.faults: {error}")
    if problems:
        raise UsageError(*problems)
    return tuple(planned)


def plan_topology(config: Config, hosts: tuple[PlannedHost, ...]) -> Topology:
    """Resolve the topology as the hosts will, so that a wrong group is found before the start."""
    try:
        return resolve(shape_of(config).resource(hosts, hosts[0]), config.cluster.gpu_group)
    except TopologyError as error:
        raise UsageError(str(error)) from None


def host_environment(config: Config) -> dict[str, str]:
    """The environment of a host's program; only LANG is inherited from this machine."""
    binaries = str(Path(sys.executable).parent)
    return {
        "PATH": f"{binaries}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp",  # noqa: S108 - private to the host
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "PYTHONUNBUFFERED": "1",
        "PIP_NO_INPUT": "1",
        "PIP_RETRIES": "0",
        BACKEND_VARIABLE: "rehearsal",
        HOST_CPUS_VARIABLE: str(config.rehearsal.cpus),
    }


def rate_arguments(link_mbps: float | None) -> list[str]:
    """Arguments of `tc qdisc add … tbf` that limit a link's rate."""
    if link_mbps is None:
        return []
    burst = max(128 * 1024, int(link_mbps * 1e6 / 8 * 0.01))  # one offloaded segment is 64 KiB
    return ["rate", f"{link_mbps}mbit", "burst", str(burst), "latency", "100ms"]


def masked_folders(job: Job) -> list[str]:
    """Source folders to hide from hosts, except those that contain the interpreter."""
    folders = [examples_root(), *filter(None, [job.source_dir])]
    needed = [Path(sys.prefix), Path(sys.base_prefix)]
    return [
        str(folder)
        for folder in folders
        if (folder.parent / "launcher").is_dir() or folder == job.source_dir
        if not any(path.is_relative_to(folder) for path in needed)
    ]


def _trains(name: str, groups: list[tuple[str, int, str]], gpu_group: str | None) -> bool:
    if gpu_group is not None:
        return name == gpu_group
    return len(groups) == 1 or "gpu" in name.lower()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What distinguishes a service's hosts. `NAME_hosts.py` defines one as `SHAPE`."""

    service: str
    """Its name in messages."""
    gpu_type: str
    cpu_type: str
    most_groups: int
    host_names: Callable[[Sequence[tuple[str, int]]], list[str]]
    """Names of all hosts, given the groups with their number of hosts."""
    resource: Callable[[tuple[PlannedHost, ...], PlannedHost], Mapping[str, Any]]
    """All hosts and groups as the given host will find them; the input of `topology.resolve`."""
    channel: str
    """Where the local data of a parameter is on the hosts: `/opt/ml/input/data/{}`."""
    prepare: Callable[[RehearsalRequest, PlannedHost, Path, bool], dict[str, Any]]
    """Write a host's files, given the hosts' folder and whether the toolkit starts the job; returns its
    `mount`, `folder_in_host`, `command` (empty: the toolkit's) and `environment`."""
    collect: Callable[[RehearsalRequest, Path], list[str]]
    """Move the outputs to the run directory; returns one line per file that several hosts wrote."""
    failure: Callable[[RehearsalRequest, Path, PlannedHost], str]
    """The cause that a host left; empty without one."""
    toolkit: bool = False
    """Whether the service has a toolkit that can start the job."""


def shape_of(config: Config) -> Shape:
    """The shape that `rehearsal.like` names."""
    found: Shape = importlib.import_module(f"launcher.rehearsal.{config.rehearsal.like}_hosts").SHAPE
    return found
