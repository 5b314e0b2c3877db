"""The services that start `train.py` on the hosts of a job, and what it must know of them.

Every module here is registered. Standard library only.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.place import RunPlace


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service that runs train.py on each host of a job. Each module here defines one."""

    resource: Callable[[], Mapping[str, Any] | None]
    """The job's hosts and groups as `topology.resolve` takes them; None if this is not a host of the service.

    Raises TopologyError if the service says so only in part.
    """
    place: Callable[[], RunPlace]
    """The name of the service, and where a run's files go on this host."""
    given: Callable[[], Mapping[str, str]] = dict
    """Configuration values that the service passes to the job: key → text."""
    ends_job: Callable[[], bool] = lambda: False
    """Whether the job ends when this host does, with its exit code, whatever other hosts are doing."""
    installs: bool = True
    """Whether missing requirements are installed; on hosts that outlive the job they are not."""


def services() -> Iterator[Service]:
    for module in pkgutil.iter_modules(__path__):
        found = getattr(importlib.import_module(f"{__name__}.{module.name}"), "SERVICE", None)
        if found is not None:
            yield found
