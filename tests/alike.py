"""Whether two batches hold the same, however they are nested."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return bool(one == two)


def same(one: Any, two: Any) -> bool:
    """Equal in type, shape and content."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        if one.layout != torch.strided:
            return same(one.to_dense(), two.to_dense())
        about = ((x.dtype, x.shape, x.requires_grad) for x in (one, two))
        if next(about) != next(about):
            return False
        new = one.dtype in torch.storage._new_dtypes()
        return torch.equal(*(x.contiguous().view(torch.uint8) if new else x for x in (one, two)))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape) == (two.dtype, two.shape) and bool(np.all(one == two))
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if dataclasses.is_dataclass(one):
        return all(
            same(getattr(one, f.name), getattr(two, f.name)) for f in dataclasses.fields(one)
        )
    return bool(one == two)
