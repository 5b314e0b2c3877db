"""Train worker on a GPU: copies batches to the device ahead of time, in a separate CUDA stream."""

from __future__ import annotations

import copy
import queue
import threading
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any

AHEAD = 2
"""Number of batches on the device that the loop has not taken; more wait in host memory."""


def on_tensors(value: Any, apply: Callable[[Any], Any]) -> Any:
    """Train worker: a batch with a function applied to its tensors, also those in lists, tuples and mappings.

    Their types stay as they are.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return apply(value)
    if isinstance(value, MutableMapping):
        # A copy, because a subclass may need other arguments.
        found = copy.copy(value)
        found.update({name: on_tensors(each, apply) for name, each in value.items()})
        return found
    if isinstance(value, list | tuple) and not all(isinstance(each, str) for each in value):
        parts = [on_tensors(each, apply) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class DeviceCopies:
    """Train worker: a thread that takes loaded batches in order and starts their copies.

    Args:
        device: the GPU.
        take: returns the next loaded batch, None after the last, or raises.
    """

    def __init__(self, device: Any, take: Callable[[], Any]) -> None:
        import torch

        self._device, self._take = device, take
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device)
        self._room = threading.Semaphore(AHEAD)
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._copied: dict[int, Any] = {}
        """Event at the end of each queued batch's copy."""
        self._sources: deque[tuple[Any, Any]] = deque()
        """Pinned memory that a copy still reads, with the event that ends it."""
        self._over = False
        threading.Thread(target=self._work, name="feed-copies", daemon=True).start()

    def take(self) -> Any:
        """The next batch, on its way to the device; None after the last.

        Raises:
            whatever the feed failed with.
        """
        item = self._ready.get()
        self._room.release()
        if isinstance(item, BaseException):
            raise item
        return item

    def await_copy(self, item: Any) -> None:
        """Make the compute stream wait for the batch's copy, without blocking the loop."""
        import torch

        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._copied.pop(id(item)))
        # Its memory belongs to the copy stream's pool: free only after this stream has used it.
        on_tensors(item.columns, lambda value: value.record_stream(stream))

    def end(self) -> None:
        """Stop: the loop needs no more batches."""
        self._over = True
        self._room.release()

    def _work(self) -> None:
        import torch

        try:
            torch.cuda.set_device(self._device)
            while True:
                self._room.acquire()
                item = None if self._over else self._take()
                if item is not None:
                    self._copy(item)
                self._ready.put(item)
                if item is None:
                    break
            self._stream.synchronize()
            self._sources.clear()
        except BaseException as error:
            self._ready.put(error)

    def _copy(self, item: Any) -> None:
        import torch

        cuda: Any = torch.cuda
        event, source = cuda.Event(), item.columns
        with cuda.stream(self._stream):
            item.columns = on_tensors(source, lambda value: value.to(self._device, non_blocking=True))
            event.record(self._stream)
        self._copied[id(item)] = event
        self._sources.append((event, source))
        while self._sources and self._sources[0][0].query():
            self._sources.popleft()
