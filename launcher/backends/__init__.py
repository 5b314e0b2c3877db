"""Laptop: the places where jobs run, one module each; a module that is put here is one more."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from launcher.backends.base import Backend, Run
from stoker.errors import UsageError, nearest


def backends() -> Iterator[Backend]:
    """Laptop: all of them, imported one by one."""
    for module in pkgutil.iter_modules(__path__):
        found = getattr(importlib.import_module(f"{__name__}.{module.name}"), "BACKEND", None)
        if found is not None:
            yield found


def backend(name: str) -> Backend:
    """Laptop: the place that `--on` names.

    Raises:
        UsageError: there is none of that name.
    """
    names = []
    for found in backends():
        if found.name == name:
            return found
        names.append(found.name)
    raise UsageError(f"--on {name}: no such place (known: {', '.join(names)})" + nearest(name, names))


def attach(run_id: str) -> Run:
    """Laptop: the run that an id or a run directory names.

    Raises:
        UsageError: there is no such run.
    """
    known = list(backends())
    for found in known:
        if run_id.startswith(found.ids):
            return found.attach(run_id)
    return backend("local").attach(run_id)
