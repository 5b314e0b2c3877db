"""Chain worker: the work of a `stoker.DataLoader`: fetch records, collate them, pack the batch.

A shard holds the indices of some batches; its only record is these batches, packed. A stream (one worker's
part of an iterable dataset) that is opened again, after its process was lost or from a saved state, skips the
batches that the script has. The digest of each covers all batches of its stream so far: one comparison shows
whether these were the same. An endless stream has no such place: it begins anew.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stoker.chain.chain import use_one_thread
from stoker.loader.digests import batch_digest
from stoker.loader.ranks import Rank, asked, seen_as
from stoker.loader.script_state import ScriptState, follow_imports
from stoker.loader.worker_output import UNSENT, Said, heard, reload
from stoker.protocol import BadRecord, BlockReport, Record, Shard
from stoker.read.generators import HeldGenerators
from stoker.read.sources import restore_generators, seed_globals, states
from stoker.serve.blocks.folder import BlockFolder
from stoker.serve.blocks.packing import (
    PAGES,
    Parts,
    Room,
    collates_anew,
    pack,
    pages_of,
    parts_of,
    unpack,
)


class Failed(NamedTuple):
    kind: type[BaseException]
    where: str
    words: str
    chain: tuple[int, int] = (0, 0)
    """Digests of its stream's batches without this one, and with it."""
    error: Any = None
    """The exception itself, packed, if a copy of it is the same."""


class MadeBatch(NamedTuple):
    batch: Any
    bad: tuple[tuple[Any, str], ...] = ()
    empty: bool = False
    ended: bool = False
    chain: tuple[int, int] = (0, 0)


class LoadRequest(NamedTuple):
    """Script → chain worker: batches of a map-style dataset, or one worker's part of an iterable dataset."""

    base_seed: int
    worker: int = 0
    """Iterable dataset: `get_worker_info().id`."""
    batches: tuple[tuple[int, Any], ...] = ()
    passes: int = 0
    """Earlier passes with the same `base_seed`, which `persistent_workers` keeps, as torch does."""
    served: int = 0
    """Passes that the copies of an iterable dataset have served, with `persistent_workers`."""
    shared_seed: int = 0
    """Seeds the shuffling of DataPipes alike in all workers and ranks."""
    where: Any = None
    """Packed: where and how the script runs, if not as when the copies of a dataset were made."""
    ranks: tuple[int, int] = (1, 0)
    """World size and rank, which `sharding_filter` divides a DataPipe by."""
    digests: tuple[bytes, ...] = ()
    """Of each batch: of all that it depends on."""
    endless: bool = False
    """A stream that is opened again begins anew, with other draws, in place of being repeated."""
    first: int = 0
    """Number of its first batch then."""
    rank: Rank = Rank()

    @property
    def seed(self) -> str:
        return f"{self.base_seed}.{self.passes}" if self.passes else f"{self.base_seed}"


BATCHES, ENDED, OWN = "__batches", "__ended", "__own"


