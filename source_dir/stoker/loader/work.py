"""Chain worker: the work of a `stoker.DataLoader`: fetch records, collate them, pack the batch.

Stands in for a recipe's source and chain: a shard holds the indices of some batches; its only record is these
batches, packed.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stoker.data.messages import BadRecord, BlockReport, Record, Shard
from stoker.data.preprocessing.chain import use_one_thread
from stoker.data.sources.seeding import seed_globals
from stoker.data.transport.packing import PAGES, pack, unpack
from stoker.data.transport.room import Room

BATCHES = "__batches"
"""How many batches the pages hold."""


class Failed(NamedTuple):
    """Chain worker → script: why a batch could not be made."""

    kind: type[BaseException]
    where: str
    """Index or batch, and host."""
    words: str
    """The traceback."""


class Made(NamedTuple):
    """Chain worker → script: a batch."""

    batch: Any
    bad: tuple[tuple[Any, str], ...] = ()
    """Index and reason of each skipped record."""
    empty: bool = False
    """Whether all records were skipped."""


class Order(NamedTuple):
    """Script → chain worker: batches of a map-style dataset, or one worker's part of an iterable dataset."""

    base_seed: int
    worker: int = 0
    """Iterable dataset: `get_worker_info().id`."""
    batches: tuple[tuple[int, Any], ...] = ()
    """Number and indices of each batch."""


@dataclass
class LoaderWork:
    """Chain worker: dataset and settings of a loader; each process has a copy per pass."""

    dataset: Any
    collate: Callable[[Any], Any]
    iterable: bool
    auto_collation: bool
    batch_size: int | None
    drop_last: bool
    workers: int
    """`get_worker_info().num_workers`."""
    worker_init_fn: Callable[[int], None] | None
    quarantines: bool
    _begun: set[int] = field(default_factory=set)

    def run(self, order: Order) -> Iterator[list[Made | Failed]]:
        """Yield groups of batches: one group for a map-style dataset, otherwise single batches."""
        if self.iterable:
            why = self._begun_as(order.base_seed, order.worker)
            yield from ([made] for made in ((why,) if why else self._stream(order)))
            return
        group = []
        for number, indices in order.batches:
            why = self._begun_as(order.base_seed, number % self.workers)
            group.append(why or self._one(order.base_seed, number, indices))
        yield group

    def _begun_as(self, base_seed: int, worker: int) -> Failed | None:
        try:
            self._begin(base_seed, worker)
        except BaseException as error:
            return failed(error, f"worker_init_fn({worker})")
        return None

    def _begin(self, base_seed: int, worker: int) -> None:
        """Set up worker info and run `worker_init_fn`, as torch does in a worker process."""
        from torch.utils.data._utils import worker as torchs

        torchs._worker_info = torchs.WorkerInfo(
            id=worker, num_workers=self.workers, seed=base_seed + worker, dataset=self.dataset
        )
        if self.worker_init_fn is not None and (self.iterable or not self._begun):
            seed_globals(f"{base_seed}/worker/{worker}")
            self.worker_init_fn(worker)
        self._begun.add(worker)

    def _one(self, base_seed: int, number: int, indices: Any) -> Made | Failed:
        bad: list[tuple[Any, str]] = []
        try:
            data = self._records(base_seed, number, indices, bad)
            if bad and not data:
                return Made(None, tuple(bad), empty=True)
            seed_globals(f"{base_seed}/{number}/collate")
            return Made(self.collate(data), tuple(bad))
        except _AtIndexError as at:
            return failed(at.__cause__ or at, f"index {at.index!r} (batch {number})")
        except BaseException as error:
            return failed(error, f"collate_fn of batch {number}, indices {short(indices)}")

    def _records(self, base_seed: int, number: int, indices: Any, bad: list[tuple[Any, str]]) -> Any:
        if not self.auto_collation:
            return self._record(f"{base_seed}/{number}/0", indices)
        together = getattr(self.dataset, "__getitems__", None)
        if together and not self.quarantines:
            seed_globals(f"{base_seed}/{number}")
            try:
                return together(indices)
            except BaseException as error:
                raise _AtIndexError(short(indices)) from error
        data = []
        for nth, index in enumerate(indices):
            try:
                data.append(self._record(f"{base_seed}/{number}/{nth}", index))
            except _AtIndexError as at:
                if not self.quarantines or not isinstance(at.__cause__, Exception):
                    raise
                bad.append((index, _line(at.__cause__)))
        return data

    def _record(self, seed: str, index: Any) -> Any:
        seed_globals(seed)
        try:
            return self.dataset[index]
        except BaseException as error:  # also `sys.exit`, which would end the process and all its passes
            raise _AtIndexError(index) from error

    def _stream(self, order: Order) -> Iterator[Made | Failed]:
        """One worker's part of an iterable dataset, read with torch's own fetcher."""
        from torch.utils.data._utils.fetch import _IterableDatasetFetcher

        seed_globals(f"{order.base_seed}/{order.worker}")
        try:
            fetcher = _IterableDatasetFetcher(self.dataset, self.auto_collation, self.collate, self.drop_last)
        except BaseException as error:
            yield failed(error, f"iter(dataset) of worker {order.worker}")
            return
        size = range(self.batch_size or 1)
        number = 0
        while True:
            seed_globals(f"{order.base_seed}/{order.worker}/{number}")
            try:
                made: Made | Failed = Made(fetcher.fetch(size))  # type: ignore[no-untyped-call]
            except StopIteration:
                return
            except BaseException as error:
                made = failed(error, f"batch {number} of worker {order.worker}")
            yield made  # continues after a failure, as torch does; a generator that raised is exhausted
            number += 1


