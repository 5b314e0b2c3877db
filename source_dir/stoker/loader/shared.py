"""Head: batches that several passes ask for, made once.

Ranks of a tensor-, context- or pipeline-parallel group want the same batches of a map-style dataset. A batch
is named by a digest of all that it depends on: the loader's content, the script's state, seeds, epoch, its
number and its indices. What has one digest is made in the pass that asks first, and its block is given to
each. A rank's number is in no digest, so ranks with other seeds or indices share nothing.

A block that all present takers have stays for ranks that have not asked yet, within a budget. If the pass that
makes a block ends before, another taker makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple, cast

from stoker.protocol import BlockPlace, BlockSlice, Shard, Work
from stoker.serve.items import ReadyBlock


@dataclass
class PassShare:
    """A pass's part in sharing."""

    ranks: int = 1
    """Ranks of its job; with one, no block stays for others."""
    asked: dict[BlockPlace, Asked] = field(default_factory=dict)
    """Places that are not ready."""
    making: dict[int, SharedGroup] = field(default_factory=dict)
    """Groups that this pass makes, by the number of their work."""
    numbers: Iterator[int] = field(default_factory=count)
    """Of its work; no other pass has the same, as a block may be made again for any that shares it."""
    given: int = 0
    own: int = 0
    """How many batches it was given, and how many of these it has made."""

    @property
    def made_share(self) -> float:
        return self.own / self.given if self.given else 1.0


@dataclass(eq=False)
class SharedGroup:
    """Batches that are made together, as one block."""

    share: PassShare
    """That of the pass that makes it."""
    digests: tuple[bytes, ...] = ()
    block: ReadyBlock | None = None
    """None until it is made."""
    takers: dict[tuple[Any, BlockPlace], None] = field(default_factory=dict)
    """Passes that still need it, and for which place."""
    taken: int = 0
    """How many of its batches were given, to all passes together."""
    alone: bool = True
    """Whether no second pass has asked for it."""


class Part(NamedTuple):
    """Batches `start` … `stop`-1 of a group; of a stream's block, the whole."""

    group: SharedGroup
    start: int = 0
    stop: int | None = None


class Asked(NamedTuple):
    """What a pass has asked for as one place."""

    shard: Shard
    parts: list[Part]