@dataclass
class LoaderWork:
    """Dataset and settings of a loader; each process has a copy per pass."""

    dataset: Any
    collate: Callable[[Any], Any]
    iterable: bool
    auto_collation: bool
    batch_size: int | None
    drop_last: bool
    workers: int
    """`get_worker_info().num_workers`; 0: there is no worker info."""
    worker_init_fn: Callable[[int], None] | None
    quarantines: bool
    keeps: bool = False
    """Whether copies of an iterable dataset serve all passes (`persistent_workers`)."""
    _begun: set[int] = field(default_factory=set)
    _generators: Any = None
    """Their states after `worker_init_fn`, with which the first pass of a stream begins."""
    _held: HeldGenerators | None = None
    close_others: Callable[[], bool] = bool
    """Drops the datasets of other loaders from this process, as one may have open what another opens, too: LMDB
    refuses that. Whether there were any."""
    tell: Callable[[str], Any] | None = None
    """Set where a process died: called before each item."""

    @property
    def held(self) -> HeldGenerators:
        """The generators of dataset and `collate`; those of an iterable dataset draw as in torch's workers."""
        if self._held is None:
            dataset = self.dataset
            self._held = (
                HeldGenerators(self.collate, apart=dataset)
                if self.iterable
                else HeldGenerators(dataset, self.collate)
            )
            self._held.find(sent=True)
        return self._held

    def _seed(self, text: str) -> None:
        seed_globals(text)
        self.held.seed(text)

    def run(self, order: LoadRequest, room: Room) -> Iterator[tuple[list[Parts], bool]]:
        """Yield groups of batches: one group for a map-style dataset, otherwise single batches.

        With each, whether it is a stream's end.
        """
        if self.iterable:
            why, before = self._begun_as(order, order.worker, order.worker), 0
            # Repeated, because a stream that is opened again skips batches.
            for made in itertools.repeat(why) if why else self._stream(order):
                after = digest_of(made, before)
                ended = isinstance(made, MadeBatch) and made.ended
                yield [parts_of_batch(made._replace(chain=(before, after)))], ended
                before = after
            return
        # With the indices: ranks may have one base seed.
        each = (
            self._begun_as(order, number % max(self.workers, 1), number)
            or self._tried(f"{order.seed}/{digest_of(MadeBatch(indices), 0)}", number, indices)
            for number, indices in order.batches
        )
        group: list[Parts] = []
        new = collates_anew(self.collate)
        for parts in map(
            parts_of_batch, [*each] if new else each
        ):  # packing them at last is faster
            group.append(parts)
            if not new and len(group) < len(order.batches):
                room.hold(parts)
        yield group, False

    def _begun_as(self, order: LoadRequest, worker: int, distinct: int) -> Failed | None:
        try:
            self._begin(order, worker, distinct)
        except BaseException as error:
            return failed(error, f"worker_init_fn({worker})")
        return None

    def _begin(self, order: LoadRequest, worker: int, distinct: int) -> None:
        """Set up worker info and run `worker_init_fn`, as torch does in a worker process.

        Several processes share the batches of a worker of a map-style dataset, so its seed is that of the
        batch: otherwise their generators would draw alike.
        """
        import torch
        from torch.utils.data import IterDataPipe, MapDataPipe, graph_settings
        from torch.utils.data._utils import worker as torchs

        if isinstance(self.dataset, IterDataPipe):
            seeds = torch.Generator().manual_seed(order.shared_seed)
            self.dataset = graph_settings.apply_random_seed(self.dataset, seeds)
        torchs._worker_info = None
        if self.workers:
            torchs._worker_info = torchs.WorkerInfo(
                id=worker,
                num_workers=self.workers,
                seed=order.base_seed + distinct + self.workers * order.first,
                dataset=self.dataset,
            )
        if not self._begun:
            if isinstance(self.dataset, IterDataPipe | MapDataPipe):
                world, rank = order.ranks
                graph_settings.apply_sharding(
                    self.dataset, max(self.workers, 1) * world, worker * world + rank
                )
            if self.workers and (self.iterable or self.worker_init_fn is not None):
                random.seed(order.base_seed + distinct)
                torch.manual_seed(order.base_seed + distinct)
                np.random.seed(torchs._generate_state(order.base_seed, distinct))  # type: ignore[no-untyped-call]
                if self.worker_init_fn is not None:
                    held = self.held  # found before others are made
                    self.worker_init_fn(worker)
                    held.find()
                self._generators = states()
        self._begun.add(worker)
        if self.iterable and not self.workers:
            seed_globals(f"{order.seed}/{worker}")
        elif self.iterable and order.passes:
            # From what worker_init_fn has left: streams that it made draw alike still do.
            restore_generators(self._generators)
            random.seed(random.getrandbits(64) + order.passes)
            np.random.seed(np.random.randint(2**31) + order.passes)
            torch.manual_seed(int(torch.randint(2**62, ())) + order.passes)
        if order.first:
            self.dataset.first = order.first
            seed_globals(f"{order.seed}/{worker}/{order.first}")

    def _tried(self, seed: str, number: int, indices: Any) -> MadeBatch | Failed:
        made = self._one(seed, number, indices)
        bad = isinstance(made, Failed) or made.bad
        return self._one(seed, number, indices) if bad and self.close_others() else made

    def _one(self, seed: str, number: int, indices: Any) -> MadeBatch | Failed:
        bad: list[tuple[Any, str]] = []
        try:
            data = self._records(seed, number, indices, bad)
            if bad and not data:
                return MadeBatch(None, tuple(bad), empty=True)
            self._seed(f"{seed}/{number}/collate")
            made = MadeBatch(self.collate(data), tuple(bad))
            return self._one(seed, number, indices) if self.held.created() else made
        except _AtIndexError as at:
            return failed(at.__cause__ or at, f"index {at.index!r} (batch {number})")
        except BaseException as error:
            return failed(error, f"collate_fn of batch {number}, indices {short(indices)}")

    def _records(self, seed: str, number: int, indices: Any, bad: list[tuple[Any, str]]) -> Any:
        if not self.auto_collation:
            found = self._good([indices], f"{seed}/{number}", bad)
            return found[0] if found else found
        together = getattr(self.dataset, "__getitems__", None)
        if together and not self.quarantines:
            self._seed(f"{seed}/{number}")
            if self.tell is not None:
                self.tell(f"loading indices {short(indices)}")
            try:
                return together(indices)
            except BaseException as error:
                raise _AtIndexError(short(indices)) from error
        return self._good(indices, f"{seed}/{number}", bad)

    def _good(self, indices: Any, seed: str, bad: list[tuple[Any, str]]) -> list[Any]:
        data = []
        for nth, index in enumerate(indices):
            self._seed(f"{seed}/{nth}")
            if self.tell is not None:
                self.tell(f"loading index {index!r}")
            try:
                data.append(self.dataset[index])
            except (
                BaseException
            ) as error:  # also `sys.exit`, which would end the process and all its passes
                if not self.quarantines or not isinstance(error, Exception):
                    raise _AtIndexError(index) from error
                bad.append((index, f"{type(error).__name__}: {error}"))
        return data

    def _stream(self, order: LoadRequest) -> Iterator[MadeBatch | Failed]:
        from torch.utils.data._utils import worker as torchs
        from torch.utils.data._utils.fetch import _IterableDatasetFetcher

        info, fetcher, number, generators = torchs._worker_info, None, 0, states()

        def collate(records: Any) -> Any:
            self.held.seed(f"{order.seed}/{order.worker}/{number}/collate")
            spare, before = self.held.spare(records), states()
            made = self.collate(records)
            if self.held.created():
                restore_generators(before)
                made = self.collate(spare)
            return made

        while True:
            torchs._worker_info = info  # every time: streams and passes take turns in this process
            restore_generators(generators)
            try:
                if fetcher is None:
                    fetcher = _IterableDatasetFetcher(
                        self.dataset, self.auto_collation, collate, self.drop_last
                    )
                    continue
                made: MadeBatch | Failed = MadeBatch(fetcher.fetch(range(self.batch_size or 1)))  # type: ignore[no-untyped-call]
            except BaseException as error:
                if fetcher is None:
                    why = failed(error, f"iter(dataset) of worker {order.worker}")
                    yield from itertools.repeat(why)
                if isinstance(error, StopIteration):
                    yield MadeBatch(None, ended=True)
                    return
                made = failed(error, f"batch {number} of worker {order.worker}")
            finally:
                generators = states()
            yield made  # continues after a failure, as torch does; a generator that raised is exhausted
            number += 1


