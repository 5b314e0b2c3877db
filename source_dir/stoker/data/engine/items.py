"""Head: a pass in production: what is left of it, what is in work, and what waits for its turn; pure."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.data.messages import BlockReport, EpochPlan, Shard

if TYPE_CHECKING:
    from stoker.data.coordinator.streams import Stream
    from stoker.loader.attempt import LoaderPass

Numbered = tuple[int, Shard, int]
"""As `Passes.shards` gives them: number, shard, blocks to skip."""


ITEM_S = 1.0
"""Aimed-at duration of an item: long against the 0.1 s of a round of Ray Data's scheduler."""
SLOTS_PER_SECOND = 500
"""With more slots than this items last longer, so that the head is asked no more often."""
MOST_SHARDS = 16
"""Shards of one item at most."""


def shards_per_item(left: int, slots: int, shard_s: float | None, single: bool) -> int:
    """Head: as many as fill `ITEM_S`, but so that what is left still spreads over all slots.

    Args:
        left: shards that nobody has begun.
        slots: chain workers.
        shard_s: what a shard takes; None where nobody knows.
        single: see `Line`.
    """
    seconds = ITEM_S * max(1.0, slots / SLOTS_PER_SECOND)
    fill = int(seconds / shard_s) if shard_s else 1
    return 1 if single else max(1, min(fill, left // (2 * max(slots, 1)), MOST_SHARDS, left))


@dataclass(eq=False)
class Item:
    """Head: some shards, read by one chain worker. What it has not reported can be read again elsewhere, from
    the block on that comes next."""

    line: Line
    name: str
    """For people, and for the questions of chain workers."""
    shards: list[Numbered]
    """What has not been reported yet."""
    store: list[bool]
    """For each of these, whether the host keeps its records."""
    node: str = ""
    process: str = ""
    """Actor id of the chain worker."""
    seconds: float = 0.0
    tried: set[str] = field(default_factory=set)
    """Nodes where it went wrong."""
    failures: int = 0
    """How often it could not be read."""
    late: int = 0
    """How often it did not answer in time."""
    not_before: float = 0.0
    quiet_since: float = field(default_factory=time.monotonic)
    """Since when its chain worker has reported nothing."""
    stuck_since: float = field(default_factory=time.monotonic)
    """The same, wherever it was tried."""

    def __post_init__(self) -> None:
        self.count = len(self.shards)

    def begun(self, node: str, process: str) -> None:
        """A chain worker has claimed it."""
        self.node, self.process = node, process
        self.quiet_since = time.monotonic()

    def reported(self, report: BlockReport) -> list[int]:
        """A block was made: that much is not to be read again.

        Returns:
            Shards before that of the block, of which nothing more comes.
        """
        self.quiet_since = self.stuck_since = time.monotonic()
        at = next((n for n, shard in enumerate(self.shards) if shard[0] == report.shard), None)
        if at is None or report.nth < self.shards[at][2]:
            return []  # made again after its process died
        passed = [shard for shard, _, _ in self.shards[:at]]
        del self.shards[:at], self.store[:at]
        number, shard, _ = self.shards[0]
        self.shards[0] = (number, shard, report.nth + 1)
        if report.last:
            del self.shards[0], self.store[0]
        self.seconds += report.seconds
        return passed


@dataclass(eq=False)
class Ticket:
    """Head: what a ticket was given. Ray starts it again where its process died or its blocks were lost with
    their host: then it makes the same blocks."""

    item: Item
    shards: list[Numbered]
    store: list[bool]
    claims: int = 0
    """How often it was claimed: every time but the first its process had died, or blocks were lost."""
    made: int = 0
    """Blocks with rows that were reported."""
    limit: int | None = None
    """So many blocks are all that it is to make: the rest was given to another."""


class Made(NamedTuple):
    """Head: a reported block."""

    report: BlockReport
    node: str
    reference: Any
    """None: it has no rows."""


@dataclass
class OpenShard:
    """Head: a shard that has been begun."""

    due: int
    """Which of its blocks is the next for the pass."""
    made: dict[int, Made | None] = field(default_factory=dict)
    """Blocks that wait for their turn; None: reported, and not here yet."""
    closed: bool = False
    """Nothing more comes of it."""


@dataclass(eq=False)
class Line:
    """Head: one pass in production."""

    stream: Stream | LoaderPass
    plan: EpochPlan
    coming: Future[deque[Numbered]] | None
    """Its shards, while they are listed; None: they come one by one."""
    exact: bool
    work: deque[Numbered] = field(default_factory=deque)
    """Shards in the order of the pass that nobody has begun."""
    turns: deque[int] = field(default_factory=deque)
    """Numbers of the shards that have not been delivered, in order; used where the order is exact."""
    shards: dict[int, OpenShard] = field(default_factory=dict)
    delivered: set[int] = field(default_factory=set)
    """Shards of which nothing more comes."""
    under_way: int = 0
    """Items that are in work or are to be read again."""
    shards_under_way: int = 0
    """What they were begun with."""
    listing: bool = True
    """Whether more shards may come."""
    single: bool = False
    """Whether a shard fills a chain worker by itself."""

    def listed(self) -> bool:
        """Whether shards are known."""
        if self.coming is not None and self.coming.done():
            for shard in self.coming.result():
                self.add(shard)
            self.coming, self.listing = None, False
        return self.coming is None

    def add(self, shard: Numbered) -> None:
        """A shard more, the next in order."""
        self.work.append(shard)
        self.turns.append(shard[0])

    def begin(self, shards: list[Numbered]) -> None:
        """Shards are in work from now on."""
        for number, _, skip in shards:
            if number not in self.delivered:
                self.shards.setdefault(number, OpenShard(skip))

    def report(self, report: BlockReport, node: str) -> bool:
        """A block was preprocessed; False where it had been before."""
        shard = self.shards.get(report.shard)
        if shard is None or report.nth < shard.due or report.nth in shard.made:
            return False
        shard.made[report.nth] = None if report.rows else Made(report, node, None)
        return True

    def arrived(self, report: BlockReport, node: str, reference: Any) -> None:
        """The block of a report is here."""
        self.shards[report.shard].made[report.nth] = Made(report, node, reference)

    def close(self, number: int) -> None:
        """A chain worker has read a shard to its end without a further block: an empty one, say."""
        if (shard := self.shards.get(number)) is not None:
            shard.closed = True

    def deliverable(self, number: int) -> list[Made]:
        """Blocks whose turn it is, in order.

        Args:
            number: of the shard of which there is something new.
        """
        if not self.exact:
            return self._of(number)
        found: list[Made] = []
        while self.turns:
            found += self._of(self.turns[0])
            if self.turns[0] not in self.delivered:
                break
            self.turns.popleft()
        return found

    def _of(self, number: int) -> list[Made]:
        found: list[Made] = []
        shard = self.shards.get(number)
        while shard is not None and (made := shard.made.get(shard.due)) is not None:
            del shard.made[shard.due]
            shard.due += 1
            shard.closed |= made.report.last
            found.append(made)
        if shard is not None and shard.closed and not shard.made:
            del self.shards[number]
            self.delivered.add(number)
        return found

    def waiting(self) -> list[BlockReport]:
        """Of the blocks that are here and wait for their turn."""
        made = [m for shard in self.shards.values() for m in shard.made.values() if m]
        return [each.report for each in made if each.reference is not None]

    def ended(self) -> bool:
        """Whether everything was delivered."""
        return self.listed() and not (self.listing or self.work or self.under_way or self.shards)
