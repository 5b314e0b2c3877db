"""Whatever chain workers, hosts and Ray do, each block of a pass is delivered once, in its order."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.config.schema import Config
from stoker.data import Shard, Source
from stoker.errors import DataError
from stoker.messages import BlockReport, Claim, DataCursor, Failure, Told
from stoker.serve.accounting import ChainCosts, EpochAccount
from stoker.serve.attempt import Attempt
from stoker.serve.items import Held, ReadyBlock
from stoker.serve.passes import Passes
from stoker.serve.planner import Planner
from stoker.serve.pool import ChainHost, Pool
from stoker.serve.splitter import Splitter
from stoker.serve.streams import Stream
from stoker.serve.suspects import Suspects

PROCESSES = count()
RECORDS = 4
"""Of a group."""


class Shards(Source):
    """Shards of so many groups each; the last group of each is short."""

    random = False

    def __init__(self, groups: list[int]) -> None:
        self.groups = groups

    def shards(self, records: int, order: Any) -> list[Shard]:
        return [Shard(f"s{n}", rows=max(0, RECORDS * g - 1)) for n, g in enumerate(self.groups)]

    def read(self, shard: Shard, order: Any) -> Any:
        raise NotImplementedError

    def count(self) -> int:
        return sum(shard.rows or 0 for shard in self.shards(1, None))


class AtOnce:
    """In place of the thread that lists shards: how often the planner is called must not depend on it."""

    def submit(self, call: Callable[..., Any], *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*given))
        return done

    def shutdown(self, **options: Any) -> None:
        """There is no thread."""


class Head:
    """A planner with its attempt; what is delivered is noted."""

    def __init__(self, groups: list[int], order: str, hosts: int, budget: int) -> None:
        config = Config.model_validate(
            {
                "recipe": "none:None",
                "data": {"block_records": RECORDS, "shuffle": False, "order": order},
                "train": {"epochs": 1, "batch_size": 3},
            }
        )
        self.source = Shards(groups)
        self.passes = Passes(config, {"train": self.source}, {"train": b""})
        self.costs, self.budget, self.numbers = ChainCosts(), budget, count()
        self.pool = Pool()
        self.hosts = [ChainHost(f"h{n}", 2) for n in range(hosts)]
        self.pool.update(self.hosts, False, 0.0)
        self.begin(DataCursor(epoch=0, plan=self.passes.identity("f")))

    def begin(self, start: DataCursor, before: Planner | None = None) -> None:
        """An attempt begins."""
        changed = threading.Condition()
        shared = (changed, changed, {"train": self.costs}, lambda *_, **__: None, None, Suspects())
        self.attempt = Attempt(0, 1, self.passes, {"train": self.source.count()}, start, *shared)
        self.delivered: list[tuple[int, int]] = []
        deliver = self.attempt.deliver

        def note(stream: Any, block: ReadyBlock) -> None:
            assert block.reference == (block.report.shard, block.report.nth)
            self.delivered.append(block.reference)
            deliver(stream, block)

        self.attempt.deliver = note  # type: ignore[method-assign]
        self.attempt.produce(self.pool, self.budget, self.numbers, before)
        assert self.attempt.planner is not None
        self.planner: Planner = self.attempt.planner
        assert self.planner._lister is not None
        self.planner._lister._thread = AtOnce()  # type: ignore[assignment]
        self.stream = self.attempt.streams["train", 0]

    def again(self, step: int) -> DataCursor:
        """A train worker was lost; the last checkpoint is of a step."""
        place = self.stream.position(step, 0)
        self.begin(place, self.planner)
        return place

    def consume(self) -> None:
        """A train worker takes all the steps that are ready."""
        step = self.stream.steps.get(0, 0)
        while not self.stream.splitter.ended and self.stream.splitter.ready(step):
            self.stream.portion(step, 0)
            self.stream.release()
            step += 1


class Worker:
    """A chain worker at a ticket, which makes block after block."""

    def __init__(self, head: Head, ticket: int, node: str, process: str = "") -> None:
        self.head, self.ticket, self.node = head, ticket, node
        self.process = process or f"{node}-{next(PROCESSES)}"
        self.claim: Claim | None = head.planner.claim(ticket, node, self.process)
        self.todo = []
        for work in self.claim.work if self.claim else ():
            groups = head.source.groups[work.number]
            self.todo += [(work.number, nth, nth == groups - 1) for nth in range(work.skip, groups)]
        self.made = 0

    def step(self, under_way: list[Any]) -> bool:
        """Make a block; False where there is nothing left to do."""
        limit = self.claim.blocks if self.claim else 0
        if not self.todo or (limit is not None and self.made >= limit):
            if self.claim:
                self.head.planner.ended(self.ticket)
            return False
        number, nth, last = self.todo.pop(0)
        if not self.made:  # as one whose data lies elsewhere, to fetch its next shard
            self.head.planner.upcoming(self.ticket, self.process)
        rows = RECORDS - last
        ids = sum(range(nth * RECORDS, nth * RECORDS + rows))
        report = BlockReport(number, nth, last, rows, 0.01, rows, ids, bytes_out=10)
        origin = (f"task{self.ticket}", self.made)
        go_on = self.head.planner.reported(self.ticket, report, origin, Told(self.node))
        under_way.append((origin, (number, nth)))
        self.made += 1
        return go_on


@pytest.mark.parametrize("order", ["any", "exact"])
def test_chain_workers_prepare_different_shards_and_are_given_those(order: str) -> None:
    head = Head([2] * 40, order=order, hosts=2, budget=10_000)
    tickets: list[int] = []
    while len(tickets) < 6:
        head.planner.look(time.monotonic())
        tickets += head.planner.issue()
    workers = [Worker(head, tickets.pop(0), f"h{n % 2}", f"process {n}") for n in range(3)]
    told = [head.planner.upcoming(worker.ticket, worker.process) for worker in workers]
    assert None not in told and len(set(told)) == 3
    for worker, shard in reversed(list(zip(workers, told, strict=True))):
        head.planner.ended(worker.ticket)
        again = Worker(head, tickets.pop(0), worker.node, worker.process)
        assert again.claim is not None
        assert again.claim.work[0].shard == shard


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(
    groups=st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any),
    order=st.sampled_from(["any", "exact"]),
    hosts=st.integers(1, 3),
    budget=st.sampled_from([1, 60, 10_000]),
    seed=st.integers(0, 2**32),
)
def test_every_block_once_and_in_order(
    groups: list[int], order: str, hosts: int, budget: int, seed: int
) -> None:
    head, chance = Head(groups, order, hosts, budget), random.Random(seed)
    waiting: list[int] = []
    workers: list[Worker] = []
    under_way: list[Any] = []
    ended: list[Worker] = []
    troubles, losses = 5, 2  # a sixth trouble at the same work would rightly end the run
    done, partial = set[int](), dict[int, tuple[int, int]]()
    for _ in range(5000):
        if head.stream.splitter.ended:
            break
        head.planner.look(time.monotonic())
        for item in head.planner.again:
            item.not_before = 0.0
        waiting += head.planner.issue()
        what = chance.choice(["claim", "step", "step", "arrive", "arrive", "consume", "trouble", "loss"])
        if what == "claim" and waiting and len(workers) < 2 * hosts:
            node = chance.choice(head.hosts).node
            workers.append(Worker(head, waiting.pop(chance.randrange(len(waiting))), node))
        elif what == "step" and workers:
            worker = chance.choice(workers)
            if not worker.step(under_way):
                workers.remove(worker)
                ended.append(worker)
        elif what == "arrive" and under_way:
            head.planner.arrived(*under_way.pop(chance.randrange(len(under_way))))
        elif what == "consume":
            head.consume()
        elif what == "loss" and losses and chance.random() < 0.1:
            losses -= 1  # chain workers go on with what they have, and blocks of the old attempt still arrive
            place = head.again(chance.randint(0, head.stream.steps.get(0, 0)))
            done = {shard for first, stop in place.done for shard in range(first, stop)}
            partial = place.partial
        elif what == "trouble" and troubles and workers:
            troubles -= 1
            worker = workers.pop(chance.randrange(len(workers)))
            kind = chance.choice(["dies", "fails", "hangs", "rebuilt"])
            if kind == "dies":  # Ray starts its ticket again, from the beginning
                workers.append(Worker(head, worker.ticket, worker.node, worker.process))
            elif kind == "fails" and worker.claim:
                failure = Failure("cannot be read", True, tries=9)
                if head.planner.failed(worker.ticket, failure, worker.made):
                    workers.append(worker)
            elif kind == "hangs" and worker.ticket in head.planner.active:
                # It is taken back, and what it makes later comes besides.
                head.planner.active[worker.ticket].quiet_since = -1e9
                head.planner.look(time.monotonic())
                workers.append(worker)
            else:
                workers.append(worker)
                if ended:  # its blocks were lost with their host: Ray has them made again
                    workers.append(Worker(head, chance.choice(ended).ticket, worker.node))
    assert not head.attempt.failure
    assert head.stream.splitter.ended, "it comes to an end"
    begun = {number: partial.get(number, (0, 0))[0] for number in range(len(groups))}
    wanted = [(number, nth) for number, n in enumerate(groups) for nth in range(n)]
    wanted = [(number, nth) for number, nth in wanted if number not in done and nth >= begun[number]]
    assert sorted(head.delivered) == wanted
    if order == "exact":
        assert head.delivered == wanted
    for number in range(len(groups)):
        of_shard = [(shard, nth) for shard, nth in wanted if shard == number]
        assert [each for each in head.delivered if each[0] == number] == of_shard
    assert head.stream.account.read == head.source.count()
    assert head.planner.early == Held() and not head.planner.active and not head.planner.again


def test_a_pass_that_is_waited_for_gets_every_host_however_much_of_later_ones_is_ready() -> None:
    head = Head([3] * 40, "exact", hosts=1, budget=10_000)
    later = Stream(Splitter(1, 3, equal=True), EpochAccount("train", 1), None)
    later.splitter.add(300, 0)
    head.attempt.streams["train", 1] = later
    assert not head.planner.hungry, "nothing is to be done yet"
    head.planner.issue()
    assert head.planner.hungry
    later.held.own = 10_000
    assert head.planner.hungry, "room for blocks or not"
    head.stream.splitter.add(300, 0)
    assert not head.planner.hungry


def test_nothing_more_is_begun_while_enough_is_ready() -> None:
    head = Head([8] * 50, "any", 1, budget=200)
    under_way: list[Any] = []
    for _ in range(400):
        head.planner.look(time.monotonic())
        for ticket in head.planner.issue():
            worker = Worker(head, ticket, "h0")
            while worker.step(under_way):
                pass
            while under_way:
                head.planner.arrived(*under_way.pop(0))
    assert 200 <= head.stream.held.own <= 1.25 * 200 + 30
    assert head.planner.issue() == [], "and nobody is asked"
    head.consume()
    assert head.planner.issue() != []


@pytest.mark.long
@pytest.mark.parametrize("order", ["any", "exact"])
def test_after_a_lost_train_worker_only_what_training_had_consumed_is_made_again(order: str) -> None:
    head = Head([3] * 12, order, hosts=1, budget=200)
    under_way: list[Any] = []
    by_ticket: dict[int, list[tuple[int, int]]] = {}

    def make(most: int = 10**6) -> list[tuple[int, int]]:
        made: list[tuple[int, int]] = []
        while not head.stream.splitter.ended and len(made) < most:
            head.planner.look(time.monotonic())
            tickets = head.planner.issue()
            if not tickets:
                break
            for ticket in tickets:
                worker = Worker(head, ticket, "h0")
                while worker.step(under_way):
                    pass
                by_ticket[ticket] = [block for _, block in under_way]
                made += by_ticket[ticket]
                while under_way:
                    head.planner.arrived(*under_way.pop(0))
        return made

    first = make()
    for step in range(4):  # of three rows each, the first two blocks or more
        head.stream.portion(step, 0)
        head.stream.release()
    early = [block for line in head.planner.lines for block in line.early()]
    ready = {block.reference for block in (*head.stream.blocks.values(), *early)}
    consumed = set(first) - ready
    assert len(consumed) >= 2 and len(ready) >= 15
    old = weakref.ref(head.stream)
    place = head.again(0)
    gc.collect()
    assert old() is None, "nothing of the old attempt stays in memory but the blocks"
    assert not place.done and not place.partial
    # A host may be lost with its blocks before the new attempt has listed its shards.
    assert all(
        head.planner.claim(ticket, "h0", f"p{ticket}")
        for ticket in by_ticket
        if ticket in head.planner.tickets
    )
    assert ready <= {block for ticket in head.planner.tickets for block in by_ticket[ticket]}
    again = make(1)
    # A shard is made again from its first consumed block to its end.
    shards = {number for number, _ in consumed}
    assert consumed <= set(again)
    assert not {block for block in ready if block[0] not in shards} & set(again)
    kept = {block for block in ready if block[0] not in shards}
    assert order == "exact" or kept <= set(head.delivered)
    # If a host is lost with its blocks, Ray repeats the ticket that made them, and nothing of it is new.
    for ticket, blocks in by_ticket.items():
        if kept & set(blocks):
            repeated = Worker(head, ticket, "h0")
            while repeated.step([]):
                pass
            assert repeated.claim is not None and repeated.made == len(blocks)
    while not head.stream.splitter.ended:
        head.consume()
        make()
    assert sorted(head.delivered) == [(shard, nth) for shard in range(12) for nth in range(3)]
    assert head.stream.account.read == head.source.count()
    assert head.costs.records == head.source.count() + 11 * len(shards), "costs count once for each making"


def make_all(head: Head) -> None:
    """Let chain workers make what they may."""
    under_way: list[Any] = []
    while True:
        head.planner.look(time.monotonic())
        if not (tickets := head.planner.issue()):
            return
        for ticket in tickets:
            worker = Worker(head, ticket, "h0")
            while worker.step(under_way):
                pass
        while under_way:
            head.planner.arrived(*under_way.pop(0))


@pytest.mark.parametrize("order", ["any", "exact"])
def test_losses_in_a_row_do_not_fill_the_store(order: str) -> None:
    head, ready = Head([3] * 400, order, hosts=1, budget=2500), list[int]()
    for _ in range(5):
        make_all(head)
        early = [block for line in head.planner.lines for block in line.early()]
        ready.append(sum(block.report.bytes_out for block in (*head.stream.blocks.values(), *early)))
        head.again(0)
    assert ready[0] >= 2500, "as much as may be ready"
    assert ready[-1] == ready[1] <= 2.5 * ready[0], "twice that, once"


def test_blocks_that_come_after_their_work_was_taken_back_are_made_again_with_their_host() -> None:
    head = Head([6], "any", 2, 10_000)
    while not (tickets := head.planner.issue()):
        head.planner.look(time.monotonic())
    slow = Worker(head, tickets[0], "h1")
    under_way: list[Any] = []
    slow.step(under_way)
    head.pool.update(head.hosts[:1], False, 1.0)  # the cluster takes the host away, and its process goes on
    head.planner.look(time.monotonic())
    slow.step(under_way), slow.step(under_way)
    again = Worker(head, tickets[0], "h0")
    assert again.claim is not None and again.claim.blocks == 3


def test_lost_blocks_that_cannot_be_read_again_are_retried_where_ray_makes_them_and_then_end_the_run() -> (
    None
):
    head = Head([3], "any", 1, 10_000)
    while not (tickets := head.planner.issue()):
        head.planner.look(time.monotonic())
    first = Worker(head, tickets[0], "h0")
    while first.step([]):
        pass
    again, failure = Worker(head, tickets[0], "h0"), Failure("OSError: Input/output error", True, tries=3)
    again.step([])
    waits = [head.planner.failed(again.ticket, failure, again.made) for _ in range(3)]
    assert waits == [1.0, 4.0, 16.0]
    assert not head.planner.again, "the work itself is done"
    with pytest.raises(DataError, match="train shard s0: failed 4 times, on h0: OSError: Input/output error"):
        head.planner.failed(again.ticket, failure, again.made)


def test_a_call_that_ray_repeats_although_its_blocks_are_there_does_not_end_the_run() -> None:
    head = Head([3], "any", 1, 10_000)
    while not (tickets := head.planner.issue()):
        head.planner.look(time.monotonic())
    first, under_way = Worker(head, tickets[0], "h0"), list[Any]()
    while first.step(under_way):
        pass
    for block in under_way:
        head.planner.arrived(*block)
    again, failure = Worker(head, tickets[0], "h0"), Failure("OSError: Stale file handle", True, tries=3)
    assert [head.planner.failed(again.ticket, failure, 0) for _ in range(4)] == [1.0, 4.0, 16.0, 0.0]


def test_a_ticket_with_a_block_without_rows_is_repeated_to_its_last_block() -> None:
    head = Head([3], "exact", 1, 10_000)
    while not (tickets := head.planner.issue()):
        head.planner.look(time.monotonic())
    claim = head.planner.claim(tickets[0], "h0", "p")
    assert claim is not None

    def report(nth: int, made: int) -> bool:
        rows = 0 if nth == 1 else RECORDS
        block = BlockReport(0, nth, nth == 2, rows, 0.01, RECORDS, bytes_out=rows and 10)
        return head.planner.reported(tickets[0], block, ("task", made), Told("h0"))

    assert report(0, 0) and report(1, 1)
    report(2, 1)
    head.planner.arrived(("task", 1), (0, 2))  # the first one is lost on its way, so the others wait
    head.begin(DataCursor(epoch=0, plan=head.passes.identity("f")), head.planner)
    ticket = head.planner.tickets[tickets[0]]
    assert ticket.inherited and ticket.limit == 2
    assert [report(0, 0), report(1, 1), report(2, 1)] == [True, True, False]


def test_a_full_store_holds_no_slot() -> None:
    """A long shard ends after the block in hand when enough is ready; the rest is begun by whoever comes."""
    head = Head([40, 40], "exact", 1, budget=50)
    under_way: list[Any] = []
    seen: list[int] = []
    deadline = time.monotonic() + 60
    while not head.stream.splitter.ended:
        assert time.monotonic() < deadline, f"stuck after {len(seen)} blocks"
        head.planner.look(time.monotonic())
        tickets = head.planner.issue()
        # Two slots; the second of two claims gets the later shard and makes as much as it may.
        for worker in reversed([Worker(head, ticket, "h0") for ticket in tickets]):
            while worker.step(under_way):
                pass
        while under_way:
            head.planner.arrived(*under_way.pop(0))
        seen = [nth for _, nth in head.delivered]
        head.consume()
    assert head.delivered == [(shard, nth) for shard in range(2) for nth in range(40)]


@pytest.mark.parametrize("order", ["any", "exact"])
def test_a_ticket_that_is_started_again_makes_the_same_blocks(order: str) -> None:
    head = Head([3, 3], order, 1, 10_000)
    under_way: list[Any] = []
    while not (tickets := head.planner.issue()):
        head.planner.look(time.monotonic())
    first = Worker(head, tickets[0], "h0")
    made = list(first.todo)
    first.step(under_way)
    again = Worker(head, tickets[0], "h0")
    assert again.todo == made
    assert Worker(head, 999, "h0").claim is None, "a ticket of nobody's"


def test_the_work_of_a_lost_host_goes_to_another_one_before_ray_notices() -> None:
    head = Head([3, 3], "exact", 2, 10_000)
    while len(tickets := head.planner.issue()) < 2:
        head.planner.look(time.monotonic())
    lost = Worker(head, tickets[0], "h1")
    under_way: list[Any] = []
    lost.step(under_way)
    head.pool.update(head.hosts[:1], False, 1.0)
    assert head.planner.look(time.monotonic()) == [], "there is no process to end"
    other = Worker(head, tickets[1], "h0")
    assert other.todo == lost.todo, "all but the block that was made"


def test_a_process_that_died_gets_its_ticket_again_before_any_other() -> None:
    head = Head([3] * 20, "any", 1, 10_000)
    while len(tickets := head.planner.issue()) < 2:
        head.planner.look(time.monotonic())
    first = Worker(head, tickets[0], "h0", "p")
    assert first.claim is not None
    assert Worker(head, tickets[1], "h0", "p").claim is None, "else all that it is given would be suspect"
    again = Worker(head, tickets[0], "h0", "p")
    assert again.claim is not None and again.todo == first.todo
    while again.step([]):
        pass
    (other,) = head.planner.issue()[:1]
    assert Worker(head, other, "h0", "p").claim is not None