class _AtIndexError(Exception):
    """The index that failed; its exception is the cause."""

    def __init__(self, index: Any) -> None:
        super().__init__(repr(index))
        self.index = index


def failed(error: BaseException, what: str) -> Failed:
    """Chain worker: convert an exception so that it can be sent to the script."""
    import socket

    kind = type(error)
    words = "".join(traceback.format_exception(error))
    return Failed(kind, f"at {what}, on host {socket.gethostname()}", words)


def _line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


def short(indices: Any) -> str:
    """The first few indices, for messages."""
    try:
        shown = list(indices)
    except TypeError:
        return repr(indices)
    more = f", … ({len(shown)})" if len(shown) > 4 else ""
    return ", ".join(map(repr, shown[:4])) + more


class LoaderSource:
    """Chain worker: stands in for a recipe's source.

    Args:
        pages: packed: the location of the script's modules, and the LoaderWork.
    """

    random = False

    def __init__(self, pages: Any) -> None:
        self.pages = pages
        self._folder = ""
        self._work: LoaderWork | None = None
        self._room: Room | None = None

    def read(self, shard: Shard, order: Any) -> Iterator[Record]:
        """Yield each group of batches as a record; a batch that cannot be packed becomes a Failed."""
        self._folder = self._folder or reach(self.pages)
        if Path(self._folder).is_dir():
            os.chdir(self._folder)  # every time: loaders of other scripts share this process
        if self._work is None or self._work.iterable:
            use_one_thread()
            self._work = opened(self.pages)
        self._room = self._room or Room()
        groups = self._work.run(shard.items[0])
        for number in itertools.count():
            started = time.perf_counter()
            with self._room.group():
                group = next(groups, None)
                if group is None:
                    return
                pages = packed(group, time.perf_counter() - started, self._room)
            yield {"key": f"{shard.called}/{number}", PAGES: pages, BATCHES: len(group)}


def reach(pages: Any) -> str:
    """Chain worker: make the script's modules importable; return its working directory."""
    import numpy as np

    folder, path = unpack(np.array(pages[0]))[0]
    sys.path += [each for each in path if each not in sys.path and Path(each).is_dir()]
    return str(folder)


def opened(pages: Any) -> LoaderWork:
    """Chain worker: unpack a loader's work."""
    import numpy as np

    work: LoaderWork = unpack(np.array(pages[1]))[0]
    return work


def packed(group: Sequence[Made | Failed], seconds: float, room: Room | None = None) -> Any:
    """Chain worker: pack the seconds that the batches took, and the batches.

    A batch that cannot be pickled becomes a Failed.
    """
    try:
        return pack([seconds, *group], room)
    except Exception:
        return pack([seconds, *map(_packable, group)], room)


def _packable(made: Made | Failed) -> Made | Failed:
    try:
        pack([made])
    except Exception as error:
        if isinstance(made, Failed):
            return made._replace(kind=RuntimeError)
        return failed(error, "a batch that cannot be sent")
    return made


class LoaderChain:
    """Chain worker: stands in for a recipe's chain: packed batches already form a block."""

    def run(
        self, block: Iterable[Record | BadRecord], epoch: int, keep: Any
    ) -> tuple[dict[str, Any], BlockReport]:
        """One group of batches → a block."""
        report, columns = BlockReport(), dict[str, Any]()
        for each in block:
            if isinstance(each, BadRecord):
                report.bad.append(each)
            else:
                columns, report.records = {PAGES: each[PAGES]}, each[BATCHES]
                report.rows, report.bytes_out = len(each[PAGES]), each[PAGES].nbytes
        return columns, report
