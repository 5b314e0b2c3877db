"""Script's process: the time at which the GPU reaches a next(), without synchronising steps."""

from __future__ import annotations

import time
from typing import Any


class GpuClock:
    """Script's process: timestamps on the current CUDA stream.

    An event recorded before next() completes once the GPU has finished all earlier work. The time between it
    and the event after next() is the time that the GPU waited, however far ahead of it the script runs.
    """

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        torch.cuda.synchronize()
        self.zero, self.base = time.monotonic(), self.mark()
        self.name = str(torch.cuda.get_device_name())

    def mark(self) -> Any:
        """Record an event."""
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, moments: list[Any], wait: bool) -> list[float | None]:
        """Events as seconds on this process's clock; None for events that the GPU has not reached."""
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
