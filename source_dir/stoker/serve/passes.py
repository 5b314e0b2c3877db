"""Head: a pass and an attempt while they are produced, and what the passes of a job read, in which order."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from stoker.config.schema import Config
from stoker.errors import DataError, Failure, SchemaError
from stoker.events import kinds
from stoker.protocol import DataCursor, PassPlan, Plan, Schema, Shard, Work
from stoker.read.host_cache import CacheSpec, homes_of
from stoker.read.sources import IndexedShards, IndexedSource
from stoker.serve.accounting import ChainCosts
from stoker.serve.items import Holdings, Numbers, ReadyBlock, Rest
from stoker.serve.pool import CacheAffinity, Pool
from stoker.serve.shards import DatasetSource, Setup, order_of
from stoker.serve.suspects import Suspects


@dataclass
class OpenShard:
    due: int
    """Index of the block that the pass takes next."""
    made: dict[int, ReadyBlock] = field(default_factory=dict)
    closed: bool = False


@dataclass(eq=False, kw_only=True)
class Pass(ABC):
    """One epoch of one split, or one iteration over a loader; the service's lock guards it.

    Here it is produced: chain workers begin its work, and their blocks wait for their turn. `RecipePass` and
    `LoaderPass` differ in how they give out rows or batches.
    """

    plan: PassPlan
    number: int
    """With its split, distinguishes it from all other passes."""
    has_shards: bool = True
    """Whether its shards are known before reading; those of a `ray.data.Dataset` are not."""
    coming: Future[Rest] | None = None
    """Its shards until they are known; None: they are, or come one by one."""
    rest: Rest = field(default_factory=Rest)
    """Shards that are not in `work` yet; they follow those."""
    work: deque[Work] = field(default_factory=deque)
    """The next shards that are not started, in pass order."""
    turn: int = 0
    """Number of the first undelivered shard; used if the order is exact."""
    shards: dict[int, OpenShard] = field(default_factory=dict)
    delivered: Numbers = field(default_factory=Numbers)
    """Completed shards, also those of the attempts before."""
    quarantined: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """By shard: bad records of a block of which the attempts before consumed rows, name → reason."""
    under_way: int = 0
    """Items in progress or queued for a retry."""
    shards_under_way: int = 0
    """Number of shards that those items started with."""
    served: int = -1
    """Number of the latest item; a later one has a higher number."""
    skipped: float = -math.inf
    """When one of its streams was last read again up to its place."""
    listing: bool = True
    streams: int = 0
    """Number of streams: shards that one chain worker each reads from beginning to end; 0: any may continue a
    shard."""
    step_rows: int = 1
    stall_s: float = 600.0
    stall_key: str = "data.stall_timeout_s"

    @property
    def key(self) -> tuple[str, int]:
        return self.plan.split, self.number

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of the blocks that are delivered and still needed."""

    @property
    @abstractmethod
    def needed(self) -> list[ReadyBlock]:
        """The blocks that are delivered and still needed, the first needed first."""

    @property
    @abstractmethod
    def rows_ahead(self) -> int:
        """Rows delivered beyond what every consumer has requested."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether all rows have arrived."""

    @property
    def waited_for(self) -> bool:
        """Whether a consumer waits for the first shard in `work`; the budget does not hold that back."""
        return False

    def offers(self, worker: str, lost: Callable[[str], bool]) -> bool:
        """Whether there is work for a chain worker, then the first in `work`; `lost` tells who has ended."""
        return self.left > 0

    def is_reader(self, worker: str) -> bool:
        """Whether the first work is a stream that this chain worker has open: nobody else continues it."""
        return False

    def far_ahead(self, shard: int) -> bool:
        return False

    def listed(self) -> bool:
        if self.coming is not None and self.coming.done():
            self.rest = self.coming.result()
            self.delivered = Numbers(self.rest.done.ranges)
            self.coming, self.listing = None, False
        return self.coming is None

    @property
    def left(self) -> int:
        return len(self.work) + self.rest.left

    def near(self, count: int) -> deque[Work]:
        """`work` with at least so many shards, if so many are left."""
        self.work += self.rest.take(count - len(self.work))
        return self.work

    def begin(self, shards: list[Work], worker: str = "") -> None:
        for each in shards:
            if each.number not in self.delivered:
                self.shards.setdefault(each.number, OpenShard(each.skip))

    def report(self, block: ReadyBlock) -> bool:
        """Record a preprocessed block; False if it was already recorded."""
        report = block.report
        shard = self.shards.get(report.shard)
        if shard is None or report.nth < shard.due or report.nth in shard.made:
            return False
        shard.made[report.nth] = block
        return True

    def close(self, number: int) -> None:
        """Mark a shard as read to its end; it may have no further block, as when it is empty."""
        if (shard := self.shards.get(number)) is not None:
            shard.closed = True

    def deliverable(self, number: int) -> list[ReadyBlock]:
        if not self.plan.exact:
            return self._of(number)
        found: list[ReadyBlock] = []
        while True:
            self.turn = self.delivered.absent_from(self.turn)
            found += self._of(self.turn)
            if self.turn not in self.delivered:
                return found

    def _of(self, number: int) -> list[ReadyBlock]:
        found: list[ReadyBlock] = []
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

    def early(self) -> list[ReadyBlock]:
        """Blocks that wait for their turn."""
        return [block for shard in self.shards.values() for block in shard.made.values()]

    def complete(self) -> bool:
        return self.listed() and not (self.listing or self.left or self.under_way or self.shards)


