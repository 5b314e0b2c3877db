"""Chain worker: the work of a `stoker.DataLoader`: fetch records, collate them, pack the batch.

A stream (one worker's part of an iterable dataset) that is opened again, after its process was lost or from a
saved state, skips the batches that the script has. The digest of each covers all batches of its stream so far:
one comparison shows whether these were the same. An endless stream has no such place: it begins anew.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import random
import socket
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from stoker.loader.digests import batch_digest
from stoker.loader.ranks import Rank, ask
from stoker.read.generators import HeldGenerators
from stoker.read.sources import restore_generators, seed_globals, states
from stoker.serve.blocks.packing import (
    Parts,
    Room,
    collates_anew,
    pack,
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


class Stretch(NamedTuple):
    """Batches of a stream, up to batch `stop`, that ranks had which divided it otherwise: those of one part."""

    parts: int
    part: int
    size: int | None
    stop: float


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
    parts: int = 1
    """Iterable dataset: how many ranks divide each group of batches, as IterableDatasetShard does."""
    wanted: tuple[int, ...] = (0,)
    """Parts whose batches are made, in turn."""
    before: tuple[Stretch, ...] = ()

    @property
    def seed(self) -> str:
        return f"{self.base_seed}.{self.passes}" if self.passes else f"{self.base_seed}"


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
    _collating: list[tuple[Callable[[Any], Any], HeldGenerators]] = field(default_factory=list)
    """Of an iterable dataset, `collate` for each part, as each rank has its own, and its generators."""
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
            why = self._begun_as(order, order.worker, order.worker)
            before = [0] * len(order.wanted)
            # Repeated, because a stream that is opened again skips batches.
            for nth, made in enumerate(itertools.repeat(why) if why else self._stream(order)):
                place = nth % len(before)
                after = digest_of(made, before[place])
                ended = isinstance(made, MadeBatch) and made.ended and place == len(before) - 1
                yield [parts_of_batch(made._replace(chain=(before[place], after)))], ended
                before[place] = after
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
        """Yield the batches of a stream: of each group of records, those of the wanted parts in turn.

        The generators of each part go on as if it read the stream alone, so reading has to draw the same in all.
        """
        from torch.utils.data._utils import worker as torchs

        info, what = torchs._worker_info, f"of worker {order.worker}"
        generators, number = [states()] * len(order.wanted), 0
        fetchers = self._fetchers(order)
        while True:
            torchs._worker_info = info  # every time: streams and passes take turns in this process
            restore_generators(generators[0])
            try:
                fetcher, size, parts, taken, stop = next(fetchers)
            except BaseException as error:
                yield from itertools.repeat(failed(error, f"iter(dataset) {what}"))
            generators = [states()] * len(generators) if number == 0 else generators
            while number < stop:
                torchs._worker_info = info
                restore_generators(generators[0])
                records, made = [], None
                try:
                    records = fetcher.fetch(range((size or 1) * parts))
                except BaseException as error:
                    made = _ending(error, f"batch {number} {what}")
                if len(generators) > 1:
                    read = states()
                    if any(each != generators[0] for each in generators):
                        ask()  # each part might have read other records
                    generators = [read] * len(generators)
                    before = batch_digest(records) if number == 0 else None
                for place, part in enumerate(taken):
                    if place:
                        torchs._worker_info = info
                        restore_generators(generators[place])
                    mine = records[part * size :][:size] if size and parts > 1 else records
                    batch = made or self._collated(order, place, mine, number)
                    generators[place] = states()
                    if len(generators) > 1 and number == 0 and batch_digest(records) != before:
                        ask()  # the last group is filled up with these records
                    yield batch  # continues after a failure, as torch does; a generator that raised is exhausted
                if isinstance(batch, MadeBatch) and batch.ended:
                    return
                number += 1

    def _fetchers(self, order: LoadRequest) -> Iterator[tuple[Any, int | None, int, Any, float]]:
        """By stretch of a stream: what reads groups of records, a batch's size, how many batches are in a group,
        which of them are taken, and up to which number."""
        from torch.utils.data._utils.fetch import _IterableDatasetFetcher

        records = self.dataset
        if order.parts > 1:
            records = copy.copy(records)  # gives record by record
            records.batch_size = records.num_processes = 1
            records.process_index, records.split_batches = 0, False
        if order.before or order.parts > 1:
            records = _Rest(iter(records))
        group: Any = None
        now = Stretch(order.parts, 0, self.batch_size, math.inf)
        for stretch in (*order.before, now):
            parts, part, size, stop = stretch
            if group != (parts, size):
                group = parts, size
                read = records if parts == 1 else self._filled(records, parts * (size or 1))
                fetcher = _IterableDatasetFetcher(read, size is not None, _as_read, self.drop_last)
            taken = order.wanted if stretch is now else (part,) * len(order.wanted)
            yield fetcher, size, parts, taken, stop

    def _filled(self, records: Any, size: int) -> Any:
        """Groups of records, the last one filled up as IterableDatasetShard does."""
        shard = importlib.import_module("accelerate.data_loader").IterableDatasetShard
        drop_last = getattr(self.dataset, "drop_last", self.drop_last)
        return shard(records, size, drop_last, num_processes=1, process_index=0)

    def _collated(
        self, order: LoadRequest, place: int, records: Any, number: int
    ) -> MadeBatch | Failed:
        if not self._collating:
            copies = [unpack(pack([self.collate]))[0] for _ in order.wanted[1:]]
            held = [HeldGenerators(each, apart=self.dataset) for each in copies]
            for each in held:
                each.find(sent=True)
            self._collating = [(self.collate, self.held), *zip(copies, held, strict=True)]
        collate, generators = self._collating[place]
        try:
            generators.seed(f"{order.seed}/{order.worker}/{number}/collate")
            spare, before = generators.spare(records), states()
            made = collate(records)
            if generators.created():
                restore_generators(before)
                made = collate(spare)
            return MadeBatch(made)
        except BaseException as error:
            if isinstance(error, StopIteration) and order.wanted[1:]:
                ask()  # ends this part alone
            return _ending(error, f"batch {number} of worker {order.worker}")


def _as_read(records: Any) -> Any:
    return records


def _ending(error: BaseException, what: str) -> MadeBatch | Failed:
    return MadeBatch(None, ended=True) if isinstance(error, StopIteration) else failed(error, what)


class _Rest:
    """What is left of a dataset that is being read."""

    def __init__(self, left: Iterator[Any]) -> None:
        self._left = left

    def __iter__(self) -> Iterator[Any]:
        return self._left


def digest_of(made: MadeBatch | Failed, before: int) -> int:
    if isinstance(made, Failed):
        return batch_digest(made.kind.__qualname__, before)
    try:
        return batch_digest(made.batch, before)
    except Exception:  # it refers to itself
        return batch_digest(type(made.batch).__qualname__, before)


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


def opened(pages: Any) -> LoaderWork:
    work: LoaderWork = unpack(pages.copy())[0]
    return work


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
