"""Laptop: the backends that run jobs, one module each; every module in this folder is registered."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from launcher.backends.base import Backend, Run
from stoker.errors import UsageError, nearest


def backends() -> Iterator[Backend]:
    """Laptop: yield all backends, importing them one by one."""
    for module in pkgutil.iter_modules(__path__):
        found = getattr(importlib.import_module(f"{__name__}.{module.name}"), "BACKEND", None)
        if found is not None:
            yield found


def backend(name: str) -> Backend:
    """Laptop: the backend that `--on` names.

    Raises:
        UsageError: there is no backend with that name.
    """
    names = []
    for found in backends():
        if found.name == name:
            return found
        names.append(found.name)
    raise UsageError(f"--on {name}: no such place (known: {', '.join(names)})" + nearest(name, names))


def attach(run_id: str) -> Run:
    """Laptop: the run with a given id or run directory.

    Raises:
        UsageError: the run does not exist.
    """
    known = list(backends())
    for found in known:
        if run_id.startswith(found.ids):
            return found.attach(run_id)
    return backend("local").attach(run_id)
