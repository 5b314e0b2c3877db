"""Script: one iteration over a `stoker.DataLoader`.

torch's sampler chooses the indices here, chain workers make the batches, and a thread prefetches them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import secrets
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import ExceptionWrapper
from torch.autograd.profiler import record_function
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from stoker.loader.divisions import Division
from stoker.loader.indices import as_one, copy_of
from stoker.loader.makers import BatchTime, finalize
from stoker.loader.ranks import rank_of_script
from stoker.loader.work import Failed, LoadRequest, MadeBatch, Stretch, digest_of
from stoker.protocol import Shard
from stoker.read.sources import restore_generators, states
from stoker.serve.blocks.packing import unpack

DATA_PIPES = (IterDataPipe, MapDataPipe)
STREAM_BATCHES = 8
"""Batches of an iterable dataset that are requested ahead."""
END = object()


@dataclass
class Kept:
    """What a loader keeps from pass to pass, with `persistent_workers` or without workers."""

    passes: int = 0
    seed: int = 0
    name: str = ""
    """Names what the loader has sent: its work, and where the script ran."""
    work: str = ""
    """Digest of the content that the copies of an iterable dataset were made from."""
    where: Any = None
    """Packed: the script's folder and module path when they were made."""
    service: Any = None
    token: str = ""
    """Names these copies, which have `served` so many passes."""
    served: int = 0
    copies: dict[int, Any] = field(default_factory=dict)
    batch_time: BatchTime = field(default_factory=BatchTime)

    def content(self, where: Any, modules: Any, work: Any, stays: bool) -> tuple[Any, Any]:
        """What to send; begins new copies if the content is another than in the pass before.

        Args:
            where: packed: the script's folder, module path and reloaded modules.
            modules: packed: the reloaded modules.
            work: packed: the loader's work.
            stays: whether workers serve all passes: they stay as the first one began, as torch's do.
        """
        content = _digest(modules, work)
        if content != self.work:
            self.work, self.token, self.served, self.copies = content, secrets.token_hex(8), 0, {}
        elif stays:
            where = self.where  # an import may have changed the module path since
        self.where, self.name = where, _digest(where, work) if stays else content
        return where, work

    def served_by(self, service: Any) -> None:
        if self.served and self.service is not None and self.service() is not service:
            raise RuntimeError(
                "DataLoader: the copies of the dataset that served the passes before were lost with the"
                " service of this job, so records would be lost or repeated; make another DataLoader"
            )
        self.service = weakref.ref(service)

    def opened(self, request: LoadRequest, persistent: bool) -> None:
        self.served += 1
        if persistent:
            self.passes, self.seed = request.passes + 1, request.base_seed


def _digest(*pages: Any) -> str:
    found = hashlib.sha256()
    for each in pages:
        found.update(each.data)
    return found.hexdigest()[:32]


class Phase(Enum):
    OPEN = "between two batches"
    TAKING = "within next(); still so in the next call if an interrupt broke it off"
    ENDED = "all batches are taken"
    SUPERSEDED = "another pass uses the copies of the dataset"


