"""Modules of a script that were edited and loaded again, as in a notebook: chain workers do the same."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

_specs: dict[str, Any] = {}
"""Script: the specification of each of its modules; loading one again makes a new one."""
_times: dict[str, int] = {}
_done: dict[str, int] = {}
"""Chain worker: how often it has loaded modules again."""


def reloaded() -> dict[str, int]:
    """Script: how often each of its own modules was loaded again since its first loader."""
    libraries = (sys.base_prefix, sys.prefix, str(Path(__file__).parents[2] / "stoker"))
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__dict__", {}).get("__spec__")
        origin = str(getattr(spec, "origin", None))
        if not origin.endswith(".py") or origin.startswith(libraries):
            continue
        if _specs.setdefault(name, spec) is not spec:
            _specs[name] = spec
            _times[name] = _times.get(name, 0) + 1
    return dict(_times)


def reload(times: dict[str, int]) -> None:
    """Chain worker: load modules again that the script has; those that others import come first."""
    for name in reversed([name for name in sys.modules if times.get(name, 0) > _done.get(name, 0)]):
        importlib.reload(sys.modules[name])
    _done.update(times)
