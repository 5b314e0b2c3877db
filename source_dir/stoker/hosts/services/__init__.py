"""Every host: the services that start `train.py` on the hosts of a job; every module here is registered."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from stoker.hosts.services.base import Service


def services() -> Iterator[Service]:
    """Every host: all services, imported one by one."""
    for module in pkgutil.iter_modules(__path__):
        found = getattr(importlib.import_module(f"{__name__}.{module.name}"), "SERVICE", None)
        if found is not None:
            yield found
