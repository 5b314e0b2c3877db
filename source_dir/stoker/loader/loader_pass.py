"""Head: open passes over loaders, and their batches that are ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import cast

from stoker.protocol import BlockPlace, PassPlan
from stoker.serve.attempt import Attempt, Locks
from stoker.serve.items import Held, Holdings, Numbered, ReadyBlock
from stoker.serve.passes import Pass
from stoker.serve.planner import Planner
from stoker.serve.pool import Pool
from stoker.serve.recovery import Suspects

STREAM_AHEAD = 4
"""Batches that one worker of an iterable dataset may be ahead."""


@dataclass(eq=False, kw_only=True)
class LoaderPass(Pass):
    """One iteration over one loader, by one rank: gives its script whole batches, in the script's order.

    Of a map-style dataset, a shard is a group of batches. Of an iterable one, it is a stream: what one worker
    reads (`get_worker_info`). The chain worker that opens a stream reads it to its end. It may have several
    open, also of other passes, and makes a batch of the one that is needed most.
    """

    ready: dict[BlockPlace, ReadyBlock] = field(default_factory=dict)
    given: dict[BlockPlace, ReadyBlock] = field(default_factory=dict)
    """What the script is fetching, before it takes `next`."""
    failed: dict[BlockPlace, str] = field(default_factory=dict)
    next: BlockPlace = (0, 0)
    known: int = 0
    """Number of submitted shards; calls of a script can overtake each other."""
    total: int | None = None
    stall_key: str = "stall_timeout_s"
    readers: dict[int, str] = field(default_factory=dict)

    @property
    def held(self) -> Held:
        return Held(sum(block.report.bytes_out for block in self.ready.values()))

    @property
    def needed(self) -> list[ReadyBlock]:
        return [*self.ready.values(), *self.given.values()]

    @property
    def ended(self) -> bool:
        return self.complete()

    @property
    def rows_ahead(self) -> int:
        if self.streams:
            return len(self.ready) // self.streams
        first = self.next[0]
        return next(n for n in count() if (first + n, 0) not in self.ready)

    def submit(self, shards: list[Numbered], total: int | None) -> None:
        self.work += [(n, replace(shard, home=self.readers.get(n, "")), skip) for n, shard, skip in shards]
        self.known += len(shards)
        self.total = self.total if total is None else total
        self.listing = self.total is None or self.known < self.total

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
        best = min(short, key=lambda work: (work[0] != self.next[0], self.ahead_of(work[0])))
        self.work.remove(best)
        self.work.appendleft(best)
        return True

    @property
    def waited_for(self) -> bool:
        return bool(self.work and self.work[0][0] == self.next[0])

    def is_reader(self, worker: str) -> bool:
        return bool(self.streams and self.readers.get(self.work[0][0]) == worker)

    def far_ahead(self, shard: int) -> bool:
        return self.ahead_of(shard) >= STREAM_AHEAD

    def begin(self, shards: list[Numbered], worker: str = "") -> None:
        super().begin(shards, worker)
        if self.streams:
            self.readers |= {number: worker for number, _, _ in shards}


class LoaderAttempt(Attempt):
    """Ends when work fails for good; the next pass starts another attempt.

    `copies`, with `persistent_workers`: by split, the chain worker with each stream's copy of the dataset.
    """

    in_order = False
    idle = False
    """Whether no pass has been open for a while; a script may open further ones."""

    def __init__(
        self,
        number: int,
        pool: Pool,
        budget_bytes: int,
        numbers: count[int],
        holdings: Holdings,
        locks: Locks,
        note: Callable[[str], None],
        copies: dict[str, dict[int, str]],
    ) -> None:
        super().__init__(number, locks, Suspects())
        self._note, self.copies = note, copies
        self.passes: dict[str, LoaderPass] = {}
        self._opened = count(1)
        self.planner: Planner = Planner(self, pool, budget_bytes, numbers, holdings)

    @property
    def all_produced(self) -> bool:
        return self.idle

    def note(self, text: str) -> None:
        self._note(text)

    def fail(self, reason: str) -> None:
        super().fail(self._named(reason))

    def stalled(self, pass_: Pass, reason: str) -> None:
        """As the base's, but this pass alone fails: others may have longer deadlines."""
        mine = cast(LoaderPass, pass_)
        with self.changed:
            mine.failed[mine.next] = self._named(reason)
            self.ready.notify_all()

    def _named(self, reason: str) -> str:
        for each in self.passes.values():
            reason = reason.replace(f"{each.plan.split} shard", "DataLoader")
        return reason

    def open_passes(self) -> list[LoaderPass]:
        """As the base's: the one least ahead first, because scripts may wait for any of them."""
        return sorted(self.passes.values(), key=lambda each: each.rows_ahead)

    def bound(self) -> set[str]:
        readers = [*self.copies.values(), *(each.readers for each in self.passes.values())]
        return {worker for each in readers for worker in each.values()}

    def open(self, key: str, split: str, streams: int, stall_s: float) -> None:
        number = next(self._opened)
        plan = PassPlan(seed=number, epoch=0, split=split, shuffle=False, block_records=1)
        readers = self.copies.get(split, {})
        self.passes[key] = pass_ = LoaderPass(
            plan=plan, number=number, streams=streams, readers=readers, stall_s=stall_s
        )
        self.idle = False
        self.planner.passes.append(pass_)

    def submit(self, key: str, shards: list[Numbered], total: int | None) -> None:
        if (pass_ := self.passes.get(key)) is not None:
            pass_.submit(shards, total)
            self.has_work.notify(max(len(shards), 1))

    def close(self, key: str) -> None:
        if (pass_ := self.passes.pop(key, None)) is not None:
            self.planner.abandon(pass_)
            self.changed.notify_all()

    def deliver(self, pass_: Pass, block: ReadyBlock) -> None:
        report, mine = block.report, cast(LoaderPass, pass_)
        place = report.shard, report.nth
        if report.bad:
            mine.failed[place] = report.bad[0].reason
        elif report.rows:
            mine.ready[place] = block
        self.changed.notify_all()
        if place == mine.next:
            self.ready.notify_all()

    def produced(self, pass_: Pass) -> None:
        self.ready.notify_all()
