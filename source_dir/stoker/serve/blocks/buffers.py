"""Train worker: batch memory that is allocated once, pinned on GPU hosts, and reused."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from typing import Any

POOLED_FROM_BYTES = 64 * 2**10
"""Smaller arrays are not pooled unless they must be pinned."""
CLASSES_PER_DOUBLING = 8
"""Sizes are rounded up to one of these, which wastes at most 9 % and lets slightly shorter batches reuse a
buffer."""


class BufferPool:
    """Train worker: allocates arrays and reclaims their memory when the last user releases it.

    Holding a batch, or a view of it, keeps its memory: nothing is overwritten. New memory costs a page fault
    per 4 KiB, and pinning costs more; in steady state a feed allocates none.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.allocated_bytes = 0
        self._free: defaultdict[int, deque[Any]] = defaultdict(deque)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Train worker: an uninitialized C-ordered NumPy array."""
        import numpy as np

        dtype = np.dtype(dtype)
        count = math.prod(shape)
        size = count * dtype.itemsize
        if not size or (size < POOLED_FROM_BYTES and not self.pinned):
            return np.empty(shape, dtype)
        free = self._free[size_class(size)]
        try:
            memory = free.popleft()
        except IndexError:
            memory = self._allocate(size_class(size))
        # Wrap a memoryview, not an array: otherwise NumPy lets views of views refer past this array to the
        # memory below, and this array's finalizer would no longer mean that the memory is unused.
        array = np.frombuffer(memoryview(memory), dtype, count)
        # May be called from any thread, even during garbage collection: appending takes no lock.
        weakref.finalize(array, free.append, memory).atexit = False
        return array.reshape(shape)

    def _allocate(self, size: int) -> Any:
        import torch

        self.allocated_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned).numpy()


def size_class(size: int) -> int:
    """Train worker: the buffer size for an array of `size` bytes."""
    step = CLASSES_PER_DOUBLING
    return max(4096, math.ceil(2 ** (math.ceil(math.log2(size) * step) / step)))