def digest_of(made: MadeBatch | Failed, before: int) -> int:
    if isinstance(made, Failed):
        return batch_digest(made.kind.__qualname__, before)
    try:
        return batch_digest(made.batch, before)
    except Exception:  # it refers to itself
        return batch_digest(type(made.batch).__qualname__, before)


def copy_for(
    order: LoadRequest, pages: Any, copies: dict[int, tuple[int, LoaderWork]], began: bool = False
) -> LoaderWork:
    """The copy of an iterable dataset for a stream.

    Args:
        order: the stream.
        pages: the packed LoaderWork.
        copies: with `persistent_workers`, by worker: the passes that a copy has served, and the copy.
        began: whether an earlier pass has begun with this stream; it may have been given up before.
    """
    served, work = copies.pop(order.worker, (0, None))
    if not order.served or (work is None and not began):
        served, work = 0, opened(pages)
    if work is None or served > order.served:
        raise RuntimeError(
            f"the copy of the dataset that served worker {order.worker} in earlier passes was lost with its"
            " process; start the script again from its last state, or use persistent_workers=False, which"
            " makes new copies in each pass"
        )
    for _ in range(
        order.served - served
    ):  # passes that were given up before this stream was opened
        next(iter(work.dataset), None)
    if work.keeps:
        copies[order.worker] = (order.served + 1, work)
    return work


