"""Script: makers of batches: chain workers of a cluster, or this process.

A maker has five methods, all called in the script's thread:
    submit(shards, total)   add work; total is the number of shards in all, once known
    want(place)             request the next block
    get(deadline)           return the next requested block: (place, "block", batches), (place, "end", None)
                            or (place, "failed", reason)
    pace(least)             batches per block, and batches to submit ahead
    close()
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import queue
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from stoker.errors import where_raised
from stoker.loader.pass_timer import PassTimer
from stoker.loader.work import Failed, LoaderWork, MadeBatch, copy_for, opened, packed
from stoker.loader.worker_output import repeat
from stoker.protocol import Shard
from stoker.serve.blocks.client import connect
from stoker.serve.blocks.packing import PAGES, SCHEMA, unpack
from stoker.session import EVENTS_VARIABLE

ANSWER_S = 60.0
"""Deadline of a call to the service, which answers within seconds."""
END_S = 10.0
"""Deadline for the threads of open passes to end before the script disconnects from Ray."""
SECONDS_AHEAD = 3.0
"""Work to submit ahead, in seconds of all chain workers."""
GROUP_S = 0.1
"""Fast batches are grouped into blocks that take this long to make."""
LEAST_PER_SLOT, MOST_AHEAD = 4, 4096
"""Batches ahead: minimum per chain worker, maximum in total."""
ARRIVED = 3
"""Blocks queued in this process."""
ASKED = 8
"""Blocks requested per call."""
FIGURES_EVERY_S = 2.0


class ClusterMaker:
    """See the module.

    Args:
        service: the job's LoaderService.
        name: name of the registered loader.
        streams: workers of an iterable dataset; 0 if map-style.
        keeps: names the copies of the dataset that workers keep across passes; empty: those of all loaders
            with this content; None: a new copy for this pass.
        pinned: whether batches go into pinned memory.
        stall_s: the script fails after this long without a batch.
        watch: of the pass.
    """

    def __init__(
        self,
        service: Any,
        name: str,
        streams: int,
        keeps: str | None,
        pinned: bool,
        stall_s: float,
        watch: PassTimer,
    ) -> None:
        import ray

        self._service, self._key, self._stall_s = service, (key := secrets.token_hex(8)), stall_s
        context, told = ray.get_runtime_context(), os.environ.get(EVENTS_VARIABLE, "")
        node, job = context.get_node_id(), context.get_job_id()
        split = name if keeps == "" else f"{name}/{keeps or key}"
        about = (streams, bool(keeps), node, job, told)
        ray.get(service.open.remote(service, key, split, *about), timeout=ANSWER_S)
        self._puller = Puller(service, key, pinned, watch)

    def submit(self, shards: list[tuple[int, Shard, int]], total: int | None) -> None:
        """See the module."""
        self._service.submit.remote(self._key, shards, total)

    def want(self, place: tuple[int, int]) -> None:
        """See the module."""
        self._puller.want(place)

    def get(self, deadline: float | None) -> tuple[tuple[int, int], str, Any]:
        """See the module.

        Raises:
            RuntimeError: nothing came in time.
        """
        began = time.monotonic()
        while True:
            try:
                return self._puller.arrived.get(timeout=1.0)
            except queue.Empty:
                now = time.monotonic()
                if deadline is not None and now > deadline:
                    raise RuntimeError(
                        f"DataLoader timed out after {now - began:.0f} seconds (timeout)"
                    ) from None
                if not self._puller.alive:
                    raise RuntimeError("DataLoader: the thread that fetches batches has ended") from None
                if now - began > self._stall_s:
                    raise RuntimeError(f"DataLoader: no batch for {now - began:.0f} s") from None

    def pace(self, least: int) -> tuple[int, int]:
        """See the module."""
        slots, batch_s = max(self._puller.slots, 1), self._puller.batch_s
        least = max(least, LEAST_PER_SLOT * slots)
        if batch_s is None:
            return 1, least
        most = min(max(int(SECONDS_AHEAD * slots / max(batch_s, 1e-6)), least), MOST_AHEAD)
        return max(1, min(int(GROUP_S / max(batch_s, 1e-6)), most // (2 * LEAST_PER_SLOT * slots))), most

    def close(self) -> None:
        """See the module."""
        self._puller.close()


class Puller:
    """A thread that requests, fetches and unpacks blocks ahead of the script."""

    def __init__(self, service: Any, key: str, pinned: bool, watch: PassTimer) -> None:

        self._service, self._key, self._watch = service, key, watch
        self.arrived: queue.Queue[tuple[tuple[int, int], str, Any]] = queue.Queue(ARRIVED)
        self.slots, self.batch_s = 1, None
        self._wanted: deque[tuple[int, int]] = deque()
        self._changed = threading.Condition()
        self._over = False
        self._figures_due = 0.0
        self._device = torch.cuda.current_device() if pinned else None
        # Not into pinned memory: it would be reused while a non-blocking copy to a GPU still reads it.
        # torch's pinned memory tracks such copies.
        self._transport = connect(service, pinned=False, timeout_s=600.0)
        self._thread = threading.Thread(target=self._run, name="stoker-batches", daemon=True)
        _PULLERS.add(self)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def want(self, place: tuple[int, int]) -> None:
        """Fetch this block next."""
        with self._changed:
            self._wanted.append(place)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop; the thread ends soon after."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def interrupt(self) -> None:
        """Stop, and end what the thread waits for."""
        self.close()
        self._end()
        with suppress(queue.Empty):
            while True:
                self.arrived.get_nowait()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            while (places := self._next_places()) is not None:
                self._pull(places)
        except BaseException as error:
            self._give((0, 0), "failed", where_raised(error))
        finally:
            self._end()

    def _end(self) -> None:
        import ray

        if ray.is_initialized():
            self._service.close.remote(self._key)

    def _next_places(self) -> list[tuple[int, int]] | None:
        with self._changed:
            while not self._wanted and not self._over:
                self._changed.wait(1.0)
            return None if self._over else list(itertools.islice(self._wanted, ASKED))

    def _pull(self, places: list[tuple[int, int]]) -> None:
        import ray

        self._look()
        answers = ray.get(self._service.take.remote(self._key, places), timeout=ANSWER_S)
        for place, (kind, value) in zip(places, answers, strict=False):
            if kind == "block":
                (seconds, said), *value = unpack(self._transport.fetch([value], SCHEMA).columns[PAGES])
                repeat(said)
                self._transport.finish_pass()  # release the block: no other batch is in it
                each = seconds / max(len(value), 1)
                self.batch_s = each if self.batch_s is None else 0.8 * self.batch_s + 0.2 * each
                if self._device is not None:
                    value = [pin(made) for made in value]
            with self._changed:
                self._wanted.popleft()
            if not self._give(place, kind, value):
                return

    def _give(self, place: tuple[int, int], kind: str, value: Any) -> bool:
        while not self._over:
            try:
                self.arrived.put((place, kind, value), timeout=0.5)
            except queue.Full:
                continue
            return True
        return False

    def _look(self) -> None:
        import ray

        if time.monotonic() > self._figures_due:
            self._figures_due = time.monotonic() + FIGURES_EVERY_S
            told = self._service.state.remote(self._key, self._watch.progress)
            self.slots, notes = ray.get(told, timeout=ANSWER_S)
            for note in notes:
                logging.getLogger("stoker").warning("stoker.DataLoader: %s", note)


_PULLERS: weakref.WeakSet[Puller] = weakref.WeakSet()


def end_passes() -> None:
    """End the threads of all open passes.

    Ray ends a process in which a thread drops a reference while it disconnects.
    """
    running = [puller for puller in list(_PULLERS) if puller.alive]  # none in a fork of the script
    for puller in running:
        puller.interrupt()
    deadline = time.monotonic() + END_S
    for puller in running:
        puller.join(max(deadline - time.monotonic(), 0))


@functools.cache
def end_passes_before_ray() -> None:
    """Script, connected: whether it exits or calls `ray.shutdown`."""
    import ray

    shutdown = ray.shutdown

    @functools.wraps(shutdown)
    def ending(*arguments: Any, **options: Any) -> None:
        end_passes()
        shutdown(*arguments, **options)

    ray.shutdown = ending
    atexit.register(end_passes)


def pin(made: MadeBatch | Failed) -> MadeBatch | Failed:
    """Copy a batch to pinned memory with torch's own function."""
    from torch.utils.data._utils.pin_memory import pin_memory

    if isinstance(made, Failed):
        return made
    return made._replace(batch=pin_memory(made.batch))  # type: ignore[no-untyped-call]