class ClusterIterator:
    """See the module; `start` is what `place` returned after the last batch that was taken."""

    def __init__(self, loader: Any, maker: Any, start: dict[str, Any] | None = None) -> None:
        self._finish = finalize(self, maker.close)  # also if what follows fails
        self._maker, self._watch = maker, maker.watch
        finalize(self, self._watch.tell)
        self._phase = Phase.TAKING
        self._order: Iterator[Any]
        passes = start["passes"] if start else loader.kept.passes
        seed, shared_seed = self._draw_seeds(loader, passes)
        if start:
            seed, shared_seed = start["base_seed"], start["shared_seed"]
        self.request = LoadRequest(
            seed,
            passes=passes,
            served=loader.kept.served,
            shared_seed=shared_seed,
            where=loader.kept.where if loader._keeps and not loader.persistent_workers else None,
            ranks=world_and_rank() if isinstance(loader.dataset, DATA_PIPES) else (1, 0),
            endless=loader.endless,
            parts=loader.parts()[0],
            wanted=loader.parts()[1:],
            rank=rank_of_script(loader.num_workers, loader.multiprocessing_context),
        )
        self._dataset, self._length = loader.dataset, loader._IterableDataset_len_called
        self._iterable = isinstance(loader.dataset, IterableDataset)
        self._sampler, self._batched = loader._index_sampler, loader._auto_collation
        self._num_workers, self._timeout = loader.num_workers, loader.timeout
        self._streams = max(1, loader.num_workers)
        self._read_as = loader.read_as()
        self._before: list[dict[str, Any]] = []
        """How ranks that shared this pass otherwise read its streams, and up to which batch of each."""
        self._ahead = self._streams * (loader.prefetch_factor or 2)
        self._quarantine, self._ranks = loader.quarantine, loader.ranks()[0]
        self._rank, self._shared_order = loader.ranks()[1], loader.shared_order()
        self._division: dict[str, Any] | None = None
        if self._shared_order:
            self._division = asdict(self._shared_order.division)
        self._segments: list[dict[str, Any]] = []
        """What ranks that shared this pass otherwise have taken: the division, and how many batches of each."""
        self._step = max(1, loader.dispatched)
        self._yielded = self._submitted = self._number = self._groups = 0
        self._began_with = start["yielded"] if start else 0
        self._place: dict[str, Any] = {}
        self._records = loader.batch_size or 1
        """Records of the last batch; of a full one for an iterable dataset, 1 with `batch_size=None`."""
        self._drawn: deque[tuple[int, int]] = deque()
        """By drawn batch that the script does not have: its records, and the digest of the indices so far."""
        self._indices = self._last = 0
        """Digest of the indices of the batches that the script has, and of all that are drawn."""
        self._epoch = _declared_length(loader)
        self._edge: float = self._epoch
        """First batch of the next epoch of a sampler that repeats: not drawn before torch would draw it."""
        self._end: Exception | None = None
        """Why the sampler gives no more indices: StopIteration, or an error of its own."""
        self._own: list[torch.Generator] = loader._own()
        self._opened_with = self._now()
        self._late: dict[str, Any] | None = start and start.get("late")
        """State of the generators before the sampler was first asked, if another than in `iter()`."""
        self._begun = bool(start or loader.restored or loader.num_workers)
        """Whether the sampler has been asked; without workers, torch asks it in `next()`."""
        self._ready: deque[Any] = deque()
        self._taken, self._digests = [0] * self._streams, [0] * self._streams
        """By worker of an iterable dataset: how many batches the script has, and their digest."""
        self._over: set[int] = set()
        self._turn = 0
        self._asked: deque[tuple[int, int]] = deque()
        if self._late:
            restore_generators(self._late["global"])
            set_states(self._own, self._late["own"])
        if loader.restored and not self._iterable:
            # The state of a sampler may be that of its end: torchdata's then begin again.
            first = next(self._order, END)
            again = first is END
            self._order = iter(self._sampler) if again else itertools.chain([first], self._order)
        if start:
            self._resume(start)
        if self._iterable:
            self._open_streams()
        elif self._begun:
            self._fill()
        self._settle()

    def _draw_seeds(self, loader: Any, passes: int) -> tuple[int, int]:
        """Ask the sampler for its order and draw seeds, as often and in the order in which torch does.

        torch's workers have their seeds before it asks the sampler once more; persistent ones keep them.
        """
        sampler = loader._index_sampler
        if passes:
            self._order = iter(sampler)
            return loader.kept.seed, _shared_seed(loader)
        shared, self._order, seed = _shared_seed(loader), iter(sampler), _draw(loader.generator)
        if loader.num_workers:
            self._order, _ = iter(sampler), _shared_seed(loader)
        return seed, shared

    def _resume(self, start: dict[str, Any]) -> None:
        self._yielded = start["yielded"]
        if self._iterable:
            self._before, was = list(start.get("before", ())), start.get("read_as")
            if was and self._read_as and was != self._read_as:
                self._before.append(was | {"stops": list(start["taken"])})
            self._taken, self._over = list(start["taken"]), set(start["over"])
            self._turn, self._digests = start["turn"], list(start["digests"])
            return
        segments = list(start.get("segments", ()))
        batches = start["drawn"] - sum(segment["batches"] for segment in segments)
        now = {
            "division": start.get("division"),
            "batches": batches,
            "indices": start.get("indices"),
        }
        order, division = self._shared_order, now["division"]
        if order is not None and division and (segments or division != self._division):
            now = self._divide(iter(order), order.division, segments, now)
        self._segments = segments
        self._replay(now)
        if self._rank == start.get("rank", self._rank):
            self._quarantine.records += start.get("quarantined", ())
        self._indices = self._last
        self._submitted = self._number = start["drawn"]
        self._edge *= max(1, math.ceil(start["drawn"] / self._epoch))

    def _divide(
        self,
        left: Iterator[Any],
        mine: Division,
        segments: list[dict[str, Any]],
        now: dict[str, Any],
    ) -> dict[str, Any]:
        """Make what a pass that other ranks began has left the order of this rank.

        Args:
            left: the whole order that the ranks share.
            mine: this rank's part of it.
            segments: the earlier ones; gets that of the state if it was of other ranks.
            now: the segment of the state.

        Returns:
            The segment that continues.
        """
        for segment in segments:
            self._take(segment, left)
        division = Division(**now["division"])
        if division != mine:
            read = self._quarantine.read
            taken = self._take(now, left)
            if division.is_like(mine):  # the state of another rank, which has taken as many
                self._quarantine.read = read
                left = itertools.chain(taken, left)
                now = {"division": self._division, "batches": now["batches"]}
            else:
                segments.append(now)
                now = {"division": self._division, "batches": 0}
        self._order, self._last = mine.deal(left), 0
        return now

    def _take(self, segment: dict[str, Any], left: Iterator[Any]) -> list[Any]:
        """Take the records of a segment, and compare the batches of the rank that saved it."""
        division = Division(**segment["division"])
        taken = list(itertools.islice(left, division.taken(segment["batches"])))
        self._order, self._last = division.deal(iter(taken)), 0
        self._replay(segment)
        return taken

    def _replay(self, segment: dict[str, Any]) -> None:
        """Draw the batches of a segment again."""
        for drawn in range(segment["batches"]):
            try:
                self._draw()
            except StopIteration:
                raise ValueError(
                    f"the state was saved after {segment['batches']} batches, but the sampler now has {drawn}"
                ) from None
        self._quarantine.read += sum(records for records, _ in self._drawn)
        self._drawn.clear()
        if segment.get("indices") not in (None, self._last):
            raise ValueError(
                f"the state was saved after {segment['batches']} batches, and the sampler now gives other"
                " indices for them, so records would be lost or repeated; seed it or set its epoch (set_epoch)"
                " as in the saved pass, or load a state that was saved between two passes"
            )

    def _draw(self) -> Any:
        """Ask the sampler for the indices of a batch."""
        indices = next(self._order)
        if self._batched and isinstance(indices, Iterator):
            indices = list(indices)  # a generator cannot be sent
        indices = copy_of(indices)
        self._last = digest_of(MadeBatch(as_one(indices)), self._last)
        batched = self._batched and hasattr(indices, "__len__")
        self._drawn.append((len(indices) if batched else 1, self._last))
        return indices

    def place(self) -> dict[str, Any] | None:
        if self._phase is Phase.ENDED:
            return None
        late = self._late if self._begun or self._iterable else self._now()
        quarantined = self._quarantine.plain(self._place["quarantined"])
        return self._place | {"late": late, "quarantined": quarantined}

    def _now(self) -> dict[str, Any]:
        return {"global": states(), "own": drawn_states(self._own)}

    def _settle(self) -> None:
        """The script has what was taken. Last in a call: an interrupt before it leaves the position alone."""
        place = {
            "base_seed": self.request.base_seed,
            "passes": self.request.passes,
            "shared_seed": self.request.shared_seed,
            "yielded": self._yielded,
            "drawn": self._number,
            "taken": list(self._taken),
            "over": sorted(self._over),
            "turn": self._turn,
            "read_as": self._read_as,
            "before": self._before,
            "digests": list(self._digests),
            "indices": self._indices,
            "division": self._division,
            "segments": self._segments,
            "rank": self._rank,
            "quarantined": len(self._quarantine.records),
        }
        whole = (self._yielded - self._began_with) % self._step == 0
        self._place, self._phase = place if whole else self._place, Phase.OPEN

    def _open_streams(self) -> None:
        self._wanted, self._next_asked = list(self._taken), self._turn
        shards = [
            (w, Shard(f"worker {w}", items=(self._stream(w),)), self._taken[w])
            for w in range(self._streams)
            if w not in self._over
        ]
        self._maker.submit(shards, len(shards))

    def _stream(self, worker: int) -> LoadRequest:
        before = (
            Stretch(each["parts"], each["part"], each["size"], each["stops"][worker])
            for each in self._before
        )
        return self.request._replace(worker=worker, before=tuple(before))

    def _fill(self) -> None:
        """Draw indices ahead, in this thread, and submit their batches."""
        if not self._begun:
            now = self._now()
            self._late, self._begun = now if now != self._opened_with else None, True
        shards = []
        together, most = self._maker.pace(self._ahead)
        while self._submitted - self._number < most and self._may_draw():
            batches: list[tuple[int, Any]] = []
            while len(batches) < together and self._may_draw():
                try:
                    batches.append((self._submitted, self._draw()))
                except StopIteration:
                    self._end = StopIteration()  # its own would keep the frames of the script alive
                    break
                except Exception as error:  # raised after the batches before it
                    self._end = error
                    break
                self._edge += self._epoch if self._submitted == self._edge else 0
                self._submitted += 1
            if batches:
                order = self.request._replace(batches=tuple(batches))
                first, last = batches[0][0], batches[-1][0]
                name = f"batch {first}" if first == last else f"batches {first} … {last}"
                shards.append((self._groups, Shard(name, items=(order,)), 0))
                self._want((self._groups, 0))
                self._groups += 1
        if shards or self._end:
            self._maker.submit(shards, self._groups if self._end else None)

    def _may_draw(self) -> bool:
        torchs = self._number + (self._ahead if self._num_workers else 1)
        return self._end is None and (self._submitted < self._edge or self._submitted < torchs)

    def __iter__(self) -> ClusterIterator:
        return self

    def __len__(self) -> int:
        return len(self._sampler)

    def __next__(self) -> Any:
        if self._phase is Phase.SUPERSEDED:
            raise RuntimeError(
                "DataLoader: another pass over this loader has begun, and its copies of the dataset serve one"
                " at a time (persistent_workers=True, or an IterableDataset with num_workers=0); use a loader"
                " for each"
            )
        if self._phase is Phase.TAKING:
            self.close()
            raise RuntimeError(
                "DataLoader: an interrupt or an error broke off the last next() while it took a batch, so the"
                " next one is not known; start another pass or load a state"
            )
        if self._phase is Phase.ENDED:
            raise StopIteration
        asked = time.perf_counter()
        self._phase = Phase.TAKING
        with record_function("enumerate(DataLoader)#stoker.DataLoader.__next__"):
            batch = self._next()
        self._yielded += 1
        self._warn_of_length()
        self._watch.took(asked, self._records)
        self._settle()
        return batch

    def _next(self) -> Any:
        deadline = time.monotonic() + self._timeout if self._timeout > 0 else None
        while True:
            made = self._next_stream(deadline) if self._iterable else self._next_batch(deadline)
            if made is END:
                self._phase = Phase.ENDED
                self._watch.ended()
                self.close()
                if reason := self._quarantine.ended():
                    raise RuntimeError(f"DataLoader: {reason}")
                raise StopIteration
            if isinstance(made, Failed):
                self._settle()
                _reraise(made, self._num_workers)
            reason = self._quarantine.add(made.bad, self._records)
            if made.empty and self._ranks > 1 and not reason:
                reason = (
                    f"no record of batch {self._number - 1} can be loaded: {made.bad[0][1]}; left out on this"
                    " rank alone, it would make the others wait for ever"
                )
            if reason:
                self._settle()
                raise RuntimeError(f"DataLoader: {reason}")
            if not made.empty:
                return made.batch

    def _warn_of_length(self) -> None:
        """As torch does."""
        if not self._iterable or self._length is None or self._yielded <= self._length:
            return
        warnings.warn(
            f"Length of IterableDataset {self._dataset} was reported to be {self._length} (when accessing"
            f" len(dataloader)), but {self._yielded} samples have been fetched",
            stacklevel=3,
        )

    def _next_batch(self, deadline: float | None) -> Any:
        while not self._ready:
            self._fill()
            if self._end is not None and self._number == self._submitted:
                if isinstance(self._end, StopIteration):
                    return END
                self._phase = Phase.OPEN
                raise self._end
            self._ready.extend(self._get(deadline)[1])
            self._asked.popleft()
        self._number += 1
        self._records, self._indices = self._drawn.popleft()
        if self._num_workers and self._end is None and self._edge < self._number + self._ahead:
            self._fill()
        return self._ready.popleft()

    def _next_stream(self, deadline: float | None) -> Any:
        while True:
            while len(self._asked) < STREAM_BATCHES and len(self._over) < self._streams:
                if self._next_asked not in self._over:
                    self._want((self._next_asked, self._wanted[self._next_asked]))
                    self._wanted[self._next_asked] += 1
                self._next_asked = (self._next_asked + 1) % self._streams
            if not self._asked:
                return END
            worker = self._asked[0][0]
            kind, value = self._get(deadline)
            self._asked.popleft()
            if worker in self._over:
                continue  # asked for before its end was known
            made: Any = value[0] if kind == "block" else None
            same = made is not None and made.chain[0] == self._digests[worker]
            repeated = same or (made is not None and self.request.endless)
            if isinstance(made, Failed) and not repeated:
                return made  # that it could not be opened again explains more
            if not repeated:
                self.close()
                raise RuntimeError(
                    f"DataLoader: the stream of worker {worker} was opened again, after its process was lost"
                    f" or from a state, and its first {self._taken[worker]} batches are not"
                    " those delivered before, so records would be lost or repeated; seed whatever it shuffles"
                    " with and draws from, so that it repeats, or start a new pass"
                )
            if getattr(made, "ended", False):
                self._over.add(worker)
                continue
            self._digests[worker] = made.chain[1]
            self._taken[worker] += 1
            self._turn = (worker + 1) % self._streams
            return made

    def close(self, superseded: bool = False) -> None:
        """End the pass; `superseded`: another one takes over the copies of the dataset."""
        if superseded and self._phase is not Phase.ENDED:
            self._phase = Phase.SUPERSEDED
        self._finish()

    def _want(self, place: tuple[int, int]) -> None:
        self._asked.append(place)
        self._maker.want(place)

    def _get(self, deadline: float | None) -> tuple[str, Any]:
        try:
            self._maker.wait(deadline)
        except BaseException:  # changes nothing: the script may call next() again
            self._phase = Phase.OPEN
            raise
        _, kind, value = self._maker.get()
        if kind == "failed":
            self.close()
            raise RuntimeError(f"DataLoader: {value}")
        return kind, value


