"""Script: the indices that a sampler gives."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import torch

from stoker.loader.digests import PLAIN

FIXED = {*PLAIN, *(kind for kind in np.sctypeDict.values() if issubclass(kind, np.number))}
"""Types of indices that do not change."""


def copy_of(index: Any) -> Any:
    """A copy of what a sampler gave: it may fill the same list, array or tensor again."""
    if type(index) in (list, tuple):  # a subclass may have attributes
        fixed = FIXED.issuperset(map(type, index))
        return type(index)(index if fixed else map(copy_of, index))
    return index.clone() if type(index) is torch.Tensor else copy.deepcopy(index)


def as_one(indices: Any) -> Any:
    """A list of numbers or of tensors as one array, whose digest takes less time."""
    kinds = {*map(type, indices)} if type(indices) in (list, tuple) else set()
    if len(kinds) == 1 and issubclass(kind := kinds.pop(), np.number | torch.Tensor):
        with contextlib.suppress(RuntimeError, TypeError):  # of several shapes
            return torch.stack(list(indices)) if kind is torch.Tensor else np.asarray(indices)
    return indices