class ProcessMaker:
    """Makes batches in this process on request, for debugging and tests.

    Args:
        pages: see `register`.
        copies: of an iterable dataset, for all passes of a loader; see `copy_for`.
    """

    def __init__(self, pages: tuple[Any, Any], copies: dict[int, tuple[int, LoaderWork]]) -> None:
        self._pages, self._copies = pages, copies
        self._shards: dict[int, tuple[Shard, int]] = {}
        self._running: dict[int, Iterator[Any]] = {}
        self._wanted: deque[tuple[int, int]] = deque()
        self._work: LoaderWork | None = None

    def submit(self, shards: list[tuple[int, Shard, int]], total: int | None) -> None:
        """See the module."""
        self._shards |= {number: (shard, skip) for number, shard, skip in shards}

    def want(self, place: tuple[int, int]) -> None:
        """See the module."""
        self._wanted.append(place)

    def get(self, deadline: float | None) -> tuple[tuple[int, int], str, Any]:
        """See the module."""
        from torch.utils.data._utils import worker

        from stoker.read.sources import drawing

        place = self._wanted.popleft()
        with drawing("batch"):  # leaves the script's own generators untouched
            try:
                group = next(self._batches(place[0]), None)
            finally:
                worker._worker_info = None
        if group is None:
            return place, "end", None
        return place, "block", unpack(packed(group, 0.0))[1:]

    def _batches(self, number: int) -> Iterator[Any]:
        if number not in self._running:
            shard, skip = self._shards.pop(number)
            self._work = self._work or opened(self._pages[1])
            order = shard.items[0]
            if not self._work.iterable:
                return self._work.run(order)
            self._running[number] = running = copy_for(order, self._pages[1], self._copies).run(order)
            next(itertools.islice(running, skip, skip), None)
        return self._running[number]

    def pace(self, least: int) -> tuple[int, int]:
        """See the module."""
        return 1, least

    def close(self) -> None:
        """See the module."""
        self._running.clear()
