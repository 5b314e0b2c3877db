"""Laptop: the services whose hosts a rehearsal emulates, one module each, as `rehearsal.like` names them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.config.schema import Config

if TYPE_CHECKING:
    from launcher.places.rehearsal import RehearsalRequest
    from launcher.rehearsal.plan import PlannedHost


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Laptop: what distinguishes a service's hosts. Each module in this folder defines one as `SHAPE`."""

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
    """Laptop: the shape that `rehearsal.like` names."""
    found: Shape = importlib.import_module(f"{__name__}.{config.rehearsal.like}").SHAPE
    return found