class SharedBatches:
    """Part of an attempt, guarded by the service's lock.

    Args:
        budget_bytes: most bytes of blocks that stay for ranks that have not asked yet.
        ready: called with a pass, a place and its parts, as soon as all of these are made.
    """

    def __init__(
        self, budget_bytes: int, ready: Callable[[Any, BlockPlace, list[Part]], None]
    ) -> None:
        self._budget_bytes, self._ready = budget_bytes, ready
        self._groups: dict[bytes, tuple[SharedGroup, int]] = {}
        """By a batch's digest: its group and its place there."""
        self._apart: set[str] = set()
        """Loaders that have asked for the rank, by their content: what they make is for one rank alone."""
        self._spent_bytes = 0
        self._spent: dict[SharedGroup, int] = {}
        """Groups that no present pass needs, the oldest first, and their bytes."""

    def order(self, pass_: Any, place: BlockPlace, shard: Shard) -> None:
        """Find the batches of a place in groups; those from the first new one on become work of the pass."""
        parts: list[Part] = []
        request, at = shard.items[0], 0
        digests: tuple[bytes, ...] = request.digests
        shares = pass_.loader not in self._apart
        while shares and at < len(digests) and digests[at] in self._groups:
            group, start = self._groups[digests[at]]
            stop = start
            while group.digests[stop : stop + 1] == digests[at : at + 1] != ():
                stop, at = stop + 1, at + 1
            parts.append(Part(group, start, stop))
            group.alone = False
            self._unspend(group)
        if at < len(digests):
            group, number = SharedGroup(pass_.share, digests[at:]), next(pass_.share.numbers)
            if shares:
                self._groups |= {each: (group, n) for n, each in enumerate(group.digests)}
            parts.append(Part(group, 0, len(group.digests)))
            rest = request._replace(batches=request.batches[at:], digests=group.digests)
            pass_.share.making[number] = group
            pass_.add(Work(number, replace(shard, items=(rest,))))
        for part in parts:
            part.group.takers[pass_, place] = None
        pass_.share.asked[place] = Asked(shard, parts)
        self._settle(pass_, place)

    def _settle(self, pass_: Any, place: BlockPlace) -> None:
        asked = pass_.share.asked.get(place)
        if asked is not None and all(part.group.block is not None for part in asked.parts):
            del pass_.share.asked[place]
            self._ready(pass_, place, asked.parts)

    def made(self, pass_: Any, block: ReadyBlock) -> None:
        group = pass_.share.making.pop(block.report.shard)
        group.block = block
        if block.report.own:
            self._apart.add(pass_.loader)
            self._forget(group)
            self._order_again([each for each in group.takers if each[0].share is not group.share])
        for taker, place in list(group.takers):
            self._settle(taker, place)

    def failed(self, pass_: Any, number: int, reason: str) -> None:
        """The group of this work cannot be made."""
        group = pass_.share.making.pop(number)
        self._forget(group)
        for taker, place in list(group.takers):
            taker.failed[place] = reason
            for part in taker.share.asked.pop(place).parts:
                self._leave(part.group, taker, place)

    def taken(self, pass_: Any, place: BlockPlace, parts: list[Part]) -> None:
        """A pass has been given a place."""
        for group, start, stop in parts:
            batches = 1 if stop is None else stop - start
            group.taken += batches
            pass_.share.given += batches
            pass_.share.own += batches if group.share is pass_.share else 0
            self._leave(group, pass_, place)

    def _leave(self, group: SharedGroup, pass_: Any, place: BlockPlace) -> None:
        group.takers.pop((pass_, place), None)
        if group.takers or group.block is None or not self._offers(group):
            return
        ranks = group.share.ranks
        if ranks == 1 or group.taken >= ranks * len(group.digests):
            self._forget(group)
            return
        self._unspend(group)
        self._spent[group] = size = group.block.report.bytes_out
        self._spent_bytes += size
        while self._spent_bytes > self._budget_bytes:
            oldest = next(iter(self._spent))
            if oldest.alone:
                oldest.share.ranks = 1  # no other rank wants the same
            self._forget(oldest)

    def _offers(self, group: SharedGroup) -> bool:
        """Whether a pass that asks now can get it."""
        return any(self._groups.get(each, (None,))[0] is group for each in group.digests)

    def _unspend(self, group: SharedGroup) -> None:
        self._spent_bytes -= self._spent.pop(group, 0)

    def _forget(self, group: SharedGroup) -> None:
        self._unspend(group)
        for each in group.digests:
            if self._groups.get(each, (None,))[0] is group:
                del self._groups[each]

    def leave_hosts(self, hosts: Collection[str]) -> None:
        """Hosts are to end: they do not wait for blocks that no present pass needs."""
        for group in list(self._spent):
            if cast(ReadyBlock, group.block).node in hosts:
                self._forget(group)

    def close(self, pass_: Any) -> None:
        """A pass has ended: what others need of its work becomes theirs.

        Nobody else gets its blocks: a later pass with the same seeds reads its records anew.
        """
        unmade = list(pass_.share.making.values())
        pass_.share.making.clear()
        for group in {group for group, _ in self._groups.values() if group.share is pass_.share}:
            self._forget(group)
        left = {place: asked.parts for place, asked in pass_.share.asked.items()} | pass_.ready
        pass_.share.asked.clear()
        for place, parts in left.items():
            for part in parts:
                self._leave(part.group, pass_, place)
        self._order_again(dict.fromkeys(each for group in unmade for each in group.takers))

    def _order_again(self, places: Iterable[tuple[Any, BlockPlace]]) -> None:
        for taker, place in places:
            asked = taker.share.asked.pop(place)
            for part in asked.parts:
                part.group.takers.pop((taker, place), None)
            self.order(taker, place, asked.shard)


def blocks_of(places: Iterable[list[Part]]) -> list[ReadyBlock]:
    blocks = (part.group.block for parts in places for part in parts)
    return list(dict.fromkeys(block for block in blocks if block is not None))


def slice_of(part: Part) -> tuple[BlockSlice, int, int | None, bool]:
    """Block, batches in it, and whether nobody else uses it."""
    group, start, stop = part
    block = cast(ReadyBlock, group.block)
    alone = group.alone and (group.share.ranks == 1 or not group.digests)
    return block.part(0, block.report.rows), start, stop, alone
