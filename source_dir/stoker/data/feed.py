"""Train worker: blocks → batches on the device, ahead of time, with input wait accounted."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stoker.data.chain import HWC_SUFFIX, ID_COLUMN, KEY_COLUMN
from stoker.data.ledger import ID_MODULUS, DataError
from stoker.data.streams import Portion
from stoker.recipe import Batch


@dataclass
class FeedTimes:
    """Train worker: where the input side's time went in one pass, in seconds."""

    wait_s: float = 0.0
    """The loop waited for a batch: input wait."""
    first_wait_s: float = 0.0
    """The part of it before the pass's first batch."""
    produce_s: float = 0.0
    """The feed's thread waited for blocks to be produced."""
    transfer_s: float = 0.0
    """It waited for blocks to arrive on this host."""
    collate_s: float = 0.0
    """It cut batches out of blocks."""


@dataclass
class Pass:
    """Train worker: one pass of one rank over one split. Iterate it; then read its figures."""

    coordinator: Any
    attempt: int
    split: str
    epoch: int
    rank: int
    device: Any
    prefetch: int
    stall_timeout_s: float
    first_step: int = 0
    keep_keys: bool = False
    times: FeedTimes = field(default_factory=FeedTimes)
    rows: int = 0
    padded: int = 0
    id_sum: int = 0
    keys: list[str] = field(default_factory=list)
    stop: str = ""
    """Why the run shall stop after the batch that was given last."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches of this rank: dicts of tensors on the device, images as CHW.

        Raises:
            DataError: the data side failed, or gave nothing for `stall_timeout_s`.
        """
        ready: queue.Queue[Any] = queue.Queue(maxsize=self.prefetch)
        over = threading.Event()
        threading.Thread(
            target=self._fill, args=(ready, over), name=f"feed-{self.split}", daemon=True
        ).start()
        try:
            first = True
            while True:
                started = time.perf_counter()
                item = self._take(ready)
                waited = time.perf_counter() - started
                self.times.wait_s += waited
                if first:
                    self.times.first_wait_s, first = waited, False
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                batch, ids, keys, padded, stop = item
                self.rows += len(ids)
                self.padded += padded
                own = ids[: len(ids) - padded]
                self.id_sum = (self.id_sum + int(own.astype(object).sum() if len(own) else 0)) % ID_MODULUS
                self.keys += keys
                self.stop = stop
                yield batch
                if stop:
                    return
        finally:
            over.set()

    def _take(self, ready: queue.Queue[Any]) -> Any:
        try:
            return ready.get(timeout=self.stall_timeout_s)
        except queue.Empty:
            raise DataError(
                f"no {self.split} batch came for {self.stall_timeout_s:.0f} s (data.stall_timeout_s):"
                " the CPU hosts are stuck or far too slow"
            ) from None

    def _fill(self, ready: queue.Queue[Any], over: threading.Event) -> None:
        """Thread: fetch, cut and queue batches until the pass ends."""
        try:
            cutter = BatchCutter(self.device, self.keep_keys)
            step = self.first_step
            while not over.is_set():
                item = self._fetch(cutter, step)
                step += 1
                while not over.is_set():
                    try:
                        ready.put(item, timeout=0.5)
                        break
                    except queue.Full:
                        continue
                if item is None:
                    return
        except BaseException as error:
            ready.put(error)

    def _fetch(self, cutter: BatchCutter, step: int) -> Any:
        import ray

        started = time.perf_counter()
        call = self.coordinator.next.remote(self.attempt, self.split, self.epoch, self.rank, step)
        try:
            answer: Portion | str | None = ray.get(call, timeout=self.stall_timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise DataError(
                f"step {step}: no {self.split} data for {self.stall_timeout_s:.0f} s (data.stall_timeout_s)"
            ) from None
        self.times.produce_s += time.perf_counter() - started
        if isinstance(answer, str):
            raise DataError(answer)
        if answer is None:
            return None
        started = time.perf_counter()
        tables = cutter.tables([reference for reference, _, _ in answer.blocks], self.stall_timeout_s)
        self.times.transfer_s += time.perf_counter() - started
        started = time.perf_counter()
        parts = [(t, a, b) for t, (_, a, b) in zip(tables, answer.blocks, strict=True)]
        batch, ids, keys = cutter.cut(parts)
        self.times.collate_s += time.perf_counter() - started
        return batch, ids, keys, answer.padded, answer.stop


class BatchCutter:
    """Train worker: rows of blocks in shared memory → tensors on the device, one copy each."""

    def __init__(self, device: Any, keep_keys: bool) -> None:
        self.device = device
        self.keep_keys = keep_keys
        self._columns: dict[Any, dict[str, Any]] = {}

    def tables(self, references: list[Any], timeout_s: float) -> list[dict[str, Any]]:
        """Columns of the blocks as NumPy views; blocks of the step before are kept at hand."""
        import ray
        from ray.data.block import BlockAccessor

        missing = [r for r in references if r not in self._columns]
        found = {r: self._columns[r] for r in references if r in self._columns}
        for reference, block in zip(missing, ray.get(missing, timeout=timeout_s), strict=True):
            accessor = BlockAccessor.for_block(block)
            found[reference] = accessor.to_numpy(list(block.column_names))
        self._columns = found
        return [found[r] for r in references]

    def cut(self, parts: list[tuple[dict[str, Any], int, int]]) -> tuple[Batch, Any, list[str]]:
        """Rows of blocks → (batch, ids, keys)."""
        import numpy as np

        if not parts:
            return {}, np.empty(0, dtype=np.int64), []
        names = parts[0][0].keys()
        ids = np.concatenate([t[ID_COLUMN][a:b] for t, a, b in parts])
        keys: list[str] = []
        batch: Batch = {}
        for name in names:
            if name == ID_COLUMN:
                continue
            views = [t[name][a:b] for t, a, b in parts]
            if name == KEY_COLUMN:
                keys = [str(k) for view in views for k in view]
            elif views[0].dtype == object:
                batch[name] = [value for view in views for value in view]
            else:
                batch[name.removesuffix(HWC_SUFFIX)] = self._tensor(views, name.endswith(HWC_SUFFIX))
        return batch, ids, keys if self.keep_keys else []

    def _tensor(self, views: list[Any], hwc: bool) -> Any:
        import numpy as np
        import torch

        rows = sum(len(v) for v in views)
        dtype = torch.from_numpy(np.empty(0, views[0].dtype)).dtype
        on_gpu = self.device.type == "cuda"
        out = torch.empty((rows, *views[0].shape[1:]), dtype=dtype, pin_memory=on_gpu)
        target = out.numpy()
        at = 0
        for view in views:
            target[at : at + len(view)] = view
            at += len(view)
        if on_gpu:
            out = out.to(self.device, non_blocking=True)
        # A view: height × width × channels in memory is what PyTorch calls channels_last.
        return out.permute(0, 3, 1, 2) if hwc else out
