"""Stoker keeps GPUs fed: PyTorch training on clusters of GPU hosts and cheap CPU hosts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.errors import DataError, StokerError, UsageError
    from stoker.events.runs import runs_dataframe
    from stoker.loader.dataloader import DataLoader, replace_torch_loader
    from stoker.loader.offload import MultiThreadedAugmenter, offload
    from stoker.loader.pass_timer import timed
    from stoker.recipe import Recipe
    from stoker.session import checkpoint_dir, log
    from stoker_launcher.notebook import RunError, RunInterrupt, RunResult, run

__version__ = "0.1.0"
__all__ = [
    "DataError",
    "DataLoader",
    "MultiThreadedAugmenter",
    "Recipe",
    "RunError",
    "RunInterrupt",
    "RunResult",
    "StokerError",
    "UsageError",
    "checkpoint_dir",
    "log",
    "offload",
    "replace_torch_loader",
    "run",
    "runs_dataframe",
    "timed",
]

_EXPORTS = {
    **dict.fromkeys(("DataError", "StokerError", "UsageError"), "stoker.errors"),
    "DataLoader": "stoker.loader.dataloader",
    "Recipe": "stoker.recipe",
    **dict.fromkeys(("RunError", "RunInterrupt", "RunResult", "run"), "stoker_launcher.notebook"),
    "checkpoint_dir": "stoker.session",
    "log": "stoker.session",
    **dict.fromkeys(("MultiThreadedAugmenter", "offload"), "stoker.loader.offload"),
    "replace_torch_loader": "stoker.loader.dataloader",
    "runs_dataframe": "stoker.events.runs",
    "timed": "stoker.loader.pass_timer",
}


def __getattr__(name: str) -> Any:
    """Import public names lazily, so that `import stoker` loads nothing else."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
