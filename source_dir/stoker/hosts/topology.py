"""Every host: find this host's name, the instance groups and the head. Pure: no I/O."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.errors import UsageError

HOMOGENEOUS = "homogeneousCluster"
"""SageMaker's name for the single group of a job without instance groups."""

_GPU_TYPES = re.compile(r"^(ml\.)?(p\d|g\d|gr\d)")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


class TopologyError(UsageError):
    """The job's hosts do not match the configuration."""


@dataclass(frozen=True)
class Group:
    name: str
    instance_type: str
    hosts: tuple[str, ...]
    """In numerical order."""
    gpus: int | None = None
    """GPUs per host; None: judged by the instance type."""

    @property
    def has_gpu(self) -> bool:
        return has_gpu(self.instance_type) if self.gpus is None else self.gpus > 0


@dataclass(frozen=True)
class Topology:
    host: str
    """This one."""
    groups: tuple[Group, ...]
    gpu_group: str
    """The group that trains; its first host is the head."""
    interface: str = ""
    """The network interface between hosts; "": the one with the address of this host's name."""

    @property
    def head(self) -> str:
        return self._named(self.gpu_group).hosts[0]

    @property
    def role(self) -> str:
        return "head" if self.host == self.head else "worker"

    @property
    def group(self) -> str:
        return self.group_of(self.host)

    @property
    def trains(self) -> bool:
        return self.group == self.gpu_group

    @property
    def rents_gpus(self) -> bool:
        """Whether this host trains and its instances have GPUs, as far as their type says."""
        return self.trains and self._named(self.group).has_gpu

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, the head first, then group by group."""
        groups = [self._named(self.gpu_group)]
        groups += [group for group in self.groups if group.name != self.gpu_group]
        return tuple(host for group in groups for host in group.hosts)

    def group_of(self, host: str) -> str:
        return next(group.name for group in self.groups if host in group.hosts)

    def describe(self, hosts: Collection[str]) -> str:
        """Hosts by group: `gpu: algo-1; cpu: algo-2, algo-3`."""
        parts = [
            (group.name, [host for host in group.hosts if host in hosts]) for group in self.groups
        ]
        return "; ".join(f"{name}: {', '.join(members)}" for name, members in parts if members)

    def _named(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)


def resolve(resource: Mapping[str, Any], gpu_group: str | None = None) -> Topology:
    """The result is the same on every host; without a `gpu_group`, it is selected by instance type.

    `resource` has the form of SageMaker's resourceconfig.json. Other services add `source`, its name in
    messages, and for each group `gpus`, the number on each of its hosts.
    """
    source = str(resource.get("source") or "resourceconfig.json")
    host = resource.get("current_host")
    hosts = in_order(resource.get("hosts") or ([host] if host else []))
    if not host or host not in hosts:
        raise TopologyError(f"{source}: current_host {host!r} is not among {hosts}")
    groups = _groups(resource, hosts, source)
    interface = str(resource.get("network_interface_name") or "")
    return Topology(host, groups, _training_group(groups, gpu_group), interface)


def in_order(hosts: Iterable[str]) -> list[str]:
    """Hosts in natural order: algo-2 before algo-10."""
    return sorted(hosts, key=_number_key)


def has_gpu(instance_type: str) -> bool:
    """By the family, as EC2's naming of instance types defines it: p and g have NVIDIA GPUs."""
    return bool(_GPU_TYPES.match(instance_type))


NODE_LABEL = "ray.io/node-id"
GROUP_LABEL = "stoker-group"
TRAIN_RESOURCE = "stoker_train"
"""A custom resource of the hosts that train; Ray Train selects hosts by label only since Ray 2.53."""
MOST_TRAIN_WORKERS = 10_000
"""How much of `TRAIN_RESOURCE` a host has."""


def host_name(node: Mapping[str, Any]) -> str:
    """The name of one of Ray's nodes, as `ray.nodes()` describes it."""
    return str(
        node.get("Labels", {}).get("stoker.host")
        or node.get("NodeManagerHostname")
        or node["NodeID"][:8]
    )


def label(name: str) -> str:
    """A name of a group or host as a valid Ray label value.

    SageMaker allows other characters. A changed name gets a hash suffix, so that two never share a label.
    """
    if _LABEL.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')[:50] or 'group'}-{digest}"


def _groups(resource: Mapping[str, Any], hosts: list[str], source: str) -> tuple[Group, ...]:
    listed = resource.get("instance_groups") or []
    if not listed:
        instance_type = str(resource.get("current_instance_type") or "")
        return (Group(HOMOGENEOUS, instance_type, tuple(hosts)),)
    groups = [
        Group(
            str(entry["instance_group_name"]),
            str(entry.get("instance_type") or ""),
            tuple(in_order(entry.get("hosts") or [])),
            entry.get("gpus"),
        )
        for entry in listed
    ]
    groups = [group for group in groups if group.hosts]
    stray = [host for host in hosts if not any(host in group.hosts for group in groups)]
    if stray:
        raise TopologyError(f"{source}: no instance group holds {', '.join(stray)}")
    return tuple(sorted(groups, key=lambda group: _number_key(group.hosts[0])))


def _training_group(groups: tuple[Group, ...], wanted: str | None) -> str:
    found = ", ".join(f"{group.name} ({group.instance_type or 'type unknown'})" for group in groups)
    if wanted is not None:
        if wanted not in [group.name for group in groups]:
            raise TopologyError(f"cluster.gpu_group: no group is named {wanted!r}; found: {found}")
        return wanted
    if len(groups) == 1:
        return groups[0].name
    with_gpu = [group.name for group in groups if group.has_gpu]
    if len(with_gpu) == 1:
        return with_gpu[0]
    several = "several groups have GPUs" if with_gpu else "no group's type is known to have GPUs"
    raise TopologyError(f"cluster.gpu_group: {several}; name the one that trains; found: {found}")


def _number_key(name: str) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts if part]
