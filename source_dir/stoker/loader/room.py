"""Chain worker: memory in which batches are collated and from which they are sent, group after group.

torch's worker processes collate a batch into shared memory, so that it is written once. Here it is collated
where `packing` needs it. Memory that nobody refers to any more takes the next group: fresh pages of the
operating system cost more than writing them does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

ALIGNED = 64
"""Bytes: where a buffer may begin, so that vector instructions read it well."""
MOST_KEPT, LARGEST_KEPT = 3, 64 << 20
"""Groups on their way to the object store at once, and bytes of one that are worth keeping."""


class Room:
    """Chain worker: see the module."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray[Any, Any]] = []
        self._flat: np.ndarray[Any, Any] | None = None
        self._end = 0
        self._parts: dict[int, tuple[int, int]] = {}
        """Address → place and size, of what was given out for this group."""

    @contextmanager
    def group(self) -> Iterator[None]:
        """While it lasts, torch's `default_collate` stacks tensors in this memory, not in shared memory."""
        import torch
        from torch.utils.data._utils.collate import default_collate_fn_map

        self._begin()
        torchs = default_collate_fn_map[torch.Tensor]

        def stack(batch: Sequence[Any], **others: Any) -> Any:
            first = batch[0]
            plain = type(first) is torch.Tensor and first.layout is torch.strided and not first.is_nested
            if not plain or first.device.type != "cpu" or first.requires_grad:
                return torchs(batch, **others)
            storage = self._storage(sum(each.numel() for each in batch) * first.element_size())
            if storage is None:
                return torchs(batch, **others)
            out = torch.empty(0, dtype=first.dtype).set_(storage).resize_(len(batch), *first.shape)
            return torch.stack(list(batch), 0, out=out)

        default_collate_fn_map[torch.Tensor] = stack
        try:
            yield
        finally:
            default_collate_fn_map[torch.Tensor] = torchs

    def _begin(self) -> None:
        self._flat, self._end, self._parts = None, 0, {}
        for nth in range(len(self._kept)):
            if sys.getrefcount(self._kept[nth]) == 2:  # the list's own reference, and this call's
                self._flat = self._kept[nth]
                return

    def _storage(self, size: int) -> Any:
        """Memory for a tensor, or None if there is none left."""
        import torch

        if self._flat is None or not size or self._end + size > len(self._flat):
            return None
        part = self._flat[self._end : self._end + size]
        self._parts[part.ctypes.data] = (self._end, size)
        self._end = aligned(self._end + size)
        return torch.frombuffer(part.data, dtype=torch.uint8).untyped_storage()

    def place(self, parts: Sequence[Any], spare: int) -> tuple[np.ndarray[Any, Any], list[int], int]:
        """Put buffers side by side.

        Args:
            parts: contiguous buffers of bytes; one that is a whole tensor of this group's stays where it is.
            spare: bytes that the caller needs behind them.

        Returns:
            the memory; where each part begins; where the last ends.
        """
        import numpy as np

        arrays = [np.frombuffer(part, np.uint8) for part in parts]
        given = dict(self._parts)
        places = [self._given(given, array) for array in arrays]
        size = sum(aligned(len(array)) for array, place in zip(arrays, places, strict=True) if place is None)
        if self._flat is None or self._end + size + spare > len(self._flat):
            places = [None] * len(arrays)
            flat = self._fresh(sum(aligned(len(array)) for array in arrays) + spare)
            end = 0
        else:
            flat, end = self._flat, self._end
        found = []
        for array, place in zip(arrays, places, strict=True):
            if place is None:
                place, end = end, aligned(end + len(array))
                flat[place : place + len(array)] = array
            found.append(place)
        return flat, found, end

    def _given(self, given: dict[int, tuple[int, int]], array: np.ndarray[Any, Any]) -> int | None:
        place, size = given.get(array.ctypes.data, (0, -1))
        if size != len(array):
            return None
        del given[array.ctypes.data]  # what two objects of a group share is sent twice
        return place

    def _fresh(self, size: int) -> np.ndarray[Any, Any]:
        """Memory for a group that does not fit, and for a while all that follow."""
        import numpy as np

        flat = np.empty(size + size // 8, np.uint8)
        if len(flat) <= LARGEST_KEPT:
            self._kept = [*self._kept[1 - MOST_KEPT :], flat]
        return flat


def aligned(size: int) -> int:
    """The next place where a buffer may begin."""
    return -(-size // ALIGNED) * ALIGNED
