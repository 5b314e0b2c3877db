"""Train worker: turns blocks into batches on the device, ahead of time, and times every step."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

from stoker.chain.collating import CollateFn, all_of, collated
from stoker.config.schema import DataConfig
from stoker.errors import DataError, SchemaError
from stoker.protocol import HWC_SUFFIX, ID_COLUMN, KEY_COLUMN, BlockReport, StepAssignment
from stoker.recipe import Batch
from stoker.serve.accounting import ID_MODULUS
from stoker.serve.blocks.batches import as_batch
from stoker.serve.blocks.client import Fetched, Transport
from stoker.serve.blocks.collator import Arrived, Collator
from stoker.train.device import DeviceClock, DeviceCopies, HostClock, Stamps, StepTimes

FETCHERS = 2
"""Number of fetching threads: that many steps are in flight, over as many connections to each host."""
LEAST_BATCHES, MOST_BATCHES = 2, 512
ASKED_AT_ONCE = 8
"""Maximum steps per call to the coordinator: a call costs about a millisecond of CPU."""


class PrefetchLimit(NamedTuple):
    """How much data to keep ready."""

    seconds: float
    """Seconds of training."""
    max_bytes: int

    @classmethod
    def of(cls, data: DataConfig) -> PrefetchLimit:
        """From the configuration."""
        return cls(data.prefetch_s, data.prefetch_mb * 2**20)


@dataclass
class HostBatch:
    """One step's batch in this host's memory."""

    columns: Batch
    """Tensors, or lists of strings."""
    ids: Any
    keys: list[str]
    portion: StepAssignment
    stamps: Stamps
    nbytes: int


@dataclass(kw_only=True)
class Feed:
    """One rank's end of a pass: iterate it for batches (dicts of tensors on the device, images as CHW), then
    read its figures."""

    coordinator: Any
    attempt: int
    device: Any
    transport: Transport
    prefetch: PrefetchLimit
    stall_timeout_s: float
    split: str = "train"
    epoch: int = 0
    rank: int = 0
    first_step: int = 0
    join_s: float = 0.0
    """How long to wait for its threads when the pass ends. A process that disconnects from Ray after it needs
    that: Ray ends it if a thread then drops a reference to a block."""
    keep_keys: bool = False
    collator: Collator | None = None
    """Makes batches on CPU hosts, for a recipe with `collate`."""
    times: StepTimes = field(default_factory=StepTimes)
    rows: int = 0
    padded: int = 0
    id_sum: int = 0
    keys: list[str] = field(default_factory=list)
    stop: str = ""
    """Why the run stops after the last batch returned."""
    checkpoint: bool = False
    """Whether a checkpoint was requested since the last one; clear it when you take it."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches of this rank.

        Raises:
            DataError: the data side failed, or delivered nothing for `stall_timeout_s`.
        """
        prefetcher = Prefetcher(self)
        on_gpu = self.device.type == "cuda"
        device_clock = DeviceClock(self.times, self.device) if on_gpu else None
        clock = device_clock or HostClock(self.times)
        copies = DeviceCopies(self.device, prefetcher.take) if on_gpu else None
        try:
            while True:
                asked = time.perf_counter()
                item = copies.take() if copies else prefetcher.take()
                if item is None:
                    return
                clock.waited(asked, time.perf_counter(), item.stamps)
                if copies and device_clock:
                    copies.await_copy(item)
                    device_clock.copied()
                self._count(item)
                yield item.columns
                clock.finished()
                prefetcher.resize(item.nbytes)
                if self.stop:
                    return
        finally:
            prefetcher.end()
            if copies:
                copies.end()
            clock.close()
            if self.collator:
                self.coordinator.collated.remote(self.split, self.times.collate_cpu_s)

    def _count(self, item: HostBatch) -> None:
        """Count the rows given to the loop in this rank's account."""
        import numpy as np

        portion, ids = item.portion, item.ids
        own = ids[: len(ids) - portion.padded]
        self.rows += len(ids)
        self.padded += portion.padded
        # The modulus divides 2**64, so 64-bit wrap-around does not change the sum.
        self.id_sum = (self.id_sum + int(own.view(np.uint64).sum())) % ID_MODULUS
        if self.keep_keys:
            self.keys += item.keys
        # A step may consist of several batches, any of which may carry the request.
        self.stop, self.checkpoint = portion.stop, self.checkpoint or portion.checkpoint