def world_and_rank() -> tuple[int, int]:
    there = dist.is_available() and dist.is_initialized()
    return (dist.get_world_size(), dist.get_rank()) if there else (1, 0)


def _declared_length(loader: Any) -> float:
    """Batches of an epoch by the `__len__` of a subclass of torch's loader, whose sampler may repeat."""
    if type(loader).__len__ is not DataLoader.__len__ and not isinstance(
        loader.dataset, IterableDataset
    ):
        with contextlib.suppress(Exception):  # torch does not need a length
            return len(loader) or math.inf
    return math.inf


def _draw(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _shared_seed(loader: Any) -> int:
    """The seed of a DataPipe's shuffling; rank 0 draws it for all. Collective."""
    if not isinstance(loader.dataset, IterDataPipe):
        return 0
    seed = torch.tensor(_draw(loader.generator))
    if world_and_rank()[0] > 1:
        group: Any = dist.new_group(backend="gloo")
        dist.broadcast(seed, src=0, group=group)
    return int(seed)


def drawn_states(generators: list[torch.Generator]) -> list[bytes]:
    return [bytes(generator.get_state().numpy()) for generator in generators]


def set_states(generators: list[torch.Generator], found: list[bytes]) -> None:
    for generator, state in zip(generators, found, strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _reraise(made: Failed, workers: int) -> None:
    """Raise a worker's exception as torch does: itself if there are no workers, or its type and words."""
    kind = made.kind
    if issubclass(kind, StopIteration | SystemExit | GeneratorExit):
        # Raised as it is, it would end the loop or the script without an error.
        raise RuntimeError(f"{kind.__name__} {made.where}\n{made.words}")
    if made.error is not None and not workers:
        error: BaseException = unpack(made.error)[0]
        error.add_note(f"Raised {made.where}. Original {made.words}")
        raise error
    wrapper = ExceptionWrapper.__new__(ExceptionWrapper)
    wrapper.exc_type, wrapper.exc_msg, wrapper.where = kind, made.words, made.where
    wrapper.reraise()  # type: ignore[no-untyped-call]
