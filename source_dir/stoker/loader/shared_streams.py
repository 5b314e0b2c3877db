"""Head: streams that several ranks read whole, each for a part of every group of batches, made once.

Accelerate's IterableDatasetShard lets each rank read all records and drop those of the others. Passes of ranks
whose streams depend on the same, but for the part, are gathered. Once all ranks of the job are there, one pass
makes the batches of all their parts, and each rank's own pass is given its blocks.

Ranks read alone what is not proved to be the same: if they do not gather in time, if the code asks for the
rank, or if reading draws from generators that the parts' batches have left in different states. So does a rank
that takes nothing while others wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from stoker.loader.loader_pass import STREAM_AHEAD, LoaderPass
from stoker.loader.shared import Part, SharedGroup
from stoker.protocol import Shard
from stoker.serve.items import Numbers, ReadyBlock

GATHER_S, LEAST_GATHER_S = 10.0, 0.5
"""How long a rank waits for the others; half of it after each time that it was in vain."""
LAG_SHARE = 0.5
"""Share of `stall_s` after which a rank that has taken nothing does not hold up others any more."""


class WantedPart(NamedTuple):
    """Script → service."""

    digest: bytes
    """Of all that the streams depend on, but the part."""
    parts: int
    part: int
    ranks: int
    """How many read these streams; several may want the same part."""


@dataclass(eq=False)
class RankOfStreams:
    """A rank's pass, and what it would read alone."""

    key: str
    pass_: LoaderPass
    wanted: WantedPart
    shards: list[tuple[int, Shard, int]]
    total: int | None
    since: float = field(default_factory=time.monotonic)

    @property
    def served(self) -> int:
        """Passes that the same copies of the dataset have served."""
        return max((int(shard.items[0].served) for _, shard, _ in self.shards), default=0)

    def lags(self, now: float) -> bool:
        """Whether it lets others wait: the streams do not go on until it takes what it has."""
        most = max(map(self.pass_.ahead_of, range(self.pass_.streams)))
        late = now - self.pass_.took > LAG_SHARE * self.pass_.stall_s
        return late and most >= STREAM_AHEAD and not self.pass_.waits


@dataclass(eq=False, kw_only=True)
class SharedPass(LoaderPass):
    """Makes the batches of all parts."""

    members: list[RankOfStreams]
    parts: tuple[int, ...]
    """Those that the members want, in the order of a group's blocks."""
    divided: bool = False
    """Whether its ranks are to read alone."""

    @property
    def rows_ahead(self) -> int:
        return min((each.rows_ahead for each in self.takers), default=0)

    def ahead_of(self, stream: int) -> int:
        return max((each.ahead_of(stream) for each in self.takers), default=0)

    def far_ahead(self, shard: int) -> bool:
        return self.divided or super().far_ahead(shard)

    def waits_for(self, stream: int) -> bool:
        return any(each.waits and each.waits_for(stream) for each in self.takers)

    @property
    def takers(self) -> list[LoaderPass]:
        return [each.pass_ for each in self.members]

    def give_out(self, block: ReadyBlock) -> None:
        report = block.report
        nth, place = divmod(report.nth, len(self.parts))
        place_there = report.shard, nth
        self.divided |= report.own
        if report.bad:
            for taker in self.takers:
                taker.failed[place_there] = report.bad[0].reason
        elif not self.divided:
            mine = [m.pass_ for m in self.members if m.wanted.part == self.parts[place]]
            part = Part(SharedGroup(self.share, block=block, alone=len(mine) == 1))
            for taker in mine:
                taker.ready[place_there] = [part]
            if report.last:
                for taker in self.takers:
                    taker.delivered.add(report.shard)


