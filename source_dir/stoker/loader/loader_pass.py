"""Head: one iteration over one loader, by one rank, while it is produced and given to its script."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from stoker.loader.shared import Part, PassShare, blocks_of
from stoker.protocol import BlockPlace, Work
from stoker.serve.items import ReadyBlock
from stoker.serve.passes import Pass

STREAM_AHEAD = 4
"""Batches that one worker of an iterable dataset may be ahead."""


@dataclass(eq=False, kw_only=True)
class LoaderPass(Pass):
    """One iteration over one loader, by one rank: gives its script whole batches, in the script's order.

    Of a map-style dataset, a shard is a group of batches. Of an iterable one, it is a stream: what one worker
    reads (`get_worker_info`). The chain worker that opens a stream reads it to its end. It may have several
    open, also of other passes, and makes a batch of the one that is needed most.
    """

    share: PassShare = field(default_factory=PassShare)
    ready: dict[BlockPlace, list[Part]] = field(default_factory=dict)
    given: dict[BlockPlace, list[Part]] = field(default_factory=dict)
    """What the script is fetching, before it takes `next`."""
    failed: dict[BlockPlace, str] = field(default_factory=dict)
    next: BlockPlace = (0, 0)
    known: int = 0
    """Number of submitted shards."""
    total: int | None = None
    stall_key: str = "stall_timeout_s"
    readers: dict[int, str] = field(default_factory=dict)
    where: Any = None
    taken: Counter[int] = field(default_factory=Counter)
    """By stream: how many batches the script was given."""
    took: float = field(default_factory=time.monotonic)
    """When it was last given some."""
    waits: bool = False
    """Whether it asks for one that is not ready."""

    @property
    def loader(self) -> str:
        """Names its loader's content."""
        return self.plan.split.partition("/")[0]

    @property
    def takers(self) -> list[LoaderPass]:
        """The passes that are given what this one makes."""
        return [self]

    @property
    def held_bytes(self) -> int:
        ready = blocks_of(self.ready[place] for place in self.ready)
        return sum(block.report.bytes_out for block in ready)

    @property
    def needed(self) -> list[ReadyBlock]:
        """As the base's, in the order in which the script takes them."""
        ready = {place: asked.parts for place, asked in self.share.asked.items()} | self.ready
        order = sorted(ready, key=lambda place: place[::-1])
        return blocks_of([*self.given.values(), *(ready[place] for place in order)])

    @property
    def ended(self) -> bool:
        return self.complete()

    @property
    def rows_ahead(self) -> int:
        if self.streams:
            return len(self.ready) // self.streams
        first = self.next[0]
        return next(n for n in count() if (first + n, 0) not in self.ready)

    def add(self, work: Work) -> None:
        """Add batches of a map-style dataset; calls of a script can overtake each other."""
        self.work.append(work)
        if len(self.work) > 1 and first_batch(self.work[-2]) > first_batch(work):
            self.work = deque(sorted(self.work, key=first_batch))

    def waits_for(self, stream: int) -> bool:
        return stream == self.next[0]

    def give(self, place: BlockPlace) -> list[Part]:
        """The script gets a place that is ready."""
        self.given[place] = parts = self.ready.pop(place)
        self.taken[place[0]] += 1
        self.took = time.monotonic()
        return parts

    def ahead_of(self, stream: int) -> int:
        return sum(place[0] == stream for place in self.ready)

    def offers(self, worker: str, lost: Callable[[str], bool]) -> bool:
        """As the base's: first the stream that the script waits for, then the one least ahead."""
        if not self.streams:
            return bool(self.work)
        readers = self.readers
        own = [w for w in self.work if readers.get(w[0], worker) == worker or lost(readers[w[0]])]
        short = [work for work in own if not self.far_ahead(work[0])]
        if not short:
            return False
        best = min(short, key=lambda work: (not self.waits_for(work[0]), self.ahead_of(work[0])))
        self.work.remove(best)
        self.work.appendleft(best)
        return True

    @property
    def waited_for(self) -> bool:
        if self.streams:
            return bool(self.work and self.waits_for(self.work[0][0]))
        groups = (self.share.making[work.number] for work in self.work)
        return any(taker.next == place for group in groups for taker, place in group.takers)

    def is_reader(self, worker: str) -> bool:
        return bool(self.streams and self.readers.get(self.work[0][0]) == worker)

    def far_ahead(self, shard: int) -> bool:
        return self.ahead_of(shard) >= STREAM_AHEAD

    def begin(self, shards: list[Work], worker: str = "") -> None:
        super().begin(shards, worker)
        if self.streams:
            self.readers |= {each.number: worker for each in shards}


def first_batch(work: Work) -> int:
    return int(work.shard.items[0].batches[0][0])
