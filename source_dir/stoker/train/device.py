"""Train worker: copies batches to a GPU ahead of time, in a separate CUDA stream, and times every step.

Timing is always on and never waits for the GPU. The loop's wait for a batch is attributed to what was
happening to that batch meanwhile: it was being produced, in transfer, being assembled, or being copied to the
device. The rest of the step is compute.

On a GPU the loop runs ahead of the device, so its own waits say little. Three events per step in the device's
stream record when the previous step ended (E), when the loop had this batch (A) and when the batch was copied
(B): the device was idle from E to A, waited for the copy from A to B, and computed from B to the next E. They
are read some steps later, when they have completed.
"""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from stoker.events.summary import STEP_TERMS

cuda: Any = torch.cuda  # its events and streams have no types
AHEAD = 2
"""Number of batches on the device that the loop has not taken; more wait in host memory."""


def on_tensors(value: Any, apply: Callable[[Any], Any]) -> Any:
    """A batch with a function applied to its tensors, also those in lists, tuples and mappings.

    Their types stay as they are.
    """
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
    """A thread that starts the copies of batches: of what `take` returns, None after the last."""

    def __init__(self, device: Any, take: Callable[[], Any]) -> None:
        self._device, self._take = device, take
        self._stream = cuda.Stream(device)
        self._room = threading.Semaphore(AHEAD)
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._copied: dict[int, Any] = {}
        self._sources: deque[tuple[Any, Any]] = deque()
        """Pinned memory that a copy still reads, with the event that ends it."""
        self._over = False
        threading.Thread(target=self._work, name="feed-copies", daemon=True).start()

    def take(self) -> Any:
        item = self._ready.get()
        self._room.release()
        if isinstance(item, BaseException):
            raise item
        return item

    def await_copy(self, item: Any) -> None:
        """Make the compute stream wait for the batch's copy, without blocking the loop."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._copied.pop(id(item)))
        # Its memory belongs to the copy stream's pool: free only after this stream has used it.
        on_tensors(item.columns, lambda value: value.record_stream(stream))

    def end(self) -> None:
        self._over = True
        self._room.release()

    def _work(self) -> None:
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
        event, source = cuda.Event(), item.columns
        with cuda.stream(self._stream):
            item.columns = on_tensors(
                source, lambda value: value.to(self._device, non_blocking=True)
            )
            event.record(self._stream)
        self._copied[id(item)] = event
        self._sources.append((event, source))
        while self._sources and self._sources[0][0].query():
            self._sources.popleft()


TERMS = STEP_TERMS
WAITS = TERMS[:-1]
KEPT_STEPS = 2000
SMOOTHING = 0.2


class Stamps(NamedTuple):
    """When its blocks existed, its rows were on this host, and were one batch, by `time.perf_counter()`."""

    produced: float
    arrived: float
    collated: float


def exposed(since: float, until: float, stamps: Stamps) -> list[float]:
    """Splits a wait from `since` to `until` by WAITS; the parts add up to the whole."""
    parts, at = [], since
    for end in (*stamps, until):
        end = min(max(end, at), until)
        parts.append(end - at)
        at = end
    return parts


def on_device(waits: list[float], idle: float, copy: float, step: float) -> list[float]:
    """The part of the loop's `waits` that the device felt, by TERMS; all in seconds.

    Args:
        waits: by WAITS.
        idle: from the end of the previous step until the loop had the batch.
        copy: how long the device then waited for the copy.
        step: from the end of the previous step to the end of this one.
    """
    waited = sum(waits)
    # Idle time beyond the loop's wait is overhead of the loop (such as logging), not of the input.
    felt = min(idle, waited) / waited if waited > 0 else 0.0
    parts = [felt * wait for wait in waits]
    parts[-1] += copy
    return [*parts, max(0.0, step - sum(parts))]


@dataclass
class StepTimes:
    """The figures of one pass, in seconds."""

    terms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TERMS, 0.0))
    steps: int = 0
    first_wait_s: float = 0.0
    longest_wait_s: float = 0.0
    fetch_s: float = 0.0
    """Time in which the feed's threads fetched rows, whether or not the loop waited."""
    fetch_cpu_s: float = 0.0
    collate_cpu_s: float = 0.0
    step_ms: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    compute_s: float = 0.0
    """Smoothed time of a step without its waits."""
    _told: dict[str, float] = field(default_factory=dict)
    _told_steps: int = 0

    @property
    def wait_s(self) -> float:
        return sum(self.terms[name] for name in WAITS)

    def add(self, parts: list[float]) -> None:
        for name, seconds in zip(TERMS, parts, strict=True):
            self.terms[name] += seconds
        self.longest_wait_s = max(self.longest_wait_s, sum(parts[:-1]))
        if self.steps == 0:
            self.first_wait_s = sum(parts[:-1])
            self.compute_s = parts[-1]
        self.compute_s += SMOOTHING * (parts[-1] - self.compute_s)
        self.steps += 1
        self.step_ms.append(round(1000 * sum(parts), 3))

    def since_told(self) -> dict[str, float]:
        """Mean ms per step and term since the last call."""
        steps = self.steps - self._told_steps
        means = {n: (s - self._told.get(n, 0.0)) / max(steps, 1) for n, s in self.terms.items()}
        self._told, self._told_steps = dict(self.terms), self.steps
        return {name: round(1000 * seconds, 3) for name, seconds in means.items()}

    def waits(self) -> dict[str, Any]:
        names = ("wait_s", "first_wait_s", "longest_wait_s")
        return {name: round(getattr(self, name), 6) for name in names}

    def figures(self) -> dict[str, float]:
        figures = {f"{name}_s": round(seconds, 6) for name, seconds in self.terms.items()}
        figures["batches"] = self.steps
        names = ("fetch_s", "fetch_cpu_s")
        return figures | self.waits() | {name: round(getattr(self, name), 6) for name in names}


