"""Script: makers of batches: chain workers of a cluster, or this process.

A maker has the PassTimer `watch` and six methods, all called in the script's thread:
    submit(shards, total)   add work; total is the number of shards in all, once known
    want(place)             request the next block
    wait(deadline)          wait for the next requested block; changes nothing
    get()                   return it, without waiting: (place, "block", batches), (place, "end", None)
                            or (place, "failed", reason)
    pace(least)             batches per block, and batches to submit ahead
    close()
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import logging
import math
import os
import pickle
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker
from torch.utils.data._utils.pin_memory import pin_memory

from stoker.errors import Failure
from stoker.hosts.cluster import refuse_old_ray
from stoker.loader import connection
from stoker.loader.loader_source import LoaderChain, LoaderSource, packed
from stoker.loader.pass_timer import PassTimer
from stoker.loader.ranks import Rank
from stoker.loader.shared_streams import WantedPart
from stoker.loader.work import Failed
from stoker.loader.worker_output import repeat
from stoker.protocol import BlockPlace, BlockSlice, Shard
from stoker.read.generators import hold_the_same
from stoker.read.sources import drawing
from stoker.serve.blocks.batches import ASKED_AT_ONCE, LateError, Prefetcher
from stoker.serve.blocks.client import Transport, block_transport
from stoker.serve.blocks.packing import Room, unpack
from stoker.serve.shards import Setup
from stoker.session import EVENTS_VARIABLE

ANSWER_S = 60.0
"""Deadline of a call to the service, which answers within seconds."""
END_S = 10.0
"""Deadline for the threads of open passes to end before the script disconnects from Ray."""
SECONDS_AHEAD = 3.0
"""Work to submit ahead, in seconds of all chain workers."""
GROUP_S = 0.1
"""Fast batches are grouped into blocks that take this long to make."""
MOST_AT_FIRST = 16
"""Batches of a block before the first one of a pass has come."""
LEAST_PER_SLOT, MOST_AHEAD = 4, 4096
"""Batches ahead: minimum per chain worker, maximum in total."""
LOADED = 4
FIGURES_EVERY_S = 2.0
Arrival = tuple[BlockPlace, str, Any]
""""block" and what the service or the script needs of it, "end", or "failed" and why."""


def finalize(of: Any, call: Callable[..., Any], *arguments: Any) -> weakref.finalize[..., Any]:
    """As `weakref.finalize`; a fork of this process inherits it, but must not end what the parent uses."""
    process = os.getpid()
    return weakref.finalize(of, lambda: call(*arguments) if os.getpid() == process else None)


@dataclass
class BatchTime:
    """What a loader has learnt. A maker holds nothing else of it, or no pass would be let go of."""

    seconds: float | None = None
    """Smoothed seconds that a chain worker takes to make a batch; None before the first one."""


class ClusterMaker:
    """See the module. A thread asks for blocks, fetches and unpacks them ahead of the script.

    Args:
        loader: the stoker.DataLoader.
        pages: packed: the location of the script's modules, and the loader's work.
    """

    def __init__(self, loader: Any, pages: tuple[Any, Any]) -> None:
        self._loader, self._key = weakref.ref(loader), secrets.token_hex(8)
        self._stall_s = loader.stall_timeout_s
        self._batch_time, self.watch = loader.kept.batch_time, PassTimer()
        pinned = loader.pin_memory and torch.cuda.is_available()
        self._device = torch.cuda.current_device() if pinned else None
        name, iterable = loader.kept.name, isinstance(loader.dataset, IterableDataset)
        source: Any = LoaderSource((None, pages[1]), iterable, name)
        self._setup = name, Setup(source, pickle.dumps(LoaderChain()))
        self._where = pages[0]
        self._content = hashlib.sha256(name.encode() + pages[0].data).digest()
        self._confirmed = False
        self._places: dict[int, BlockPlace] = {}
        """Wanted blocks that the service has not given, by their number in the pass."""
        self._wanted = 0
        self._prefetcher: Prefetcher[Arrival, Arrival] | None = None
        """None until the pass is open."""
        self._join(loader)

    def _join(self, loader: Any) -> None:
        import ray

        from stoker.loader.loader_service import forget

        self._job = job = service_of_script()
        self._ranks, self._parts = loader.ranks()[0], loader.parts()
        # A rank that has to hurry waits for no other, and each has what its reading and collating share.
        self._alone = (
            self._parts[0] == 1
            or loader.timeout > 0
            or hold_the_same(loader.dataset, loader.collate_fn)
        )
        self._service, kept = job.service, loader.kept
        self._transport = job.transport.for_pass(self._stall_s, "stall_timeout_s")
        split = kept.name if loader.persistent_workers else f"{kept.name}/{self._key}"
        if loader._keeps:
            kept.served_by(job.service)
            split = f"{kept.name}/{kept.token}"
            if not kept.served:
                finalize(loader, forget, job.service, split).atexit = False
        streams = max(1, loader.num_workers) if isinstance(loader.dataset, IterableDataset) else 0
        context, told = ray.get_runtime_context(), os.environ.get(EVENTS_VARIABLE, "")
        whose = self._key, split, loader._id, streams, loader._keeps, self._stall_s
        place = context.get_node_id(), context.get_job_id(), told
        self._about = job.service, *whose, *place, self._where, self._ranks

    def submit(self, shards: list[tuple[int, Shard, int]], total: int | None) -> None:
        shards = [(n, self._with_digests(shard), skip) for n, shard, skip in shards]
        if self._prefetcher is None:
            self._prefetcher = self._open(shards, total)
            _MAKERS.add(self)
        else:
            self._service.submit.remote(self._key, shards, total)

    def _with_digests(self, shard: Shard) -> Shard:
        """Name each batch by all that it depends on; a rank is not a part of that.

        In a job with one rank, nothing else needs the batch, and its number in this pass takes less time.
        """
        from ray import cloudpickle

        request, made = shard.items[0], hashlib.sha256
        if self._ranks == 1:
            own = (f"{self._key}/{number}".encode() for number, _ in request.batches)
            return replace(shard, items=(request._replace(digests=tuple(own)),))
        about = made(
            self._content + cloudpickle.dumps(request._replace(batches=(), rank=Rank()))
        ).digest()
        digests = (made(about + cloudpickle.dumps(each)).digest() for each in request.batches)
        return replace(shard, items=(request._replace(digests=tuple(digests)),))

    def _open(
        self, shards: list[tuple[int, Shard, int]], total: int | None
    ) -> Prefetcher[Arrival, Arrival]:
        import ray

        try:
            self._begin(shards, total)
        except ray.exceptions.RayActorError:  # the service has ended since the pass before
            _services.clear()
            self._join(self._loader())
            self._begin(shards, total)
        return Prefetcher(
            "stoker-batches",
            self._ask,
            self._fetch,
            threads=1,  # the service drops what it gave when it is asked again
            limit=LOADED + ASKED_AT_ONCE,
            loaded=LOADED,
            wanted=self._wanted,
            left=self.leave,
        )

    def _begin(self, shards: list[tuple[int, Shard, int]], total: int | None) -> None:
        import ray

        try:
            opens = *self._about, shards, total, self._wanted_part(shards)
            while not self._look(self._service.open.remote(*opens)):
                ray.get(self._service.register.remote(*self._setup), timeout=ANSWER_S)
        except BaseException:
            self.leave()  # an interrupt, for example
            raise

    def _wanted_part(self, shards: list[tuple[int, Shard, int]]) -> WantedPart | None:
        """What other ranks read, too: streams that depend on all but the part, from the same place."""
        from ray import cloudpickle

        parts, part = self._parts
        if self._alone or any(shard.items[0].before for _, shard, _ in shards):
            return None
        orders = [
            (number, shard.items[0]._replace(wanted=(), rank=Rank()), skip)
            for number, shard, skip in shards
        ]
        digest = hashlib.sha256(self._content + cloudpickle.dumps(orders)).digest()
        return WantedPart(digest, parts, part, max(self._ranks, parts))

    def want(self, place: BlockPlace) -> None:
        self._places[self._wanted] = place
        self._wanted += 1
        if self._prefetcher is not None:
            self._prefetcher.want()

    def wait(self, deadline: float | None) -> None:
        began = time.monotonic()
        until = min(began + self._stall_s, math.inf if deadline is None else deadline)
        with suppress(LateError):
            if self._opened.wait(until - began):
                return
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            raise RuntimeError(f"DataLoader timed out after {now - began:.0f} seconds (timeout)")
        if now < until:
            raise RuntimeError("DataLoader: the thread that fetches batches has ended")
        if self._skipped <= began:
            raise RuntimeError(f"DataLoader: no batch for {now - began:.0f} s (stall_timeout_s)")
        self.wait(deadline)  # a stream is being read again up to its place

    def get(self) -> Arrival:
        return cast(Arrival, self._opened.take(0.0))

    @property
    def _opened(self) -> Prefetcher[Arrival, Arrival]:
        return cast("Prefetcher[Arrival, Arrival]", self._prefetcher)  # a pass begins with work

    def pace(self, least: int) -> tuple[int, int]:
        slots, batch_s = max(self._job.slots, 1), self._batch_time.seconds
        least = max(least, LEAST_PER_SLOT * slots)
        if batch_s is None:
            return 1, least
        most = min(max(int(SECONDS_AHEAD * slots / max(batch_s, 1e-6)), least), MOST_AHEAD)
        together = max(
            1, min(int(GROUP_S / max(batch_s, 1e-6)), most // (2 * LEAST_PER_SLOT * slots))
        )
        if self._confirmed:
            return together, most
        # The script waits for the first block, and batches may have become slower since the pass before.
        first = max(1, min(together // 10, MOST_AT_FIRST))
        return first, max(least, first * slots)

    def close(self, join_s: float = 0.0) -> None:
        if self._prefetcher is not None:
            self._prefetcher.end(join_s)

    @property
    def alive(self) -> bool:
        return self._opened.alive

    def _ask(self, first: int, most: int, _: int) -> list[Arrival]:
        import ray

        with _errors_for_the_script():
            if time.monotonic() > self._figures_due:
                self._look(self._service.state.remote(self._key, self.watch.progress))
            places = [self._places[number] for number in range(first, first + most)]
            answers = ray.get(self._service.take.remote(self._key, places), timeout=ANSWER_S)
        for number in range(first, first + len(answers)):
            del self._places[number]
        return [(place, *answer) for place, answer in zip(places, answers, strict=False)]

    def _fetch(self, given: Arrival, _: float) -> Arrival:
        place, kind, value = given
        if kind == "block":
            with _errors_for_the_script():
                value = self._batches(value)
        return place, kind, value

    def _batches(self, parts: list[tuple[BlockSlice, int, int | None, bool]]) -> list[Any]:
        return [batch for part in parts for batch in self._part(*part)]

    def _part(self, block: BlockSlice, start: int, stop: int | None, alone: bool) -> list[Any]:
        (seconds, said), *batches = self._transport.objects(block, alone)[0]
        if start == 0:
            repeat(said)
        self._transport.finish_pass()  # release the block: no other batch is in it
        each, batches = seconds / max(len(batches), 1), batches[start:stop]
        self._confirmed, before = True, self._batch_time.seconds
        self._batch_time.seconds = each if before is None else 0.8 * before + 0.2 * each
        if self._device is None:
            return batches
        torch.cuda.set_device(self._device)
        return [
            made if isinstance(made, Failed) else made._replace(batch=pin_memory(made.batch))  # type: ignore[no-untyped-call]
            for made in batches
        ]

    def _look(self, told: Any) -> bool:
        """Take in how many chain workers there are and log notes, unless the service says nothing."""
        import ray

        self._figures_due = time.monotonic() + FIGURES_EVERY_S
        answer = ray.get(told, timeout=ANSWER_S)
        if answer is not None:
            self._job.slots, notes, skipped_s = answer
            self._skipped = time.monotonic() - skipped_s
            for note in notes:
                logging.getLogger("stoker").warning("stoker.DataLoader: %s", note)
        return answer is not None

    def leave(self) -> None:
        import ray

        if ray.is_initialized():
            self._service.close.remote(self._key)


@contextmanager
def _errors_for_the_script() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        raise RuntimeError(f"DataLoader: {Failure.of(error)}") from None


@dataclass
class JobService:
    """A script's LoaderService and the transport of its blocks, kept from pass to pass."""

    service: Any
    transport: Transport
    slots: int = 0
    """How many chain workers it had when it last told."""