class _AtIndexError(Exception):
    def __init__(self, index: Any) -> None:
        super().__init__(repr(index))
        self.index = index


def failed(error: BaseException, what: str) -> Failed:
    kind = type(error)
    words = "".join(traceback.format_exception(error))
    where = f"at {what}, on host {socket.gethostname()}"
    return Failed(kind, where, words, error=_alike(error))


def _alike(error: BaseException) -> Any:
    """An exception, packed; None if a copy of it would be another, or none."""
    try:
        pages = pack([error])
        copy = unpack(pages.copy())[0]
        names = {(type(each).__module__, type(each).__qualname__) for each in (error, copy)}
        return (
            pages if len(names) == 1 and copy.args == error.args else None
        )  # a script's class is sent, too
    except Exception:
        return None


def short(indices: Any) -> str:
    try:
        shown = list(indices)
    except TypeError:
        return repr(indices)
    more = f", … ({len(shown)})" if len(shown) > 4 else ""
    return ", ".join(map(repr, shown[:4])) + more


SHARED_FROM_BYTES = 2**20
NOT_SENT = (
    "your script has set {}, which cannot be sent to other processes: they have what importing the module"
    " gives; pass it through the dataset, or create it in __getitem__"
)


class SharedPages(NamedTuple):
    folder: BlockFolder
    name: str
    pages: Any

    def copy(self) -> Any:
        try:
            content = self.folder.shared(self.name, self.pages)
        except OSError:  # there is no room
            return self.pages.copy()
        return np.frombuffer(content, np.uint8).reshape(self.pages.shape)


_open: weakref.WeakSet[LoaderSource] = weakref.WeakSet()
"""Those with a copy of a map-style dataset in this process."""


def _close_others(own: weakref.ref[LoaderSource]) -> bool:
    others = [other for other in _open if other is not own() and other._work is not None]
    for other in others:
        other._work = None
    gc.collect()
    return bool(others)


