"""The shards of a pass that are left, and the blocks that chain workers have made; pure."""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakValueDictionary

from stoker.protocol import BlockReport, BlockSlice, Shard, Work


@dataclass(eq=False)
class ReadyBlock:
    report: BlockReport
    node: str
    file: str = ""
    """Its name there; empty: it has no rows."""
    shard: Shard | None = None
    lost: bool = False
    """Whether its host is gone; it is being made again."""

    def part(self, start: int, stop: int) -> BlockSlice:
        return BlockSlice(self.file, start, stop, "" if self.lost else self.node, self.report.rows)

    @property
    def records(self) -> tuple[int, ...]:
        """What identifies its records; the same if it is made again."""
        made = self.report
        return made.rows, made.records, made.id_sum, made.bad_id_sum, made.last


class Holdings:
    """The files of all blocks that somebody needs, and by host those that nobody does any more.

    A block is dropped with the last reference to it.
    """

    def __init__(self) -> None:
        self._blocks: WeakValueDictionary[str, ReadyBlock] = WeakValueDictionary()
        """By every name that they have had."""
        self._places: WeakKeyDictionary[ReadyBlock, list[str]] = WeakKeyDictionary()
        """Node and file of each; what is to be removed with it."""
        self._unused: defaultdict[str, deque[str]] = defaultdict(deque)

    def keep(self, block: ReadyBlock) -> None:
        place = [block.node, block.file]
        self._blocks[block.file], self._places[block] = block, place
        weakref.finalize(block, self._drop, place).atexit = False

    def move(self, block: ReadyBlock, node: str, file: str) -> None:
        """A block has another place now. The file at the one before stays: somebody may be reading it."""
        self._places[block][:] = node, file
        block.node, block.file, block.lost = node, file, False
        self._blocks[file] = block

    def discard(self, node: str, file: str) -> None:
        """Nobody needs a block that was just made."""
        if file:
            self._drop([node, file])

    def find(self, file: str) -> ReadyBlock | None:
        return self._blocks.get(file)

    def all(self) -> set[ReadyBlock]:
        return set(self._places)

    def unused(self, node: str) -> list[str]:
        waiting, found = self._unused.get(node), list[str]()
        with contextlib.suppress(IndexError):  # several threads ask
            while waiting:
                found.append(waiting.popleft())
        return found

    def _drop(self, place: list[str]) -> None:
        self._unused[place[0]].append(place[1])


class Numbers:
    """A growing set of numbers as sorted ranges first … last + 1: in a long pass, one has nearly all."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._stops: list[int] = []
        for first, stop in ranges:
            if self._stops and first <= self._stops[-1]:
                self._stops[-1] = max(stop, self._stops[-1])
            else:
                self._firsts.append(first)
                self._stops.append(stop)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self._firsts, self._stops, strict=True))

    def add(self, number: int) -> None:
        if number in self:
            return
        firsts, stops, at = self._firsts, self._stops, bisect_right(self._firsts, number)
        if at and stops[at - 1] == number:
            stops[at - 1] = number + 1
        else:
            firsts.insert(at, number)
            stops.insert(at, number + 1)
            at += 1
        if at < len(firsts) and firsts[at] == stops[at - 1]:
            stops[at - 1] = stops[at]
            del firsts[at], stops[at]

    def __contains__(self, number: int) -> bool:
        return self.absent_from(number) != number

    def absent_from(self, number: int) -> int:
        """The first number from this one on that is not there."""
        at = bisect_right(self._firsts, number)
        return self._stops[at - 1] if at and number < self._stops[at - 1] else number


class Rest:
    """The shards of a pass that are still to be made, in its order; each is listed when it is taken.

    Ranges `done` of them were made before, and `skip` blocks of others.
    """

    def __init__(
        self,
        shards: Sequence[Shard] = (),
        done: Iterable[tuple[int, int]] = (),
        skip: Mapping[int, int] | None = None,
    ) -> None:
        self.done = Numbers(done)
        self._shards, self._skip, self._next = shards, dict(skip or {}), 0
        stops = ((first, min(stop, len(shards))) for first, stop in self.done.ranges)
        self.left = len(shards) - sum(max(stop - first, 0) for first, stop in stops)

    def take(self, most: int) -> list[Work]:
        found: list[Work] = []
        for _ in range(min(most, self.left)):
            number = self.done.absent_from(self._next)
            found.append(Work(number, self._shards[number], self._skip.pop(number, 0)))
            self._next = number + 1
        self.left -= len(found)
        return found
