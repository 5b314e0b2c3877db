"""Laptop: plan a rehearsal from a job and its `rehearsal` section. No side effects."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.config.schema import Config
from stoker.errors import Problems, UsageError
from stoker.hosts.machine import HOST_CPUS_VARIABLE, HOST_GPUS_VARIABLE
from stoker.hosts.topology import TopologyError, resolve
from stoker.place import PLACE_VARIABLE
from stoker_launcher.job import Job, examples_root
from stoker_launcher.rehearsal import world
from stoker_launcher.run_directory import new_run_dir

CODE_CHANNEL = "code"
MAX_HOSTS = 100
_NETWORK = "10.77.0"
_FAULT = re.compile(
    r"(?P<action>[a-z]+):(?P<host>[\w.-]+)@"
    r"(?:(?P<at>\d+(?:\.\d+)?)s|(?P<formed>formed)|/(?P<pattern>.+)/)"
    r"(?:\+(?P<later>\d+(?:\.\d+)?)s)?"
)


@dataclass(frozen=True)
class PlannedHost:
    name: str
    group: str
    instance_type: str
    address: str
    delay_s: float
    """Seconds after the start; infinite for a host that never starts."""


@dataclass(frozen=True)
class PlannedChannel:
    parameter: str
    source: Path
    path_on_host: str


@dataclass(frozen=True)
class RehearsalRequest:
    job: Job
    hosts: tuple[PlannedHost, ...]
    channels: tuple[PlannedChannel, ...]
    faults: tuple[world.Fault, ...]
    head: str
    run_dir: Path
    checkpoints: tuple[Path, ...] = ()

    @property
    def shape(self) -> ServiceShape:
        return shape_of(self.job.resolved.config)

    @property
    def entry(self) -> str:
        return self.job.resolved.config.rehearsal.entry if self.shape.toolkit else "container"

    def restore(self, folder: Path) -> None:
        """Place the checkpoints in a new folder, as SageMaker does after a restart."""
        folder.mkdir()
        for checkpoint in self.checkpoints:
            copy: Any = shutil.copytree if checkpoint.is_dir() else shutil.copy2
            copy(checkpoint, folder / checkpoint.name)

    def render(self) -> str:
        settings = self.job.resolved.config.rehearsal
        rate = f"{settings.link_mbps:g} Mbit/s" if settings.link_mbps else "unlimited"
        lines = [f"rehearsal of {self.job.name}: {len(self.hosts)} emulated hosts on this machine"]
        for host in self.hosts:
            role = "head" if host.name == self.head else "worker"
            late = f"{host.delay_s:g} s late" if host.delay_s else ""
            late = "never comes" if host.delay_s == float("inf") else late
            columns = (host.name, host.group, host.instance_type, host.address, role, late)
            lines.append("  " + "".join(f"{column:<16}  " for column in columns).rstrip())
        container = f"train.py is process 1, as on {self.shape.service}"
        starter = f"{self.shape.toolkit} starts train.py" if self.entry == "toolkit" else container
        lines += [f"  entry      {starter}", f"  link       {rate}"]
        lines += [
            f"  channel    {c.parameter}: {c.source} → {c.path_on_host}" for c in self.channels
        ]
        lines += [f"  checkpoint {path}" for path in self.checkpoints]
        lines += [f"  fault      {text}" for text in settings.faults]
        lines.append(f"  results    {self.run_dir}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class ServiceShape:
    """What distinguishes a service's hosts. `NAME_hosts.py` defines one as `SHAPE`."""

    service: str
    gpu_type: str
    cpu_type: str
    most_groups: int
    host_names: Callable[[Sequence[tuple[str, int]]], list[str]]
    """Names of all hosts, given the groups with their number of hosts."""
    resource: Callable[[tuple[PlannedHost, ...], PlannedHost], Mapping[str, Any]]
    """All hosts and groups as the given host will find them; the input of `topology.resolve`."""
    channel: str
    """The folder of a parameter's data on the hosts: `/opt/ml/input/data/{}`; a single file is in it."""
    prepare: Callable[[RehearsalRequest, PlannedHost, Path], dict[str, Any]]
    """Write a host's files, given the hosts' folder; returns its `mount`, `folder_in_host`, `command` and
    `environment`."""
    collect: Callable[[RehearsalRequest, Path], list[str]]
    """Move the outputs to the run directory; returns one line per file that several hosts wrote."""
    failure: Callable[[RehearsalRequest, Path, PlannedHost], str]
    """The cause that a host left; empty without one."""
    toolkit: str = ""
    """The service's toolkit that can start the job; empty: it has none."""


def shape_of(config: Config) -> ServiceShape:
    found: ServiceShape = importlib.import_module(
        f"stoker_launcher.rehearsal.{config.rehearsal.like}_hosts"
    ).SHAPE
    return found