class LoaderSource:
    """Reads groups of batches. A shard of an iterable dataset (`stays`) is continued, not read again."""

    random = False

    def __init__(self, pages: Any, stays: bool = False, name: str = "") -> None:
        self.pages, self.stays, self.name = pages, stays, name
        self._folder = ""
        self._script = ScriptState()
        self._work: LoaderWork | None = None
        self._copies: dict[int, tuple[int, LoaderWork]] = {}
        self._room: Room | None = None
        self._own = False
        """Whether anything so far may depend on the rank."""
        self.tell: Callable[[str], Any] | None = None

    def apart(self) -> LoaderSource:
        """For blocks that are made again: it opens copies of its own, and leaves these to their streams."""
        return LoaderSource(self.pages, self.stays, self.name)

    def begin(self, folder: BlockFolder, where: Any) -> None:
        """Open a pass; let the processes of this host have the dataset's arrays and tensors once."""
        self.pages = self.pages[0] if where is None else where, self.pages[1]
        work = self.pages[1]
        if self.name and work.nbytes >= SHARED_FROM_BYTES:
            self.pages = where, SharedPages(folder, self.name, work)

    def begun_at(self, shard: Shard, block: int) -> tuple[Shard, int]:
        """A stream of which some blocks are made, as it is read now; its first block that `read` yields."""
        request = shard.items[0]
        if not request.endless:
            return shard, 0
        return replace(shard, items=(request._replace(first=block),)), block

    def read(self, shard: Shard, order: Any) -> Iterator[Record]:
        """Yield each group of batches as a record; a batch that cannot be packed becomes a Failed."""
        if not self._folder:
            self._folder, self._script = import_script(self.pages[0])
        self._enter()
        if self._room is None:
            use_one_thread()
            self._room = Room()
        said: Said = []
        if (where := shard.items[0].where) is not None:
            self._folder, self._script = import_script(where)
        request = shard.items[0]
        with self._script_works(request.rank, said):
            groups = self._groups(request, bool(shard.home), self._room)
        for number in itertools.count():
            self._enter()
            started = time.perf_counter()
            with self._room.group():
                with self._script_works(request.rank, said):
                    group, ended = next(groups, (None, True))
                said += [(UNSENT, NOT_SENT.format(what)) for what in self._script.unsent]
                self._script.unsent.clear()
                if group is None:
                    return
                pages = packed(group, time.perf_counter() - started, self._room, said)
                said.clear()
            yield {
                "key": f"{shard.called}/{number}",
                PAGES: pages,
                BATCHES: len(group),
                ENDED: ended,
                OWN: self._own,
            }

    @contextlib.contextmanager
    def _script_works(self, rank: Rank, said: Said) -> Iterator[None]:
        with heard(said), self._script.active(), seen_as(rank):
            yield
        self._own |= asked()

    def _enter(self) -> None:
        if Path(self._folder).is_dir():
            os.chdir(self._folder)  # every time: loaders of other scripts share this process

    def _groups(
        self, order: LoadRequest, began: bool, room: Room
    ) -> Iterator[tuple[list[Parts], bool]]:
        if not self.stays:
            if self._work is None:
                self._work = opened(self.pages[1])
                self._work.close_others = partial(_close_others, weakref.ref(self))
                _open.add(self)
            self._work.tell, self.tell = self.tell, None
            return self._work.run(order, room)
        try:
            return copy_for(order, self.pages[1], self._copies, began).run(order, room)
        except BaseException as error:
            return itertools.repeat(
                ([parts_of_batch(failed(error, f"worker {order.worker}"))], False)
            )


def import_script(where: Any) -> tuple[str, ScriptState]:
    folder, path, again, script = unpack(where.copy())[0]
    sys.path += [each for each in path if each not in sys.path and Path(each).is_dir()]
    reload(again)
    follow_imports()
    return str(folder), script


def opened(pages: Any) -> LoaderWork:
    work: LoaderWork = unpack(pages.copy())[0]
    return work


def packed(
    group: Sequence[Parts], seconds: float, room: Room | None = None, said: Said | None = None
) -> Any:
    """With the seconds they took, and what was printed."""
    return pages_of([parts_of((seconds, said)), *group], room)


def parts_of_batch(made: MadeBatch | Failed) -> Parts:
    """Pickled; a batch that cannot be becomes a Failed."""
    try:
        return parts_of(made)
    except Exception as error:
        if isinstance(made, Failed):
            return parts_of(made._replace(kind=RuntimeError))
        return parts_of_batch(
            failed(error, "a batch that cannot be sent")._replace(chain=made.chain)
        )


class LoaderChain:
    """Stands in for a recipe's chain: packed batches already form a block."""

    def run(
        self, block: Iterable[Record | BadRecord], epoch: int, keep: Any
    ) -> tuple[dict[str, Any], BlockReport]:
        report, columns = BlockReport(), dict[str, Any]()
        for each in block:
            if isinstance(each, BadRecord):
                report.bad.append(each)
            else:
                columns = {PAGES: each[PAGES]}
                report.records, report.last, report.own = each[BATCHES], each[ENDED], each[OWN]
                report.rows, report.bytes_out = len(each[PAGES]), each[PAGES].nbytes
        return columns, report
