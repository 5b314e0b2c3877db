"""Train worker: memory for batches that is allocated once, pinned on GPU hosts, and used again."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from typing import Any

POOLED_FROM_BYTES = 64 * 2**10
"""Smaller arrays are not worth keeping, unless they must be pinned."""
CLASSES_PER_DOUBLING = 8
"""Sizes are rounded up to one of these, so that at most 9 % is wasted and a batch that is a few records
shorter fits."""


class BufferPool:
    """Train worker: gives arrays out, and takes their memory back when the last user has let go.

    Whoever still holds a batch, or a view of it, keeps its memory: nothing is overwritten under it. New
    memory costs a page fault per 4 KiB, and pinning costs more; a feed that runs steadily allocates none.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.allocated_bytes = 0
        self._free: defaultdict[int, deque[Any]] = defaultdict(deque)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Train worker: a C-ordered NumPy array, not initialised."""
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
        # Over a memoryview, not over an array: NumPy would let views of views point past this array to the
        # memory below it, and this array's end would no longer mean that nobody uses the memory.
        array = np.frombuffer(memoryview(memory), dtype, count)
        # Called from any thread, even in the midst of garbage collection: appending takes no lock.
        weakref.finalize(array, free.append, memory).atexit = False
        return array.reshape(shape)

    def _allocate(self, size: int) -> Any:
        import torch

        self.allocated_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned).numpy()


def size_class(size: int) -> int:
    """Train worker: the size of the buffer that serves an array of `size` bytes."""
    step = CLASSES_PER_DOUBLING
    return max(4096, math.ceil(2 ** (math.ceil(math.log2(size) * step) / step)))