_services: dict[tuple[str, str], JobService] = {}


def service_of_script() -> JobService:
    """Script, connected."""
    import ray

    from stoker.loader.loader_service import service_of

    here = ray.get_runtime_context().get_worker_id(), connection.service_name()
    if here not in _services:
        refuse_old_ray()
        _services.clear()
        try:
            service = service_of(here[1])
        except ray.exceptions.RayActorError:  # it was ending with its last script
            service = service_of(here[1])
        # Not into pinned memory: it would be reused while a non-blocking copy to a GPU still reads it.
        # torch's pinned memory tracks such copies.
        _services[here] = JobService(
            service, block_transport(service, pinned=False, timeout_s=600.0)
        )
    return _services[here]


_MAKERS: weakref.WeakSet[ClusterMaker] = weakref.WeakSet()


def end_passes() -> None:
    """Ray ends a process in which a thread drops a reference while it disconnects."""
    running = [maker for maker in list(_MAKERS) if maker.alive]  # none in a fork of the script
    for maker in running:
        maker.close()
        maker.leave()
    deadline = time.monotonic() + END_S
    for maker in running:
        maker.close(max(deadline - time.monotonic(), 0))
    _services.clear()


@functools.cache
def end_passes_before_ray() -> None:
    """Script, connected: at exit, functions run in reverse order."""
    atexit.register(end_passes)


