"""Script: loaders that others make: Accelerate rebuilds those it is given, Trainers make their own."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from stoker.loader import dataloader as ours

USERS = ("accelerate.data_loader", "accelerate.accelerator", "accelerate", "transformers.trainer")
"""Modules that hold what `follow_accelerate` replaces."""

_stock_iter = TorchDataLoader.__iter__


def replace_torch_loader(**options: Any) -> None:
    """Script: every torch DataLoader that is iterated over from now on is a `stoker.DataLoader`.

    For Trainers that make their loaders themselves (Hugging Face's, say). Subclasses of torch's with an
    iterator of their own stay as they are.

    Args:
        **options: `address`, `on_error`, `bad_record_budget`, `stall_timeout_s`.
    """

    def iterate(loader: TorchDataLoader[Any]) -> Any:
        if type(loader) is TorchDataLoader:
            adopt(loader, options)
            return iter(loader)
        return _stock_iter(loader)

    TorchDataLoader.__iter__ = iterate  # type: ignore[method-assign]


def adopt(loader: Any, options: dict[str, Any]) -> None:
    """Script: let a torch DataLoader be one of ours."""
    loader.__class__ = ours.DataLoader
    loader.set_options(**options)


def follow_accelerate() -> None:
    """Script: where Accelerate is loaded: what it makes of a `stoker.DataLoader` is one, too.

    It takes a loader apart and builds torch's from the parts.
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
            if isinstance(given, ours.DataLoader) and type(inner) is TorchDataLoader:
                adopt(inner, given.options())
            return found

        for user in USERS:
            if getattr(sys.modules.get(user), name, None) is original:
                setattr(sys.modules[user], name, made)