@dataclass
class ServiceState:
    """What the attempts of a service share, with the conditions of its one lock."""

    event: Callable[[kinds.Event], None]
    budget_bytes: int
    """Above so many bytes of ready blocks and beyond two steps, nothing more starts."""
    chain: dict[str, ChainCosts]
    affinity: CacheAffinity | None = None

    def __post_init__(self) -> None:
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        """Threads that decide what to produce wait on it."""
        self.has_work = threading.Condition(lock)
        """Chain workers wait on it for work."""
        self.stopping = threading.Condition(lock)
        """Notified by a request to stop, and when a train worker has answered it."""
        self.ready = threading.Condition(lock)
        """Consumers wait on it for their rows; the block that completes a step wakes them."""
        self.pool, self.holdings, self.suspects = Pool(), Holdings(), Suspects()
        self.numbers = count()
        """Numbers claims and work items."""


class Attempt(ABC):
    """Passes that one planner produces, until their work fails for good."""

    in_order = True
    """Whether a pass is begun only once enough of those before it is ready."""

    def __init__(self, number: int, shared: ServiceState) -> None:
        self.number, self.shared = number, shared
        self.suspects = shared.suspects
        self.failure: Failure | None = None
        self._differing: set[str] = set()
        self.replaced = False

    @property
    def over(self) -> bool:
        return self.replaced or self.failure is not None

    @property
    @abstractmethod
    def all_produced(self) -> bool:
        """Whether no further pass is to be produced."""

    @abstractmethod
    def open_passes(self) -> Sequence[Pass]:
        """The passes that may be produced now, the most urgent first."""

    def begun(self) -> list[Pass]:
        """Passes that begin to be produced now."""
        return []

    def bound(self) -> set[str]:
        """Chain workers with a state that no other has."""
        return set()

    @abstractmethod
    def deliver(self, pass_: Pass, block: ReadyBlock) -> None:
        """Planner's call: a block in its turn."""

    @abstractmethod
    def produced(self, pass_: Pass) -> None:
        """Planner's call: a pass has delivered all its blocks."""

    def note(self, text: str) -> None:
        with self.shared.changed:
            self.shared.event(kinds.Note(text=text))

    def differs(self, split: str, block: str) -> None:
        """A block that is made again has the same records as before, but other values; say so once."""
        if split not in self._differing:
            self._differing.add(split)
            self.note(
                f"{block} has other values than before: its chain has changed, or does not give the same"
                " twice, so that data.order=exact does not repeat this run; `peek` shows the stage"
            )

    def fail(self, failure: Failure) -> None:
        with self.shared.changed:
            self.failure = self.failure or failure
            self.shared.changed.notify_all()
            self.shared.ready.notify_all()

    def stalled(self, pass_: Pass, reason: str) -> None:
        """A pass has waited longer than its `stall_s`: raises if that ends this attempt."""
        raise DataError(reason, key=pass_.stall_key)

    def repeats(self, split: str, task: str) -> None:  # noqa: B027 - a script has no such account
        """Work is done again, because its host or process was lost."""

    def task_starts(self, split: str, task: str, retry: int) -> tuple[float, bool] | None:
        """Work starts that was started before: as `Suspects.starts`; None: do not start it."""
        if retry:
            self.repeats(split, task)
        try:
            start = self.suspects.starts(task, split, retry)
            self.refuse_deadly(split)
        except DataError as error:
            self.fail(error.failure)
            return None
        return start

    def refuse_deadly(self, split: str) -> None:  # noqa: B027 - a script has no such account
        """Fail if too many records have killed their process."""