class ProcessMaker:
    """See the module and ClusterMaker."""

    def __init__(self, loader: Any, pages: tuple[Any, Any]) -> None:
        iterable = isinstance(loader.dataset, IterableDataset)
        self._source = LoaderSource(pages, iterable, copies=loader.kept.copies)
        self._room, self.watch = Room(), PassTimer()
        self._shards: dict[int, tuple[Shard, int]] = {}
        self._running: dict[int, Iterator[Any]] = {}
        self._wanted: deque[BlockPlace] = deque()

    def submit(self, shards: list[tuple[int, Shard, int]], total: int | None) -> None:
        self._shards |= {number: (shard, skip) for number, shard, skip in shards}

    def want(self, place: BlockPlace) -> None:
        self._wanted.append(place)

    def wait(self, deadline: float | None) -> None:
        """Nothing to wait for: batches are made as they are taken."""

    def get(self) -> Arrival:
        place = self._wanted.popleft()
        with drawing("batch"), self._room.group():  # leaves the script's own generators untouched
            try:
                group, _ = next(self._batches(place[0]), (None, True))
            finally:
                worker._worker_info = None
            if group is None:
                return place, "end", None
            return place, "block", unpack(packed(group, 0.0, self._room).copy())[1:]

    def _batches(self, number: int) -> Iterator[Any]:
        if number in self._running:
            return self._running[number]
        shard, skip = self._shards.pop(number)
        groups = self._source.groups(shard.items[0], False, self._room)
        if self._source.stays:
            self._running[number] = groups
            next(itertools.islice(groups, skip, skip), None)
        return groups

    def pace(self, least: int) -> tuple[int, int]:
        return 1, least

    def close(self) -> None:
        self._running.clear()
