"""Laptop: the backends that run jobs, one module each, named as `--on` names them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from launcher.places.base import Backend, Run
from stoker.errors import UsageError, nearest


def names() -> list[str]:
    """Laptop: the values of `--on`; imports no backend."""
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name != "base"]


def backends() -> Iterator[Backend]:
    """Laptop: yield all backends, importing them one by one."""
    yield from map(backend, names())


def backend(name: str) -> Backend:
    """Laptop: the backend that `--on` names.

    Raises:
        UsageError: there is no backend with that name.
    """
    if name not in (known := names()):
        raise UsageError(f"--on {name}: no such place (known: {', '.join(known)})" + nearest(name, known))
    found: Backend = importlib.import_module(f"{__name__}.{name}").BACKEND
    return found


def attach(run_id: str) -> Run:
    """Laptop: the run with a given id or run directory.

    Raises:
        UsageError: the run does not exist.
    """
    for found in backends():
        if run_id.startswith(found.ids) or (found.marker and (Path(run_id) / found.marker).is_file()):
            return found.attach(run_id)
    return backend("local").attach(run_id)
