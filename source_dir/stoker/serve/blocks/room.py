"""Chain worker: buffers in which batches are collated and from which they are sent.

torch's worker processes collate a batch directly into shared memory to avoid a copy. Chain workers collate it
directly into the buffer that `packing` sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stoker.serve.blocks.buffers import BufferPool

if TYPE_CHECKING:
    import numpy as np

ALIGNED = 64
"""Alignment of buffers in bytes, for vector instructions."""
LARGEST = 64 << 20
"""Bytes; a larger group gets memory that is not pooled."""


class Room:
    """Chain worker: see the module."""

    def __init__(self) -> None:
        self._pool = BufferPool(pinned=False)
        self._size = 0
        """Bytes of the largest group so far."""
        self._flat: np.ndarray[Any, Any] | None = None
        self._end = 0
        self._parts: dict[int, tuple[int, int]] = {}
        """Address → offset and size of the tensors collated for this group."""

    @contextmanager
    def group(self) -> Iterator[None]:
        """Context in which torch's `default_collate` stacks tensors in this buffer, not in shared memory."""
        import torch
        from torch.utils.data._utils.collate import default_collate_fn_map

        self._flat, self._end, self._parts = None, 0, {}  # first, so that the buffer can be reused
        self._flat = self._empty(self._size) if self._size else None
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

    def _storage(self, size: int) -> Any:
        """Memory for a tensor; None if the buffer is full."""
        import torch

        if self._flat is None or not size or self._end + size > len(self._flat):
            return None
        part = self._flat[self._end : self._end + size]
        self._parts[part.ctypes.data] = (self._end, size)
        self._end = aligned(self._end + size)
        return torch.frombuffer(part.data, dtype=torch.uint8).untyped_storage()

    def place(self, parts: Sequence[Any], spare: int) -> tuple[np.ndarray[Any, Any], list[int], int]:
        """Place parts in one buffer.

        Args:
            parts: contiguous bytes; a part that was collated in this buffer is not copied.
            spare: free bytes that the caller needs after the last part.

        Returns:
            the buffer, the offset of each part, and the end of the last one.
        """
        import numpy as np

        arrays = [np.frombuffer(part, np.uint8) for part in parts]
        given = dict(self._parts)
        places = [self._given(given, array) for array in arrays]
        size = sum(aligned(len(array)) for array, place in zip(arrays, places, strict=True) if place is None)
        if self._flat is None or self._end + size + spare > len(self._flat):
            places = [None] * len(arrays)
            size = sum(aligned(len(array)) for array in arrays) + spare
            if self._size < size <= LARGEST:
                self._size = size + size // 8
                self._pool = BufferPool(pinned=False)  # drops the smaller buffers once they are unused
            flat, end = self._empty(size), 0
        else:
            flat, end = self._flat, self._end
        found = []
        for array, place in zip(arrays, places, strict=True):
            if place is None:
                place, end = end, aligned(end + len(array))
                flat[place : place + len(array)] = array
                flat[place + len(array) : end] = 0  # so that equal objects have equal pages
            found.append(place)
        return flat, found, end

    def _given(self, given: dict[int, tuple[int, int]], array: np.ndarray[Any, Any]) -> int | None:
        place, size = given.get(array.ctypes.data, (0, -1))
        if size != len(array):
            return None
        del given[array.ctypes.data]  # memory shared by two objects is sent twice
        return place

    def _empty(self, size: int) -> np.ndarray[Any, Any]:
        import numpy as np

        if size > LARGEST:
            return np.empty(size, np.uint8)
        pooled: np.ndarray[Any, Any] = self._pool.empty((max(size, self._size),), np.uint8)
        return pooled


def aligned(size: int) -> int:
    """Round up to the next aligned offset."""
    return -(-size // ALIGNED) * ALIGNED