class HostClock:
    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._waits: list[float] | None = None
        self._began = 0.0

    def waited(self, since: float, until: float, stamps: Stamps) -> None:
        *parts, handover = exposed(since, until, stamps)
        parts[-1] += handover  # there is no device to copy to
        self._waits, self._began = [*parts, 0.0], until

    def finished(self) -> None:
        if self._waits is not None:
            self.times.add([*self._waits, time.perf_counter() - self._began])
            self._waits = None

    def close(self) -> None:
        self.finished()


class DeviceClock:
    def __init__(self, times: StepTimes, device: Any) -> None:
        self.times, self._device = times, device
        self._spare: list[Any] = []
        self._last: Any = None
        self._open: tuple[list[float], Any, Any] | None = None
        self._pending: deque[tuple[list[float], Any, Any, Any, Any]] = deque()

    def waited(self, since: float, until: float, stamps: Stamps) -> None:
        self._open = (exposed(since, until, stamps), self._mark(), None)

    def copied(self) -> None:
        """Later work in the stream follows the batch's copy."""
        if self._open is not None:
            self._open = (self._open[0], self._open[1], self._mark())

    def finished(self) -> None:
        if self._open is None:
            return
        end = self._mark()
        self._pending.append((*self._open, self._last, end))
        self._last, self._open = end, None
        while self._pending and self._pending[0][4].query():
            self._read()

    def close(self) -> None:
        self.finished()
        if self._last is not None:
            self._last.synchronize()
        while self._pending:
            self._read()

    def _mark(self) -> Any:
        event = self._spare.pop() if self._spare else cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        waits, got, copied, before, end = self._pending.popleft()
        copy = got.elapsed_time(copied) / 1000
        if before is None:  # the first step: the device was idle before
            idle = sum(waits)
            step = idle + got.elapsed_time(end) / 1000
        else:
            idle, step = before.elapsed_time(got) / 1000, before.elapsed_time(end) / 1000
            self._spare.append(before)
        self._spare += [got, copied]
        self.times.add(on_device(waits, idle, copy, step))
