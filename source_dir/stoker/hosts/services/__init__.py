"""The services that start `train.py` on the hosts of a job, and what it must know of them.

Every module here is registered. Standard library only.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Where a run's files go on this host."""

    run: Path
    """`config.yaml`, `summary.json`, `events.jsonl`, `tensorboard/`, `logs/`."""
    checkpoints: Path
    model: Path
    failure: Path
    """The file for the cause of a failure, in one line."""
    synced: bool = False
    """Whether the checkpoint folder appears elsewhere file by file, so that a manifest must come last."""
    copies: Mapping[Path, Path] = field(default_factory=dict)
    """Folders of the run → where the head copies them, during the run and at its end."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service that runs train.py on each host of a job. Each module here defines one."""

    name: str
    """`place` in summary.json, unless the launcher has set another."""
    resource: Callable[[], Mapping[str, Any] | None]
    """The job's hosts and groups as `topology.resolve` takes them; None if this is not a host of the service.

    Raises TopologyError if the service says so only in part.
    """
    folders: Callable[[], Folders]
    given: Callable[[], Mapping[str, str]] = dict
    """Configuration values that the service passes to the job: key → text."""
    ends_job: Callable[[], bool] = lambda: False
    """Whether the job ends when this host does, with its exit code, whatever other hosts are doing."""
    installs: bool = True
    """Whether missing requirements are installed; on hosts that outlive the job they are not."""


def services() -> Iterator[Service]:
    """All services, imported one by one."""
    for module in pkgutil.iter_modules(__path__):
        found = getattr(importlib.import_module(f"{__name__}.{module.name}"), "SERVICE", None)
        if found is not None:
            yield found
