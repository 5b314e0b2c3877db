"""Script's process: when the GPU, rather than the script, came to a next(). Steps are not synchronised."""

from __future__ import annotations

import time
from typing import Any


class GpuClock:
    """Script's process: moments on the current CUDA stream.

    An event that is recorded as next() is entered happens once the GPU has done all work before it; so what
    lies between it and the one after next() is the time for which the GPU had to wait, however far the script
    runs ahead of it.
    """

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        torch.cuda.synchronize()
        self.zero, self.base = time.monotonic(), self.mark()
        self.name = str(torch.cuda.get_device_name())

    def mark(self) -> Any:
        """An event now."""
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, moments: list[Any], wait: bool) -> list[float | None]:
        """Seconds on this process's clock; None for what the GPU has not reached."""
        if wait:
            self.torch.cuda.synchronize()
        found: list[float | None] = []
        for moment in moments:
            if isinstance(moment, float):
                found.append(moment)
            else:
                reached = wait or moment.query()
                found.append(self.zero + self.base.elapsed_time(moment) / 1000 if reached else None)
        return found