class Passes:
    """Head: (split, epoch) → its plan and its shards."""

    def __init__(
        self,
        config: Config,
        sources: dict[str, Any],
        chains: dict[str, bytes],
        cache: CacheSpec | None = None,
        kept: dict[str, str] | None = None,
        schemas: dict[str, tuple[Schema, ...]] | None = None,
        share: float | None = None,
    ) -> None:
        self.config, self.sources, self.chains = config, sources, chains
        self.share = share
        """Share of the records of those splits that is cached; None: no cache."""
        self.cache = cache
        self.kept = kept or {}
        """Splits cached across epochs → cache key of their results."""
        self.schemas = {split: found for split, found in (schemas or {}).items() if found}
        """Required schema of each split; for a split without one, the run's first block sets it."""

    def identity(self, fingerprint: str, validation: str | None = None) -> Plan:
        data = self.config.data
        return Plan(
            seed=self.config.seed,
            shuffle=data.shuffle,
            order=data.order,
            block_records=data.block_records,
            fingerprint=fingerprint,
            validation=validation,
            homes=self._homes("train"),
            bucket_by=data.bucket_by,
            cache_share=self.share,
        )

    def _homes(self, split: str) -> int:
        if split not in self.kept:
            return 0
        return homes_of(self.sources[split].count(), self.config.data.block_records)

    def agree(self, split: str, found: tuple[Schema, ...]) -> Schema:
        """The schema that every block of a split must have; call with the service's lock held."""
        agreed = self.schemas.setdefault(split, found)
        for here, there in zip(agreed, found, strict=True):
            if difference := here.difference(there):
                raise SchemaError(
                    f"the {split} split has blocks with different columns: {difference}; make the chain give"
                    " every record the same columns"
                )
        return agreed[-1]

    def has_shards(self, split: str) -> bool:
        return not isinstance(self.sources[split], DatasetSource)

    def setup(self, split: str) -> Setup:
        cache = self.cache if split in self.kept else None
        key, source = self.kept.get(split, ""), self.sources[split].for_workers()
        return Setup(source, self.chains[split], cache, key)

    def plan(self, split: str, epoch: int, start: DataCursor | None) -> PassPlan:
        config = self.config.data
        return PassPlan(
            seed=self.config.seed,
            # Validation is the same in every epoch.
            epoch=epoch if split == "train" else 0,
            split=split,
            shuffle=config.shuffle and split == "train",
            # A resumed epoch keeps the block size and homes that it began with.
            block_records=start.plan.block_records if start else config.block_records,
            homes=start.plan.homes if start else self._homes(split),
            exact=config.order == "exact",
        )

    def shards(self, plan: PassPlan) -> Sequence[Shard]:
        order = order_of(plan.seed, plan.epoch) if plan.shuffle else None
        source = self.sources[plan.split]
        homes = {"homes": plan.homes} if isinstance(source, IndexedSource) else {}
        shards: Sequence[Shard] = source.shards(plan.block_records, order, **homes)
        # A user's source may permute its list again for the next pass.
        return shards if isinstance(shards, IndexedShards) else [*shards]

    def rest(self, plan: PassPlan, start: DataCursor | None) -> Rest:
        if start is None:
            return Rest(self.shards(plan))
        skip = {number: blocks for number, (blocks, _) in start.partial.items()}
        return Rest(self.shards(plan), start.done, skip)

    def blocks(self, plan: PassPlan) -> Iterator[Work]:
        """Like `rest`, for a recipe's dataset: one by one while Ray Data executes it."""
        seed = plan.seed * 100_003 + plan.epoch if plan.shuffle else None
        for number, shard in enumerate(self.sources[plan.split].blocks(seed, plan.exact)):
            yield Work(number, shard)
