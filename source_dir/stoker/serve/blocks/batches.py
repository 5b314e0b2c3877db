"""Train worker and script: fetching the items of a pass ahead, the memory of batches, and the batch being
assembled from rows of blocks.

An item is the batch of a rank's step, or a block of a loader; its owner knows how to ask for it and fetch it.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from stoker.chain.columns import Ragged, padded, refuse_bad_offsets
from stoker.errors import SchemaError
from stoker.protocol import TEXT, BlockSlice, Column, Schema

ASKED_AT_ONCE = 8
"""Maximum items per call to the service: a call costs about a millisecond of CPU."""
LOOK_S = 1.0
ALL = sys.maxsize
Given = TypeVar("Given")
Item = TypeVar("Item")
POOLED_FROM_BYTES = 64 * 2**10
"""Smaller arrays are not pooled unless they must be pinned."""
CLASSES_PER_DOUBLING = 8
"""Sizes are rounded up to one of these, which wastes at most 9 % and lets slightly shorter batches reuse a
buffer."""


class LateError(Exception):
    """Nothing came in time, or no thread is left to fetch it."""


class Prefetcher(Generic[Given, Item]):
    """Threads that ask for the items of a pass in order and fetch several at once.

    Args:
        ask: called with a number, a count and `fetched`: what the service gives of up to so many items from
            that number on, as far as they are ready; None after the last item. All items before `fetched` are
            here, so their blocks may go. One call at a time.
        fetch: turns what the service gave, and when (`time.perf_counter()`), into the item.
        limit: how many items to ask for ahead of the consumer; may change.
        loaded: how many of them to fetch ahead.
        wanted: how many items the consumer wants so far; see `want`.
    """

    def __init__(
        self,
        name: str,
        ask: Callable[[int, int, int], Sequence[Given] | None],
        fetch: Callable[[Given, float], Item],
        *,
        threads: int,
        limit: int,
        loaded: int = ALL,
        wanted: int = ALL,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        self.limit = limit
        self._ask_service, self._fetch, self._left = ask, fetch, left
        self._most_loaded, self._wanted = loaded, wanted
        self._changed = threading.Condition()
        self._given: deque[tuple[int, Given, float]] = deque()
        """Items that the service gave and that nobody fetches yet, and since when."""
        self._fetching: set[int] = set()
        self._loaded: dict[int, Any] = {}
        """Items, or why there are none."""
        self._next = self._asked = 0
        """The item that the consumer takes next, and the next one to ask for."""
        self._asking = False
        self._over = self._ended = False
        """Whether the consumer wants no more; whether the service has no more."""
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether a thread runs; none does in a fork of the process."""
        return any(thread.is_alive() for thread in self._threads)

    def want(self) -> None:
        with self._changed:
            self._wanted += 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until the next item can be taken, or raise LateError; False: this pass has ended."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._next not in self._loaded:
                if self._over:
                    return False
                left = deadline - time.monotonic()
                if left <= 0 or not self.alive:
                    raise LateError
                self._changed.wait(min(left, LOOK_S))
            return True

    def take(self, seconds: float) -> Item | None:
        """The next item, or raises what fetching it raised; None after the last, or if the pass ended."""
        with self._changed:
            if not self.wait(seconds):
                return None
            number, self._next = self._next, self._next + 1
            item = self._loaded.pop(number)
            self._changed.notify_all()
        if isinstance(item, BaseException):
            raise item
        taken: Item | None = item
        return taken

    def end(self, join_s: float = 0.0) -> None:
        with self._changed:
            self._over = True
            self._loaded.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + join_s
        for thread in self._threads if join_s else ():
            thread.join(max(deadline - time.monotonic(), 0))

    def _work(self) -> None:
        try:
            while (given := self._next_given()) is not None:
                number, answer, since = given
                try:
                    item: Any = self._fetch(answer, since)
                except BaseException as error:
                    item = error
                self._put(number, item)
                if isinstance(item, BaseException):
                    return
        finally:
            self._left()

    def _next_given(self) -> tuple[int, Given, float] | None:
        """An item to fetch; asks for more if no thread does. None if none is needed or left."""
        while True:
            with self._changed:
                while not (self._over or self._may_fetch() or self._may_ask() or self._is_last()):
                    self._changed.wait(LOOK_S)
                if self._over or self._is_last():
                    return None
                if self._may_fetch():
                    self._fetching.add(self._given[0][0])
                    return self._given.popleft()
                self._asking = True
                first, fetched = self._asked, min([self._asked, *self._fetching])
                # At least one: the limit may have fallen since it was looked at.
                most = max(1, min(ASKED_AT_ONCE, self._room(), self._wanted - first))
            self._ask(first, most, fetched)

    def _may_fetch(self) -> bool:
        return bool(self._given) and self._given[0][0] < self._next + self._most_loaded

    def _may_ask(self) -> bool:
        """Ask when all that was given is fetched or being fetched, and there is room enough for a call."""
        idle = not (self._asking or self._ended or self._given)
        has_room = self._room() >= min(ASKED_AT_ONCE, self.limit // 2)
        return idle and has_room and self._asked < self._wanted

    def _is_last(self) -> bool:
        return self._ended and not self._given

    def _room(self) -> int:
        return self.limit - (self._asked - self._next)

    def _ask(self, first: int, most: int, fetched: int) -> None:
        """Ask for more; holds no lock, so that the consumer can take loaded items meanwhile."""
        answers: Sequence[Given] | None = None
        failure: BaseException | None = None
        try:
            answers = self._ask_service(first, most, fetched)
        except BaseException as error:
            failure = error
        now = time.perf_counter()
        with self._changed:
            self._given += [(first + i, answer, now) for i, answer in enumerate(answers or ())]
            self._asked += len(answers or ())
            self._asking, self._ended = False, answers is None
            self._changed.notify_all()
        if self._ended:
            self._put(first, failure)

    def _put(self, number: int, item: Any) -> None:
        with self._changed:
            self._fetching.discard(number)
            if not self._over:
                self._loaded[number] = item
            self._changed.notify_all()


class BufferPool:
    """Allocates arrays and reclaims their memory when the last user releases it.

    Holding a batch, or a view of it, keeps its memory: nothing is overwritten. New memory costs a page fault
    per 4 KiB, and pinning costs more; in steady state a feed allocates none.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._free: defaultdict[int, deque[Any]] = defaultdict(deque)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
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

        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned).numpy()


def size_class(size: int) -> int:
    step = CLASSES_PER_DOUBLING
    return max(4096, math.ceil(2 ** (math.ceil(math.log2(size) * step) / step)))


class BatchBuilder:
    """Assembles a batch from several blocks in uninitialized memory, so `finish` counts what is written."""

    def __init__(self, buffers: BufferPool, rows: int, schema: Schema) -> None:
        self.rows, self.schema, self._buffers = rows, schema, buffers
        self._filled = dict.fromkeys(schema.columns, 0)
        self._ragged: dict[str, dict[int, Ragged]] = {
            n: {} for n in schema.pad if n in schema.columns
        }
        """Variable-length rows by position of the first one; padded when all have arrived."""
        self._columns: dict[str, Any] = {
            name: [""] * rows
            if column.dtype == TEXT
            else buffers.empty((rows, *column.shape), column.dtype)
            for name, column in schema.columns.items()
            if name not in self._ragged
        }

    def target(self, name: str, at: int, rows: int) -> Any:
        """Memory for rows from row `at` on; call `wrote` when they are in place."""
        return self._columns[name][at : at + rows]

    def wrote(self, name: str, rows: int) -> None:
        self._filled[name] += rows

    def ragged(self, name: str, at: int, offsets: Any, values: int) -> Any:
        """Memory for variable-length rows from row `at` on; call `wrote` when they are in place."""
        refuse_bad_offsets(offsets, values)
        column = self.schema.columns[name]
        target = self._buffers.empty((values, *column.shape[1:]), column.dtype)
        self._ragged[name][at] = Ragged(target, offsets)
        return target

    def text(self, name: str, values: list[str], at: int) -> None:
        other = next((value for value in values if not isinstance(value, str)), "")
        if other != "":
            raise SchemaError(f"column {name!r} holds {other!r}, which is not text")
        self._columns[name][at : at + len(values)] = values

    def take(self, part: BlockSlice, columns: dict[str, Any], at: int) -> int:
        """Copy a part's rows out of its block; returns the number of bytes."""
        rows, size = part.stop - part.start, 0
        for name, column in columns.items():
            values = column[part.start : part.stop]
            size += values.nbytes
            if isinstance(values, Ragged):
                self.ragged(name, at, values.offsets, len(values.values))[...] = values.values
            elif self.schema.columns[name] == Column(TEXT):
                self.text(name, list(values), at)
            else:
                self.target(name, at, rows)[...] = values
            self.wrote(name, rows)
        return size

    def finish(self) -> dict[str, Any]:
        """The batch: arrays, and lists of strings."""
        for name, rows in self._filled.items():
            if rows != self.rows:
                raise SchemaError(
                    f"column {name!r}: {rows} of the batch's {self.rows} rows were written"
                )
        for name, parts in self._ragged.items():
            in_order = [parts[at] for at in sorted(parts)]
            self._columns |= padded(name, in_order, self.schema.pad[name], self._buffers.empty)
        return self._columns


def refuse_other_block(part: BlockSlice, schema: Schema, found: Schema, rows: int) -> None:
    if difference := schema.difference(found):
        raise SchemaError(f"block {part.block} has other columns than its split: {difference}")
    if rows != part.of:
        raise SchemaError(
            f"block {part.block} has {rows} rows, but was reported with {part.of}: it was made"
            " again and differs, or is damaged"
        )


def as_batch(columns: dict[str, Any], schema: Schema) -> dict[str, Any]:
    rows = min(map(len, columns.values()), default=0)
    batch = BatchBuilder(BufferPool(pinned=False), rows, schema)
    batch.take(BlockSlice("", 0, rows, of=rows), columns, 0)
    return batch.finish()