class Prefetcher:
    """Threads that request the steps of a pass in order and fetch several at once."""

    def __init__(self, owner: Feed) -> None:
        self.owner = owner
        self._changed = threading.Condition()
        self._given: deque[tuple[int, StepAssignment, float]] = deque()
        """Steps assigned by the coordinator but not being fetched, and since when."""
        self._fetching: set[int] = set()
        self._loaded: dict[int, Any] = {}
        self._next = self._asked = owner.first_step
        """The step that the loop takes next, and the next one to request."""
        self._asking = False
        """Whether a thread is requesting steps from the coordinator."""
        fetchers = owner.collator.at_once if owner.collator else FETCHERS
        self._limit = LEAST_BATCHES + fetchers
        self._over = self._ended = False
        self._threads = [
            threading.Thread(target=self._work, name=f"feed-{owner.split}-{number}", daemon=True)
            for number in range(fetchers)
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> HostBatch | None:
        """The next step's batch; None after the last, or when this pass has ended.

        Raises:
            DataError: the data side failed, or delivered nothing within the stall timeout.
        """
        deadline = time.monotonic() + self.owner.stall_timeout_s
        with self._changed:
            while self._next not in self._loaded:
                if self._over:
                    return None
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DataError(
                        f"no {self.owner.split} batch for {self.owner.stall_timeout_s:.0f} s"
                        " (data.stall_timeout_s): the CPU hosts are stuck or too slow"
                    )
                self._changed.wait(left)
            item = self._loaded.pop(self._next)
            self._next += 1
            self._changed.notify_all()
        if isinstance(item, BaseException):
            raise item
        loaded: HostBatch | None = item
        return loaded

    def resize(self, batch_bytes: int) -> None:
        """Prefetch as many batches as `prefetch.seconds` of training needs and memory allows."""
        prefetch, compute = self.owner.prefetch, self.owner.times.compute_s
        if compute <= 0:
            return
        wanted = ceil(prefetch.seconds / compute)
        if self.owner.collator:
            # These are in the making on CPU hosts.
            wanted += self.owner.collator.at_once
        room = prefetch.max_bytes // max(batch_bytes, 1)
        self._limit = max(LEAST_BATCHES, min(wanted, room, MOST_BATCHES))

    def end(self) -> None:
        """Stop: the loop needs no more batches."""
        with self._changed:
            self._over = True
            self._loaded.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + self.owner.join_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        self.owner.transport.finish_pass()

    def _work(self) -> None:
        """Thread: request, fetch and store steps until the pass ends."""
        while (given := self._next_given()) is not None:
            step, portion, since = given
            try:
                item: Any = self._fetch(portion, since)
            except BaseException as error:
                item = error
            self._put(step, item)
            if isinstance(item, BaseException):
                return

    def _next_given(self) -> tuple[int, StepAssignment, float] | None:
        """A step to fetch; requests more if no thread does. None if none is needed or left."""
        while True:
            with self._changed:
                while not (self._over or self._given or self._ended or self._may_ask()):
                    self._changed.wait(1.0)
                if self._over:
                    return None
                if self._given:
                    self._fetching.add(self._given[0][0])
                    return self._given.popleft()
                if self._ended:
                    return None
                self._asking = True
                first, most = self._asked, min(ASKED_AT_ONCE, self._room())
            self._ask(first, most)

    def _may_ask(self) -> bool:
        return not self._asking and self._room() >= min(ASKED_AT_ONCE, self._limit // 2)

    def _ask(self, first: int, most: int) -> None:
        """Request more steps; holds no lock, so that the loop can take loaded batches meanwhile."""
        portions: list[StepAssignment] = []
        failure: BaseException | None = None
        try:
            portions = self._call(first, most)
        except BaseException as error:
            failure = error
        now = time.perf_counter()
        with self._changed:
            self._given += [(first + i, portion, now) for i, portion in enumerate(portions)]
            self._asked += len(portions)
            self._asking, self._ended = False, not portions
            self._changed.notify_all()
        if self._ended:
            self._put(first, failure)

    def _room(self) -> int:
        return self._limit - (self._asked - self._next)

    def _fetched(self) -> int:
        """All steps before this one are here: the service may drop their blocks."""
        with self._changed:
            return min([self._asked, *self._fetching, *(step for step, _, _ in self._given)])

    def _put(self, step: int, item: Any) -> None:
        with self._changed:
            self._fetching.discard(step)
            if not self._over:
                self._loaded[step] = item
            self._changed.notify_all()

    def _call(self, step: int, most: int) -> list[StepAssignment]:
        import ray

        owner = self.owner
        which = (owner.attempt, owner.split, owner.epoch, owner.rank)
        call = owner.coordinator.ahead.remote(*which, step, most, self._fetched())
        try:
            answer: list[StepAssignment] | str = ray.get(call, timeout=owner.stall_timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise DataError(
                f"step {step}: no {owner.split} data for {owner.stall_timeout_s:.0f} s (data.stall_timeout_s)"
            ) from None
        if isinstance(answer, str):
            raise DataError(answer)
        return answer

    def _fetch(self, portion: StepAssignment, produced: float) -> HostBatch:
        began, cpu, owner = time.perf_counter(), time.thread_time(), self.owner
        try:
            made = self._receive(portion, produced)
        except SchemaError as error:
            raise DataError(f"{owner.split} epoch {owner.epoch + 1}: {error}") from None
        now = time.perf_counter()
        with self._changed:
            owner.times.fetch_s += now - began
            owner.times.fetch_cpu_s += time.thread_time() - cpu
            owner.times.collate_cpu_s += made.collate_cpu_s
        stamps = Stamps(made.produced, made.arrived, now)
        return HostBatch(made.batch, made.ids, made.keys, portion, stamps, made.nbytes)

    def _receive(self, portion: StepAssignment, produced: float) -> Arrived:
        owner, fetched = self.owner, Fetched({}, time.perf_counter())
        if portion.blocks:
            if portion.schema is None:
                raise DataError(f"rows of the {owner.split} split arrived without a schema")
            if owner.collator:
                return owner.collator.fetch(portion.blocks, portion.schema)
            fetched = owner.transport.fetch(portion.blocks, portion.schema)
        return Arrived(*as_tensors(fetched.columns), produced, fetched.arrived)


def as_tensors(columns: dict[str, Any]) -> tuple[Batch, Any, list[str], int]:
    """Columns → (batch of tensors that share their memory, ids, keys, bytes)."""
    import numpy as np
    import torch

    columns = dict(columns)
    ids = columns.pop(ID_COLUMN, np.empty(0, dtype=np.int64))
    keys = columns.pop(KEY_COLUMN, [])
    batch: Batch = {}
    size = 0
    for name, column in columns.items():
        if isinstance(column, list):
            batch[name] = column
            continue
        size += column.nbytes
        tensor = torch.from_numpy(column)
        # A view: height × width × channels in memory is PyTorch's channels_last.
        hwc = name.endswith(HWC_SUFFIX)
        batch[name.removesuffix(HWC_SUFFIX)] = tensor.permute(0, 3, 1, 2) if hwc else tensor
    return batch, ids, keys, size


def as_one_batch(collate: CollateFn | None, columns: dict[str, Any], report: BlockReport) -> Batch:
    """A whole block as a batch on the CPU, as train workers receive batches.

    Args:
        collate: the recipe's, if it has one.
        columns: of at least one record.
        report: of the block.

    Raises:
        SchemaError: the recipe's `collate` failed.
    """
    if collate:
        return collated(collate, all_of([(columns, 0, report.rows)])[0], "one batch")
    return as_tensors(as_batch(columns, report.schemas[-1]))[0]
