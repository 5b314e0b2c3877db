"""Train worker: turns blocks into batches on the device, ahead of time, and times every step."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import torch

from stoker.chain.collating import CollateFn, all_of, collated
from stoker.config.schema import DataConfig
from stoker.errors import DataError, SchemaError
from stoker.protocol import HWC_SUFFIX, ID_COLUMN, KEY_COLUMN, BlockReport, StepAssignment
from stoker.recipe import Batch
from stoker.serve.accounting import ID_MODULUS
from stoker.serve.blocks.batches import LateError, Prefetcher, as_batch
from stoker.serve.blocks.client import Fetched, Transport
from stoker.serve.blocks.collator import Collator, HostBatch
from stoker.train.device import DeviceClock, DeviceCopies, HostClock, Stamps, StepTimes
from stoker.train.stop_gate import StopGate

FETCHERS = 2
"""Number of fetching threads: that many steps are in flight, over as many connections to each host."""
LEAST_BATCHES, MOST_BATCHES = 2, 512


@dataclass(kw_only=True)
class Feed:
    """One rank's end of a pass: iterate it for batches (dicts of tensors on the device, images as CHW), then
    read its figures."""

    coordinator: Any
    attempt: int
    device: Any
    transport: Transport
    data: DataConfig
    split: str = "train"
    epoch: int = 0
    rank: int = 0
    before: int = 0
    """Optimiser steps of the run before this pass."""
    join_s: float = 0.0
    """How long to wait for its threads when the pass ends. A process that disconnects from Ray after it needs
    that: Ray ends it if a thread then drops a reference to a block."""
    keep_keys: bool = False
    collator: Collator | None = None
    times: StepTimes = field(default_factory=StepTimes)
    rows: int = 0
    padded: int = 0
    id_sum: int = 0
    keys: list[str] = field(default_factory=list)
    fetched: Counter[str] = field(default_factory=Counter)
    """The rows and bytes of batches, also of those that are not taken."""
    gate: StopGate | None = None
    accumulate: int = 1
    """Batches in a step; training does not stop within one, as accumulated gradients are not saved."""
    batches: int = 0
    """Batches returned so far."""
    stop: str = ""
    """Why the run stops after the last batch returned."""
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of `times` and `fetched`

    def __iter__(self) -> Iterator[Batch]:
        fetchers = self.collator.at_once if self.collator else FETCHERS
        prefetcher = Prefetcher(
            f"feed-{self.split}",
            self._ask,
            self._fetch,
            threads=fetchers,
            limit=LEAST_BATCHES + fetchers,
        )
        take = partial(self._take, prefetcher)
        on_gpu = self.device.type == "cuda"
        device_clock = DeviceClock(self.times, self.device) if on_gpu else None
        clock = device_clock or HostClock(self.times)
        copies = DeviceCopies(self.device, take) if on_gpu else None
        try:
            while True:
                asked = time.perf_counter()
                item = copies.take() if copies else take()
                if item is None or not self._may_begin():
                    return
                stamps = Stamps(item.produced, item.arrived, item.collated)
                clock.waited(asked, time.perf_counter(), stamps)
                if copies and device_clock:
                    copies.await_copy(item)
                    device_clock.copied()
                self._count(item)
                yield item.columns
                clock.finished()
                self._resize(prefetcher, item.nbytes)
        finally:
            prefetcher.end(self.join_s)
            self.transport.finish_pass()
            if copies:
                copies.end()
            clock.close()
            if self.collator:
                self.coordinator.collated.remote(
                    self.split, self.times.collate_cpu_s, **self.fetched
                )

    def _take(self, prefetcher: Prefetcher[StepAssignment, HostBatch]) -> HostBatch | None:
        try:
            return prefetcher.take(self.data.stall_timeout_s)
        except LateError:
            raise self._late("batch") from None

    def _late(self, what: str) -> DataError:
        return DataError(
            f"no {self.split} {what} for {self.data.stall_timeout_s:.0f} s (data.stall_timeout_s): the CPU"
            " hosts are stuck or too slow",
            key="data.stall_timeout_s",
        )

    def _resize(self, prefetcher: Prefetcher[Any, Any], batch_bytes: int) -> None:
        if self.times.compute_s <= 0:
            return
        wanted = ceil(self.data.prefetch_s / self.times.compute_s)
        if self.collator:
            # These are in the making on CPU hosts.
            wanted += self.collator.at_once
        room = self.data.prefetch_mb * 2**20 // max(batch_bytes, 1)
        prefetcher.limit = max(LEAST_BATCHES, min(wanted, room, MOST_BATCHES))

    def _ask(self, step: int, most: int, fetched: int) -> list[StepAssignment] | None:
        import ray

        which = (self.attempt, self.split, self.epoch, self.rank)
        call = self.coordinator.ahead.remote(*which, step, most, fetched, self.before)
        try:
            return ray.get(call, timeout=self.data.stall_timeout_s) or None
        except ray.exceptions.GetTimeoutError:
            raise self._late(f"data of step {step}") from None

    def _fetch(self, portion: StepAssignment, produced: float) -> HostBatch:
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            made = self._receive(portion, produced)
        except SchemaError as error:
            raise DataError(f"{self.split} epoch {self.epoch + 1}: {error}") from None
        now = time.perf_counter()
        with self._lock:
            self.times.fetch_s += now - began
            self.times.fetch_cpu_s += time.thread_time() - cpu
            self.times.collate_cpu_s += made.collate_cpu_s
            self.fetched.update(rows=len(made.ids), nbytes=made.nbytes)
        made.collated, made.padded = now, portion.padded
        return made

    def _receive(self, portion: StepAssignment, produced: float) -> HostBatch:
        fetched = Fetched({}, time.perf_counter())
        if portion.blocks:
            if portion.schema is None:
                raise DataError(f"rows of the {self.split} split arrived without a schema")
            if self.collator:
                return self.collator.fetch(portion.blocks, portion.schema)
            fetched = self.transport.fetch(portion.blocks, portion.schema)
        return HostBatch(*as_tensors(fetched.columns), produced, fetched.arrived)

    def _count(self, item: HostBatch) -> None:
        own = item.ids[: len(item.ids) - item.padded]
        self.rows += len(item.ids)
        self.padded += item.padded
        # The modulus divides 2**64, so 64-bit wrap-around does not change the sum.
        self.id_sum = (self.id_sum + int(own.view(np.uint64).sum())) % ID_MODULUS
        if self.keep_keys:
            self.keys += item.keys
        self.batches += 1

    def _may_begin(self) -> bool:
        step = (self.epoch, self.split == "val", self.batches)
        if self.gate is None or self.batches % self.accumulate or self.gate.enter(step):
            return True
        self.stop = self.gate.reason
        return False


def as_tensors(columns: dict[str, Any]) -> tuple[Batch, Any, list[str], int]:
    """Columns → (batch of tensors that share their memory, ids, keys, bytes)."""
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
    if collate:
        return collated(collate, all_of([(columns, 0, report.rows)])[0], "one batch")
    return as_tensors(as_batch(columns, report.schemas[-1]))[0]