class SharedStreams:
    """Part of an attempt, guarded by the service's lock."""

    def __init__(self, attempt: Any) -> None:
        self._attempt = attempt
        self._gathering: dict[tuple[bytes, str], list[RankOfStreams]] = {}
        """By digest, and by the split of the shared copies of the dataset that served the pass before."""
        self._passes: dict[str, SharedPass] = {}
        self._apart: set[str] = set()
        """Loaders that were divided, by their content."""
        self._gather_s = GATHER_S

    def enter(self, member: RankOfStreams) -> None:
        pass_, wanted, split = member.pass_, member.wanted, self._shared_split(member)
        if pass_.loader in self._apart or (member.served and not split):
            self._read_alone(member)
            return
        place = wanted.digest, split
        self._gathering.setdefault(place, []).append(member)
        if split or len(self._gathering[place]) == wanted.ranks:
            self._gather_s = GATHER_S
            self._begin(place)
            return
        # All ranks may be there, and want different streams.
        of = [p for p, each in self._gathering.items() if each[0].pass_.loader == pass_.loader]
        if sum(len(self._gathering[each]) for each in of) == wanted.ranks:
            for each in of:
                self._begin(each)

    def _shared_split(self, member: RankOfStreams) -> str:
        """Names the copies of a dataset that serve all passes, if they are shared."""
        copies = self._attempt.copies
        mine = copies.get(member.pass_.plan.split)
        shared = (split for split, found in copies.items() if found is mine and split[-1] == "+")
        return next(shared, "") if member.served else ""

    def _begin(self, place: tuple[bytes, str]) -> None:
        """Read for those who are there; copies that served all before wait for all of them."""
        members, copies = self._gathering[place], self._attempt.copies
        mine = copies.get(place[1])
        if len(members) < sum(
            found is mine and split[-1] != "+" for split, found in copies.items()
        ):
            return
        first = min(members, key=lambda each: (each.wanted.part, each.key))
        split = place[1] or f"{first.pass_.plan.split}+"
        if any(each.plan.split == split for each in self._passes.values()):
            return  # those copies serve another pass still
        del self._gathering[place]
        if len(members) == 1 and not place[1]:
            self._read_alone(first)
            return
        if first.pass_.plan.split in copies:
            found = copies.setdefault(split, {})
            copies |= {each.pass_.plan.split: found for each in members}
        key, parts = f"{first.key}+", tuple(sorted({each.wanted.part for each in members}))
        mine = {"of": SharedPass, "members": members, "parts": parts}
        stall_s = first.pass_.stall_s
        shared = self._attempt.open(key, split, first.pass_.streams, stall_s, **mine)
        self._passes[key] = shared
        shared.where = first.pass_.where
        for each in members:
            each.pass_.share = shared.share
        shards = [
            (n, replace(shard, items=(shard.items[0]._replace(wanted=parts),)), skip * len(parts))
            for n, shard, skip in first.shards
        ]
        self._attempt.submit(key, shards, first.total)

    def _read_alone(self, member: RankOfStreams) -> None:
        """From its place, as if it had been alone from the beginning."""
        pass_ = member.pass_
        split = pass_.plan.split
        if split in self._attempt.copies and not member.served:
            self._attempt.copies[split] = pass_.readers = {}
        over = {n for n, *_ in member.shards if n in pass_.delivered and not pass_.ahead_of(n)}
        pass_.ready.clear()
        pass_.delivered = Numbers()
        for number in over:
            pass_.delivered.add(number)
        shards = [(n, shard, skip + pass_.taken[n]) for n, shard, skip in member.shards]
        self._attempt.submit(
            member.key, [each for each in shards if each[0] not in over], member.total
        )

    def look(self, now: float) -> None:
        for place, members in list(self._gathering.items()):
            if now - members[0].since > min(self._gather_s, members[0].pass_.stall_s / 4):
                self._gather_s = max(self._gather_s / 2, LEAST_GATHER_S)
                self._begin(place)
        for key, pass_ in list(self._passes.items()):
            held_up = any(each.waits for each in pass_.takers)
            self._apart |= {pass_.loader} if pass_.divided else set()
            for each in list(pass_.members):
                each.pass_.skipped = pass_.skipped
                if pass_.divided or (held_up and each.lags(now)):
                    self._leave(key, each)
                    self._read_alone(each)

    def close(self, key: str) -> None:
        """A pass has ended."""
        for place, members in list(self._gathering.items()):
            self._gathering[place] = left = [each for each in members if each.key != key]
            if not left:
                del self._gathering[place]
        for shared, pass_ in list(self._passes.items()):
            for each in [each for each in pass_.members if each.key == key]:
                self._leave(shared, each)

    def _leave(self, key: str, member: RankOfStreams) -> None:
        self._passes[key].members.remove(member)
        if not self._passes[key].members:
            del self._passes[key]
            self._attempt.close(key)
