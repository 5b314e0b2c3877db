"""Script: loaders that frameworks create: Accelerate rebuilds loaders, trainers create their own."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

USERS = ("accelerate.data_loader", "accelerate.accelerator", "accelerate", "transformers.trainer")
"""Modules with the functions that `follow_accelerate` replaces."""


def adopt(loader: Any, kind: type[Any], options: dict[str, Any]) -> None:
    """Script: turn a torch DataLoader into a `stoker.DataLoader`, the class `kind`."""
    loader.__class__ = kind
    loader.set_options(**options)


def follow_accelerate(kind: type[Any]) -> None:
    """Script: make Accelerate return a `stoker.DataLoader` when it gets one.

    Accelerate takes a loader apart and builds one of torch's from the parts.

    Args:
        kind: the class `stoker.DataLoader`.
    """
    module: Any = sys.modules.get("accelerate.data_loader")
    for name in ("prepare_data_loader", "skip_first_batches"):
        original = getattr(module, name, None)
        if original is None or hasattr(original, "__wrapped__"):
            continue

        @functools.wraps(original)
        def made(dataloader: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            found = _original(dataloader, *args, **kwargs)
            given = getattr(dataloader, "base_dataloader", dataloader)
            inner = getattr(found, "base_dataloader", found)
            if isinstance(given, kind) and type(inner) is TorchDataLoader:
                adopt(inner, kind, given.options())
            return found

        for user in USERS:
            if getattr(sys.modules.get(user), name, None) is original:
                setattr(sys.modules[user], name, made)