def plan(job: Job, checkpoints: tuple[Path, ...] = ()) -> RehearsalRequest:
    config, problems = job.resolved.config, Problems()
    hosts, shape, faults = plan_hosts(config), shape_of(config), []
    for text in config.rehearsal.faults:
        with problems:
            faults.append(fault_of(text, [host.name for host in hosts]))
    problems.refuse()
    try:  # as the hosts will resolve it, so that a wrong group is found before the start
        head = resolve(shape.resource(hosts, hosts[0]), config.cluster.gpu_group).head
    except TopologyError as error:
        raise UsageError(str(error)) from None
    if CODE_CHANNEL in job.data:
        raise UsageError("params.code: the channel `code` carries the source; rename the parameter")
    absent = [
        f"params.{name}: no such file or folder here (got {source!r})"
        for name, source in job.data.items()
        if not Path(source).exists()
    ]
    absent += [
        f"params.{name}: a rehearsal downloads no input channel (got {uri!r}); name a folder here"
        for name, uri in (config.params.items() if config.script is not None else ())
        if name not in job.data
    ]
    if absent:
        raise UsageError(*absent)
    channels = []
    for name, source in job.data.items():
        folder, path = shape.channel.format(name), Path(source)
        channels.append(
            PlannedChannel(name, path, folder if path.is_dir() else f"{folder}/{path.name}")
        )
    return RehearsalRequest(
        job, hosts, tuple(channels), tuple(faults), head, new_run_dir(job), checkpoints
    )


def plan_hosts(config: Config) -> tuple[PlannedHost, ...]:
    """Plan `gpu=1,cpu=2:ml.c5.2xlarge` as hosts in that order."""
    settings, shape = config.rehearsal, shape_of(config)
    groups = _groups(settings.hosts, shape)
    named = iter(shape.host_names([(name, count) for name, count, _ in groups]))
    hosts: list[PlannedHost] = []
    for group, count, given in groups:
        trains = len(groups) == 1 or "gpu" in group.lower()
        if config.cluster.gpu_group is not None:
            trains = group == config.cluster.gpu_group
        own = shape.gpu_type if trains else shape.cpu_type
        for _ in range(count):
            name = next(named)
            late = settings.join_delay.get(name, 0)
            delay = float("inf") if late == "never" else float(late)
            hosts.append(
                PlannedHost(name, group, given or own, f"{_NETWORK}.{len(hosts) + 2}", delay)
            )
    names = [host.name for host in hosts]
    problems = [
        f"rehearsal.join_delay: no host {host!r}; use one of {', '.join(names)}"
        for host in settings.join_delay
        if host not in names
    ]
    if len(hosts) > MAX_HOSTS:
        problems.append(f"rehearsal.hosts: {len(hosts)} hosts; at most {MAX_HOSTS}")
    if problems:
        raise UsageError(*problems)
    return tuple(hosts)


def _groups(text: str, shape: ServiceShape) -> list[tuple[str, int, str]]:
    """(name, number of hosts, type or "") of each group."""
    problems: list[str] = []
    groups: list[tuple[str, int, str]] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([^=:]{1,64})=(\d+)(?::([\w.-]+))?\s*", part)
        if not found or not 1 <= int(found[2]) <= MAX_HOSTS:
            problems.append(f"rehearsal.hosts: {part!r} is not group=count or group=count:type")
        elif found[1] in [name for name, _, _ in groups]:
            problems.append(f"rehearsal.hosts: the group {found[1]!r} is listed twice")
        else:
            groups.append((found[1], int(found[2]), found[3] or ""))
    if len(groups) > shape.most_groups:
        most = f"{shape.service} allows {shape.most_groups}"
        problems.append(f"rehearsal.hosts: {len(groups)} groups; {most}")
    if problems:
        raise UsageError(*problems)
    return groups


def fault_of(text: str, hosts: Sequence[str]) -> world.Fault:
    found, key = _FAULT.fullmatch(text.strip()), f"rehearsal.faults: {text!r}"
    if not found:
        raise UsageError(f"{key} is not action:host@20s, @formed+5s or @/regular expression/+5s")
    action, host = found["action"], found["host"]
    if action not in world.ACTIONS:
        raise UsageError(f"{key}: no action {action!r}; use one of {', '.join(world.ACTIONS)}")
    if host not in hosts and host != "all":
        raise UsageError(f"{key}: no host {host!r}; use one of {', '.join(hosts)}, all")
    later = float(found["later"] or 0)
    if found["at"]:
        return world.Fault(action, host, None, later, float(found["at"]) + later)
    pattern = world.FORMED if found["formed"] else found["pattern"]
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{key}: {pattern!r} is not a regular expression: {error}") from None
    return world.Fault(action, host, pattern, later, None)


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
        PLACE_VARIABLE: "rehearsal",
        HOST_CPUS_VARIABLE: str(config.rehearsal.cpus),
        HOST_GPUS_VARIABLE: str(config.rehearsal.gpus),
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
