"""Every host: check tensors, nested in dicts and lists, for NaN and infinity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

Named = tuple[str, Any]


def non_finite(weights: dict[str, Any], ema: dict[str, Any] | None, optimizer: Any) -> str:
    """Every host: the first non-finite part of a saved checkpoint, or "".

    Args:
        weights: parameters and buffers by name.
        ema: averaged weights, or None.
        optimizer: optimiser state, nested.
    """
    for kind, tensors in (("weights", weights), ("averaged weights", ema or {})):
        for name, tensor in tensors.items():
            if is_broken_buffer(tensor):
                return f"{kind} {name}"
    return next((f"optimiser state {name}" for name, t in flat("", optimizer) if not is_finite(t)), "")


def floats(named: Any) -> Iterator[Named]:
    for name, tensor in named:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.is_floating_point() and local.numel():
            yield name, local.detach()


def flat(name: str, tree: Any) -> Iterator[Named]:
    """Yield the tensors in nested dicts and lists with their paths."""
    import torch

    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from flat(f"{name} {key}", value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from flat(name, value)


def is_finite(tensor: Any) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def is_broken_buffer(tensor: Any) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and not float(tensor.max()) < math.inf
