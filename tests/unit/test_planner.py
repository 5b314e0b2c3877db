"""Whatever chain workers, hosts and Ray do, each block of a pass is delivered once, in its order."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.config.schema import Config
from stoker.data import Shard, Source
from stoker.errors import DataError, Failure
from stoker.events.kinds import Note
from stoker.protocol import BadRecord, BlockReport, Claim, DataCursor, Made, Process
from stoker.serve.accounting import ChainCosts, EpochAccount
from stoker.serve.items import HeldBytes, ReadyBlock
from stoker.serve.passes import Passes, ServiceState
from stoker.serve.planner import Planner
from stoker.serve.pool import ChainHost
from stoker.serve.recipe_pass import RecipeAttempt, RecipePass, Splitter
from tests.refusals import refused

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
    def __init__(
        self, groups: list[int], order: str, hosts: int, budget: int, epochs: int = 1
    ) -> None:
        config = Config.model_validate(
            {
                "recipe": "none:None",
                "data": {"block_records": RECORDS, "shuffle": False, "order": order},
                "train": {"epochs": epochs, "batch_size": 3},
            }
        )
        self.source = Shards(groups)
        self.passes = Passes(config, {"train": self.source}, {"train": b""})
        self.costs = ChainCosts()
        self.shared = ServiceState(lambda *_, **__: None, budget, {"train": self.costs})
        self.pool, self.holdings = self.shared.pool, self.shared.holdings
        self.hosts = [ChainHost(f"h{n}", 2) for n in range(hosts)]
        self.pool.update(self.hosts, False, 0.0)
        self.begin(DataCursor(epoch=0, plan=self.passes.identity("f")))

    def begin(self, start: DataCursor, before: Planner | None = None) -> None:
        totals = {"train": self.source.count()}
        self.attempt = RecipeAttempt(0, 1, self.passes, totals, start, self.shared)
        self.attempt._listing = AtOnce()  # type: ignore[assignment]
        self.delivered: list[tuple[int, int]] = []
        deliver = self.attempt.deliver

        def note(stream: Any, block: ReadyBlock) -> None:
            self.delivered.append((block.report.shard, block.report.nth))
            deliver(stream, block)

        self.attempt.deliver = note  # type: ignore[method-assign]
        with self.attempt.shared.changed:  # listing notifies those that wait for work
            self.planner = self.attempt.planner = Planner(self.attempt, before)
        self.stream = self.attempt.open["train", 0]

    def ready(self) -> set[tuple[int, int]]:
        early = [block for line in self.planner.passes for block in line.early()]
        return {(b.report.shard, b.report.nth) for b in (*self.stream.blocks.values(), *early)}

    def lose(self, node: str) -> None:
        self.planner.lose([block for block in self.holdings.all() if block.node == node])

    def again(self, step: int) -> DataCursor:
        place = self.stream.position(step, 0)
        self.begin(place, self.planner)
        return place

    def consume(self) -> None:
        step = self.stream.steps.get(0, 0)
        while not self.stream.splitter.ended and self.stream.splitter.ready(step):
            self.take(step)
            step += 1

    def take(self, step: int) -> None:
        self.stream.portion(step, 0)
        self.stream.fetched[0] = step + 1
        self.stream.release()


class Worker:
    def __init__(self, head: Head, node: str, worker: str = "") -> None:
        self.head = head
        self.me = Process(worker or f"{node}-{next(PROCESSES)}", node, f"{next(PROCESSES)}")
        self.claim: Claim | None = None
        self.todo: list[tuple[int, int, bool]] = []
        self.made: list[tuple[int, int]] = []

    def ask(self) -> bool:
        with self.head.attempt.shared.changed:
            self.claim = self.head.planner.claim(self.me)
        self.todo = []
        for work in self.claim.work if self.claim else ():
            groups = self.head.source.groups[work.number]
            stop = groups if work.stop is None else work.stop
            self.todo += [(work.number, nth, nth == groups - 1) for nth in range(work.skip, stop)]
        return self.claim is not None

    def step(self) -> bool:
        if not self.todo:
            return False
        assert self.claim is not None
        number, nth, last = self.todo.pop(0)
        self.head.planner.upcoming(
            self.me
        )  # as one whose data lies elsewhere, to fetch its next shard
        rows = RECORDS - last
        ids = sum(range(nth * RECORDS, nth * RECORDS + rows))
        report = BlockReport(number, nth, last, rows, 0.01, rows, ids, bytes_out=10)
        made = Made(report, f"{next(PROCESSES)}")
        self.made.append((number, nth))
        return self.head.planner.reported(self.me, self.claim.number, made)

    def work(self) -> bool:
        if not self.ask():
            return False
        while self.step():
            pass
        return True

    def again(self) -> Worker:
        """The process died, and Ray has started another one."""
        return Worker(self.head, self.me.node, self.me.worker)


def look(head: Head) -> None:
    with head.attempt.shared.changed:
        head.planner.look(time.monotonic())


@pytest.mark.parametrize("order", ["any", "exact"])
def test_chain_workers_prepare_different_shards_and_are_given_those(order: str) -> None:
    head = Head([2] * 40, order=order, hosts=2, budget=10_000)
    look(head)
    workers = [Worker(head, f"h{n % 2}") for n in range(3)]
    assert all(worker.ask() for worker in workers)
    told = [head.planner.upcoming(worker.me) for worker in workers]
    assert None not in told and len(set(told)) == 3
    for worker, shard in reversed(list(zip(workers, told, strict=True))):
        assert worker.ask() and worker.claim is not None
        assert worker.claim.work[0].shard == shard


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
    workers = [Worker(head, host.node) for host in head.hosts for _ in range(host.slots)]
    troubles, losses = 5, 2  # a sixth trouble at the same work would rightly end the run
    done, partial = set[int](), dict[int, tuple[int, int]]()
    for _ in range(5000):
        if head.stream.splitter.ended and not head.planner.lost:
            break
        look(head)
        for item in head.planner.again:
            item.not_before = 0.0
        at = chance.randrange(len(workers))
        worker = workers[at]
        what = chance.choice(["step", "step", "step", "consume", "trouble", "loss"])
        if what == "step":
            _ = worker.step() if worker.todo else worker.ask()
        elif what == "consume":
            head.consume()
        elif what == "loss" and losses and chance.random() < 0.1:
            losses -= 1  # chain workers go on with what they have
            place = head.again(chance.randint(0, head.stream.steps.get(0, 0)))
            done = {shard for first, stop in place.done for shard in range(first, stop)}
            partial = place.partial
        elif what == "trouble" and troubles:
            troubles -= 1
            kind = chance.choice(["dies", "fails", "hangs", "its host's blocks are lost"])
            if kind == "dies":
                workers[at] = worker.again()
            elif kind == "fails" and worker.claim:
                head.planner.failed(
                    worker.me, worker.claim.number, Failure("OSError", text="cannot be read"), 9
                )
                worker.todo = []
            elif kind == "hangs" and worker.me.worker in head.planner.active:
                # It is taken back, and what it makes later is refused.
                head.planner.active[worker.me.worker].quiet_since = -1e9
                look(head)
            else:
                head.lose(worker.me.node)
    assert not head.attempt.failure
    assert head.stream.splitter.ended, "it comes to an end"
    begun = {number: partial.get(number, (0, 0))[0] for number in range(len(groups))}
    wanted = [(number, nth) for number, n in enumerate(groups) for nth in range(n)]
    wanted = [
        (number, nth) for number, nth in wanted if number not in done and nth >= begun[number]
    ]
    assert sorted(head.delivered) == wanted
    if order == "exact":
        assert head.delivered == wanted
    for number in range(len(groups)):
        of_shard = [(shard, nth) for shard, nth in wanted if shard == number]
        assert [each for each in head.delivered if each[0] == number] == of_shard
    assert head.stream.account.read == head.source.count()
    assert head.planner.early == HeldBytes()
    assert not any(block.lost for block in head.stream.blocks.values()), "and each is to be had"


def test_a_pass_that_is_waited_for_gets_every_host_however_much_of_later_ones_is_ready() -> None:
    head = Head([3] * 40, "exact", hosts=1, budget=10_000)
    later = RecipePass(
        plan=head.stream.plan,
        number=1,
        splitter=Splitter(1, 3, equal=True),
        account=EpochAccount("train", 1),
        total=None,
    )
    later.splitter.add(300, 0)
    head.attempt.open["train", 1] = later
    assert not head.planner.hungry, "nothing is to be done yet"
    look(head)
    assert head.planner.hungry
    later.held.own = 10_000
    assert head.planner.hungry, "room for blocks or not"
    head.stream.splitter.add(300, 0)
    assert not head.planner.hungry


def make_all(head: Head, node: str = "h0") -> list[tuple[int, int]]:
    worker = Worker(head, node)
    look(head)
    while worker.work():
        look(head)
    return worker.made


def test_nothing_more_is_begun_while_enough_is_ready() -> None:
    head = Head([8] * 50, "any", 1, budget=200)
    make_all(head)
    assert 200 <= head.stream.held.own <= 1.25 * 200 + 30
    assert not Worker(head, "h0").ask()
    head.consume()
    assert Worker(head, "h0").ask()


@pytest.mark.long
@pytest.mark.parametrize("order", ["any", "exact"])
def test_after_a_lost_train_worker_only_what_training_had_consumed_is_made_again(
    order: str,
) -> None:
    head = Head([3] * 12, order, hosts=1, budget=200)
    first = make_all(head)
    for step in range(4):  # of three rows each, the first two blocks or more
        head.take(step)
    ready = head.ready()
    consumed = set(first) - ready
    assert len(consumed) >= 2 and len(ready) >= 15
    old = weakref.ref(head.stream)
    place = head.again(0)
    look(head)
    gc.collect()
    assert old() is None, "nothing of the old attempt stays in memory but the blocks"
    assert not place.done and not place.partial
    again = make_all(head)
    while not head.stream.splitter.ended:
        head.consume()
        again += make_all(head)
    # A shard is made again from its first consumed block to its end.
    shards = {number for number, _ in consumed}
    assert consumed <= set(again)
    assert not {block for block in ready if block[0] not in shards} & set(again)
    assert sorted(head.delivered) == [(shard, nth) for shard in range(12) for nth in range(3)]
    assert head.stream.account.read == head.source.count()
    assert head.costs.records == head.source.count() + 11 * len(shards), (
        "costs count once for each making"
    )


@pytest.mark.parametrize("order", ["any", "exact"])
def test_losses_in_a_row_do_not_fill_the_store(order: str) -> None:
    head, ready = Head([3] * 400, order, hosts=1, budget=2500), list[int]()
    for _ in range(5):
        make_all(head)
        ready.append(10 * len(head.ready()))
        head.again(0)
    assert ready[0] >= 2500, "as much as may be ready"
    assert ready[-1] == ready[1] <= 2.5 * ready[0], "twice that, once"


@pytest.mark.parametrize("order", ["any", "exact"])
def test_of_lost_blocks_those_come_first_that_training_needs_first(order: str) -> None:
    head = Head([3] * 4, order, hosts=2, budget=10**9, epochs=2)
    look(head)
    workers = [Worker(head, "h0") for _ in range(4)]
    assert all(worker.ask() for worker in workers)
    for worker in reversed(workers):
        while worker.step():
            pass
    make_all(head)  # the next epoch
    needed = [(0, shard) for shard in ((3, 2, 1, 0) if order == "any" else range(4))]
    needed += [(1, shard) for shard in range(4)]
    head.lose("h0")
    breaks, helper, remade = Worker(head, "h1"), Worker(head, "h0"), []
    assert breaks.ask() and breaks.step(), "one block of the first"
    breaks.again().ask()  # its process dies, and what it had is given to another, before the rest
    while helper.ask() and helper.claim is not None:
        remade += [(helper.claim.plan.epoch, work.number) for work in helper.claim.work]
        while helper.step():
            pass
    assert remade == [needed[0], *needed[2:]]
    assert {key[1:] for key in head.planner.lost} == {(needed[1][1], nth) for nth in range(3)}


def test_bad_records_of_a_block_that_is_made_again_stay_bad_and_its_good_ones_good() -> None:
    head = Head([2] + [1] * 1000, "any", hosts=1, budget=10**9)
    look(head)
    worker = Worker(head, "h0")
    assert worker.ask() and worker.claim is not None and not worker.claim.care.known
    bad = [BadRecord("0", "cannot be read, 3 tries: OSError", passing=True, name="item 0")]
    report = BlockReport(0, 0, False, 3, 0.01, 4, 6, bad=bad, bytes_out=10)
    head.planner.reported(worker.me, worker.claim.number, Made(report, "made"))
    worker.todo.pop(0)
    worker.step()
    head.shared.suspects.of("train")["s0:1"] = (
        "its process died"  # in another epoch, on a small host
    )
    head.lose("h0")
    assert worker.ask() and worker.claim is not None
    assert worker.claim.care.known == {"item 0": bad[0].reason}
    worker = worker.again()
    assert worker.ask() and worker.claim is not None
    assert worker.claim.care.known.keys() == {"item 0", "s0:1"}, "here, too"
    assert not worker.claim.care.last_try, "what could be read is not quarantined"
    head.stream.splitter.batch_size = 2
    place = head.stream.position(1, 0)
    head.begin(place)
    look(head)
    assert worker.ask() and worker.claim is not None
    assert worker.claim.care.known.keys() == {"item 0", "s0:1"}


def test_the_file_of_a_block_that_was_copied_elsewhere_is_not_used_again_while_somebody_may_read_it() -> (
    None
):
    head = Head([2], "any", 2, 10_000)
    look(head)
    Worker(head, "h1").work()
    (block,) = [b for b in head.holdings.all() if b.report.nth == 0]
    head.holdings.move(block, "h0", "copy")
    assert block.part(0, 1)[:4] == ("copy", 0, 1, "h0")
    assert not head.holdings.unused("h1")


@pytest.mark.parametrize(
    ("ids", "digest", "said"),
    [
        pytest.param(6, 7, "", id="equal"),
        pytest.param(6, 8, "has other values than before", id="other values"),
        pytest.param(9, 7, "", id="other records"),
    ],
)
def test_a_block_made_again_is_compared_with_the_lost_one(ids: int, digest: int, said: str) -> None:
    head = Head([2], "exact", 2, 10_000)
    notes: list[Any] = []
    head.shared.event = notes.append
    look(head)
    first, other = Worker(head, "h1"), Worker(head, "h0")
    for worker, made in (
        (first, BlockReport(0, 0, False, 4, 0.01, 4, 6, bytes_out=10, digest=7)),
        (other, BlockReport(0, 0, False, 4, 0.01, 4, ids, bytes_out=10, digest=digest)),
    ):
        assert worker.ask() and worker.claim is not None
        assert worker.claim.plan.exact
        with refused("block.remade") if ids == 9 and worker is other else nullcontext():
            head.planner.reported(worker.me, worker.claim.number, Made(made, worker.me.node))
        if worker is first:
            head.planner.ended(worker.me)
            head.lose("h1")
    texts = [event.text for event in notes if isinstance(event, Note)]
    assert [said in text for text in texts] == [True] * (digest == 8)


def test_a_lost_block_that_is_not_made_again_ends_the_run() -> None:
    head = Head([2], "any", 2, 10_000)
    look(head)
    Worker(head, "h1").work()
    head.lose("h1")
    other = Worker(head, "h0")
    assert other.ask()
    with refused("block.remade"):
        other.ask()


def test_work_that_cannot_be_read_is_tried_again_and_then_ends_the_run() -> None:
    head = Head([3], "any", 1, 10_000)
    look(head)
    failure = Failure("OSError", text="OSError: Input/output error")
    worker = Worker(head, "h0")
    for _ in range(3):
        assert worker.ask() and worker.claim is not None
        head.planner.failed(worker.me, worker.claim.number, failure, 3)
        assert not worker.ask(), "not at once"
        head.planner.again[0].not_before = 0.0
    assert worker.ask() and worker.claim is not None
    with pytest.raises(
        DataError, match="train shard s0: failed 4 times, on h0: OSError: Input/output error"
    ):
        head.planner.failed(worker.me, worker.claim.number, failure, 3)


@pytest.mark.parametrize("bound", [False, True])
def test_a_process_that_works_on_for_a_pass_given_up_is_ended_unless_it_has_copies_of_a_dataset(
    bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Head([5], "any", hosts=1, budget=10_000)
    worker = Worker(head, "h0")
    look(head)
    assert worker.ask()
    monkeypatch.setattr(head.attempt, "bound", lambda: {worker.me.worker} if bound else set())
    with head.attempt.shared.changed:
        head.planner.abandon(head.planner.active[worker.me.worker].pass_)
        assert head.planner.look(time.monotonic()) == []
        assert head.planner.look(time.monotonic() + 60) == ([] if bound else [worker.me.worker])
