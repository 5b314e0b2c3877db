"""Whatever chain workers, hosts and train workers do, each record of a pass is used once, and in its order.

The coordinator with all of its books is the real one. Chain workers, hosts and train workers are calls in this
process; `Job.act` is one step of any of them, or a fault.
"""

from __future__ import annotations

import json
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stoker.config.schema import Config
from stoker.data import Shard, Source
from stoker.errors import DataError, Failure
from stoker.events.kinds import Note
from stoker.protocol import ID_COLUMN, BadRecord, BlockReport, BlockSlice, Claim, Made, Process
from stoker.read.sources import ID_MODULUS, record_id
from stoker.serve import recovery, service
from stoker.serve.actor import Coordinator
from stoker.serve.passes import Passes
from stoker.serve.service import DataService
from tests.refusals import refused
from tests.waiting import until

BLOCK = 4
NAMES = map(str, count())
DRAINING: set[str] = set()
Good = list[list[bool]]
"""By shard and record, whether it can be used."""


class Shards(Source):
    random = False

    def __init__(self, split: str, good: Good, counted: bool) -> None:
        self.split, self.good, self.counted = split, good, counted

    def shards(self, records: int, order: Any) -> list[Shard]:
        return [Shard(f"{self.split} {n}", rows=len(good)) for n, good in enumerate(self.good)]

    def read(self, shard: Shard, order: Any) -> Any:
        raise NotImplementedError

    def count(self) -> int | None:
        return sum(map(len, self.good)) if self.counted else None


class NoAgents:
    run, nodes = "run", frozenset[str]()

    def __init__(self, *_: Any, **__: Any) -> None: ...


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """The coordinator without Ray: nobody waits, and hosts have no agents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "Agents", NoAgents)
        patch.setattr(service, "draining_nodes", lambda: set(DRAINING))
        patch.setattr(service, "CLAIM_WAIT_S", 0.0)
        patch.setattr(service, "MOVED_S", 0.0)
        patch.setattr(recovery, "reread_wait_s", lambda error, failures: 0.0)
        patch.setattr(DataService, "start_engine", lambda self, me: None)
        patch.setattr(DataService, "_rescue", lambda self, nodes: None)
        yield


def about(node: str) -> dict[str, Any]:
    named = {"NodeID": node, "NodeManagerHostname": node}
    return {**named, "Alive": True, "Labels": {}, "Resources": {"CPU": 2}}


class Job:
    def __init__(
        self,
        train: Good,
        val: Good | None = None,
        *,
        order: str = "any",
        ranks: int = 1,
        batch: int = 3,
        remainder: int | str = "drop",
        hosts: int = 1,
        budget: int = 10_000,
        counted: bool = True,
        seed: int = 0,
    ) -> None:
        self.good = {"train": train} | ({"val": val} if val else {})
        data = {"block_records": BLOCK, "shuffle": False, "order": order, "remainder": remainder}
        self.sections = {"recipe": "none:None", "data": {**data, "bad_record_budget": 1.0}}
        self.budget, self.counted, self.chance = budget, counted, random.Random(seed)
        self.hosts, self.down = [f"h{n}" for n in range(hosts)], set[str]()
        self.rows_of: dict[str, list[int]] = {}
        """The ids of the rows of each block, by its file."""
        self.fails: Callable[[str], bool] = lambda key: False
        self.values = 0
        """Part of the digest of each block."""
        self.trained: list[int] = []
        """In the steps of earlier starts that later ones went on from."""
        self.open(None, ranks, batch)

    def open(self, position: Any, ranks: int, batch: int) -> None:
        """A new process, with new hosts."""
        DRAINING.clear()
        self.down.clear()
        train = {"epochs": 1, "batch_size": batch}
        config = Config.model_validate({**self.sections, "train": train})
        sources = {split: Shards(split, good, self.counted) for split, good in self.good.items()}
        passes = Passes(config, sources, dict.fromkeys(sources, b""))
        totals = {split: source.count() for split, source in sources.items()}
        given = {"node": "head", "budget_bytes": self.budget, "most_waiting": 99}
        self.head = Coordinator(passes, totals, passes.identity("f"), config=config, **given)
        self.head._rescuer = threading.Thread()
        self.head.__dict__["transport"] = self
        self.batch, self.attempt = batch, 0
        self.begin(position, ranks)
        self.workers = [Worker(self, host) for host in self.hosts for _ in range(2)]

    def begin(self, position: Any, ranks: int) -> None:
        self.head.begin(None, self.attempt, ranks, 0, position)
        self.next_pass(ranks)
        self.look()

    def next_pass(self, ranks: int) -> None:
        self.taken: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(ranks)]
        """By rank and step, the ids of its rows and of those that repeat others."""
        self.over: set[int] = set()

    def look(self) -> None:
        nodes = [about(host) for host in self.hosts if host not in self.down]
        for _ in range(2):
            self.head._look_once(nodes, time.monotonic())
            for pass_ in [*self.head.attempt.open.values()]:
                if pass_.coming is not None:  # shards are listed by another thread
                    pass_.coming.result(60)

    def lose(self, host: str) -> None:
        self.down.add(host)
        self.look()

    def come_back(self, host: str) -> None:
        self.down.discard(host)
        DRAINING.discard(host)
        self.look()

    def groups(self, split: str, shard: int) -> list[list[bool]]:
        good = self.good[split][shard]
        return [good[at : at + BLOCK] for at in range(0, len(good), BLOCK)]

    def work(self) -> int:
        """One step of each chain worker: how many did something."""
        return sum(each.step() for each in self.workers if each.node not in self.down)

    def ask(self, split: str, rank: int) -> bool:
        """A train worker asks for its next step, if that is ready."""
        if failure := self.head.attempt.failure:
            raise failure.error()
        taken, pass_ = self.taken[rank], self.head.attempt.open.get((split, 0))
        if rank in self.over or pass_ is None or not pass_.splitter.ready(len(taken)):
            return False
        at = len(taken)
        given = self.head.ahead(self.attempt, split, 0, rank, at, 1, at)
        if not given:
            self.over.add(rank)
            return False
        ids = [number for part in given[0].blocks for number in self.fetch(part)]
        new = len(ids) - given[0].padded
        taken.append((ids[:new], ids[new:]))
        return True

    def fetch(self, part: BlockSlice) -> list[int]:
        for _ in range(1000):
            if part.node and part.node not in self.down:
                return self.rows_of[part.block][part.start : part.stop]
            self.work()
            part = self.head.moved(part, False)
        pytest.fail("a lost block is not made again")

    def rows(self, part: BlockSlice) -> tuple[dict[str, Any], int, int, int]:
        """In place of the coordinator's transport."""
        ids = np.array(self.rows_of[part.block], dtype=object)
        return {ID_COLUMN: ids}, part.start, part.stop, len(ids)

    def used(self, steps: int | None = None) -> list[int]:
        """The ids of this start's steps in their order, without those that repeat others."""
        most = max(map(len, self.taken)) if steps is None else steps
        of_steps = [[own[step] for own in self.taken if step < len(own)] for step in range(most)]
        return [number for step in of_steps for ids, _ in step for number in ids]

    def interrupt(self, ranks: int, batch: int | None, steps: int | None = None) -> None:
        """Go on from a checkpoint of one of the last steps; without a batch size, only train workers restart."""
        most = min(map(len, self.taken))
        steps = self.chance.randint(max(0, most - 2), most) if steps is None else steps
        ids = self.used(steps)
        place = self.head.position(self.attempt, 0, steps, sum(ids) % ID_MODULUS)
        place = json.loads(json.dumps(place))
        self.trained += ids
        if batch is None:
            self.attempt += 1
            self.begin(place, ranks)
        else:
            self.open(place, ranks, batch)

    def act(self, troubles: bool = True) -> None:
        worker = self.chance.choice(self.workers)
        match self.chance.choice(["work", "work", "work", "ask", "ask", "trouble"]):
            case "work" if worker.node not in self.down:
                worker.step()
            case "ask":
                self.ask("train", self.chance.randrange(len(self.taken)))
            case "trouble" if troubles:
                self.trouble(worker)

    def trouble(self, worker: Worker) -> None:
        up = [host for host in self.hosts if host not in self.down]
        match self.chance.choice(["dies", "loses its lease", "fails", "host", "host", "leaves"]):
            case "dies" if worker.deaths < 2:
                worker.dies()
            case "loses its lease":
                worker.begin()
            case "fails" if worker.claim is not None:
                failure = Failure("OSError", text="cannot be read")
                self.head.item_failed(worker.me, worker.claim.number, failure, 99)
                worker.todo = []
            case "host" if self.down:
                self.come_back(min(self.down))
            case "host" if len(up) > 1:
                self.lose(self.chance.choice(up))
            case "leaves" if len({*up} - DRAINING) > 1:
                DRAINING.add(self.chance.choice(up))
                self.look()

    def finish(self, split: str) -> dict[str, Any]:
        """All steps that are left, then the account."""
        for _ in range(20_000):
            if len(self.over) == len(self.taken):
                break
            done = self.work() + sum(self.ask(split, rank) for rank in range(len(self.taken)))
            if not done:
                self.look()
        else:
            pytest.fail("it does not come to an end")
        shares = []
        for own in self.taken:
            new, again = (sum((step[part] for step in own), list[int]()) for part in (0, 1))
            shares.append((len(new) + len(again), sum(new) % ID_MODULUS, len(again)))
        done, (first, *others) = (self.attempt, split, 0), enumerate(shares)
        for other in others:
            call = partial(self.head.epoch_done, *done, *other)
            threading.Thread(target=call, daemon=True).start()
        finished = self.head.attempt.open[split, 0].finished
        until(lambda: len(finished) == len(others))
        return self.head.epoch_done(*done, *first)


class Worker:
    def __init__(self, job: Job, node: str) -> None:
        self.job, self.node, self.deaths = job, node, 0
        self.me = Process(f"w{next(NAMES)}", node, next(NAMES))
        self.begin()

    def begin(self) -> None:
        self.claim: Claim | None = None
        self.todo: list[tuple[int, int]] = []
        self.job.head.begin_lease(self.me, "its handle")

    def dies(self) -> None:
        """Ray starts another process in its place."""
        self.deaths += 1
        self.me = self.me._replace(token=next(NAMES))
        self.begin()

    def step(self) -> bool:
        return self.make() if self.todo else self.ask()

    def ask(self) -> bool:
        reply = self.job.head.claim(self.me, ["train", "val"], None)
        if not reply.go_on:
            self.begin()
            return False
        self.claim = reply.claim
        for work in reply.claim.work if reply.claim else ():
            groups = self.job.groups(reply.claim.plan.split, work.number)
            stop = len(groups) if work.stop is None else work.stop
            self.todo += [(work.number, nth) for nth in range(work.skip, stop)]
        return self.claim is not None

    def make(self, **changes: Any) -> bool:
        assert self.claim is not None
        split, (shard, nth) = self.claim.plan.split, self.todo.pop(0)
        groups, known = self.job.groups(split, shard), self.claim.care.known
        ids, bad = list[int](), list[BadRecord]()
        keys = [f"{split} {shard}/{nth}/{n}" for n in range(len(groups[nth]))]
        for place, (key, good) in enumerate(zip(keys, groups[nth], strict=True)):
            if key in known or not good or self.job.fails(key):
                bad.append(BadRecord(key, known.get(key, "bad"), place=place))
            else:
                ids.append(record_id(key))
        file = next(NAMES) if ids else ""
        self.job.rows_of[file] = ids
        report = BlockReport(
            shard, nth, nth == len(groups) - 1, len(ids), 0.01, len(keys), sum(map(record_id, keys)),
            bad, sum(record_id(each.key) for each in bad), bytes_out=10,
            digest=zlib.crc32(repr(ids).encode()) + self.job.values,
        )  # fmt: skip
        made = Made(replace(report, **changes), file)
        if not self.job.head.block_made(self.me, self.claim.number, made).go_on:
            self.todo = []
        return True


GOOD = st.sampled_from([True, True, True, False])
EPOCH = st.lists(st.lists(GOOD, max_size=11), min_size=2, max_size=7)
START = st.tuples(st.integers(1, 3), st.integers(1, 4))
"""Ranks and batch size."""


def ids_of(split: str, good: Good) -> list[list[int]]:
    """Those of the good records, by shard."""
    return [
        [record_id(f"{split} {n}/{at // BLOCK}/{at % BLOCK}") for at, fine in enumerate(of) if fine]
        for n, of in enumerate(good)
    ]


@pytest.mark.long
@settings(max_examples=250, deadline=None)
@given(
    train=EPOCH,
    val=EPOCH,
    order=st.sampled_from(["any", "exact"]),
    starts=st.lists(START, min_size=1, max_size=3),
    remainder=st.sampled_from(["drop", "pad", 1, 3]),
    hosts=st.integers(1, 3),
    budget=st.sampled_from([1, 60, 10_000]),
    counted=st.booleans(),
    flaky=st.sampled_from([0.0, 0.0, 0.1]),
    seed=st.integers(0, 2**32),
)
def test_each_record_is_used_once_whatever_happens(
    train: Good,
    val: Good,
    order: str,
    starts: list[tuple[int, int]],
    remainder: int | str,
    hosts: int,
    budget: int,
    counted: bool,
    flaky: float,
    seed: int,
) -> None:
    """If other records can be read at a time, it is so or the run ends."""
    assume(sum(map(sum, train)) >= max(ranks * batch for ranks, batch in starts))
    assume(any(map(any, val)))
    (ranks, batch), *later = starts
    job = Job(
        train, val, order=order, ranks=ranks, batch=batch, remainder=remainder, hosts=hosts,
        budget=budget, counted=counted, seed=seed,
    )  # fmt: skip
    job.fails = lambda key: key.startswith("train") and job.chance.random() < flaky
    try:
        for ranks, size in later:
            for _ in range(job.chance.randrange(150)):
                job.act()
            batch = job.chance.choice([None, size])
            job.interrupt(ranks, batch)
        for _ in range(job.chance.randrange(150)):
            job.act()
        counts = job.finish("train")
    except DataError as error:
        assert flaky and error.key in ("block.remade", "data.remainder"), error
        return
    before, used = len(job.trained), job.trained + job.used()
    total, good, ranks = sum(map(len, train)), ids_of("train", train), len(job.taken)
    assert len(used) == len({*used}) == counts["trained"] and counts["read"] == total
    assert counts["trained"] + counts["quarantined"] + counts["remainder"] == total
    steps = [[len(ids) + len(again) for ids, again in own] for own in job.taken]
    assert all(own == steps[0] for own in steps), "as many rows on each rank"
    assert all(rows == job.batch for rows in steps[0][:-1])
    least = min(remainder if isinstance(remainder, int) else 2, job.batch)
    assert all(rows >= least for rows in steps[0])
    if not flaky:
        assert counts["quarantined"] == total - sum(map(len, good))
        left = (sum(map(len, good)) - before) % (ranks * job.batch)
        over = left % ranks if left >= ranks * least else left
        assert counts["remainder"] == (0 if remainder == "pad" else over)
        assert counts["padded"] < ranks * least if remainder == "pad" else not counts["padded"]
        if order == "exact":
            assert used == sum(good, list[int]())[: len(used)]
        for shard in good:
            assert [number for number in used if number in shard] == [
                number for number in shard if number in used
            ] == shard[: len({*shard} & {*used})]  # fmt: skip
    job.next_pass(ranks)
    job.look()
    assert job.finish("val")["validated"] == sum(map(sum, val))
    assert sorted(job.used()) == sorted(sum(ids_of("val", val), list[int]()))
    assert not job.head.attempt.planner.early_bytes


EIGHT = [[True] * 8]


def again(job: Job, how: str) -> None:
    """The block that training has begun is made again."""
    if how == "host lost":
        job.lose("h0")
        job.come_back("h0")
    else:
        job.interrupt(1, 1, len(job.taken[0]) - 1)


@pytest.mark.parametrize("how", ["host lost", "resumed"])
@pytest.mark.parametrize("fails", ["before", "after"])
def test_records_that_can_be_read_only_sometimes(how: str, fails: str) -> None:
    """What could not be read stays bad if its block is made again; what could be and was trained is missed."""
    job = Job(EIGHT, batch=1)
    job.fails = lambda key: fails == "before" and key == "train 0/0/1"
    assert job.workers[0].ask() and job.workers[0].make()
    assert all(job.ask("train", 0) for _ in range(3))
    job.fails = lambda key: fails == "after" and key == "train 0/0/0"
    again(job, how)
    with refused("block.remade") if fails == "after" else nullcontext():
        counts = job.finish("train")
        assert (counts["trained"], counts["quarantined"]) == (7, 1)


@pytest.mark.parametrize("how", ["host lost", "resumed"])
@pytest.mark.parametrize("other", ["nothing", "values", "records"])
def test_a_block_made_again_is_compared_with_what_it_was(how: str, other: str) -> None:
    job = Job(EIGHT, order="exact", batch=1)
    assert job.workers[0].ask() and job.workers[0].make()
    assert job.ask("train", 0) and job.ask("train", 0)
    job.values = int(other == "values")
    if other == "records":
        job.good["train"] = [[False] + [True] * 7]
    again(job, how)
    with refused("block.remade") if other == "records" else nullcontext():
        job.finish("train")
        texts = [event.text for event in job.head.events if isinstance(event, Note)]
        assert [text for text in texts if "has other values than before" in text] == texts
        assert len(texts) == (other == "values")


def test_a_lost_block_that_is_not_made_again_ends_the_run() -> None:
    job = Job(EIGHT)
    worker = job.workers[0]
    assert worker.ask() and worker.make()
    again(job, "host lost")
    assert not worker.ask() and worker.ask(), "with a new lease"
    worker.todo = []
    worker.ask()
    with refused("block.remade"):
        job.finish("train")


def test_work_that_cannot_be_read_is_tried_again_and_then_ends_the_run() -> None:
    job = Job(EIGHT)
    worker, failure = job.workers[0], Failure("OSError", text="OSError: Input/output error")
    for _ in range(4):
        assert worker.ask() and worker.claim is not None
        job.head.item_failed(worker.me, worker.claim.number, failure, 3)
        worker.todo = []
    text = "train shard train 0: failed 4 times, on h0: OSError: Input/output error"
    with pytest.raises(DataError, match=text):
        job.finish("train")


def test_the_file_of_a_block_that_was_copied_elsewhere_is_not_used_again() -> None:
    """Somebody may be reading it."""
    job = Job(EIGHT)
    assert job.workers[0].ask() and job.workers[0].make()
    holdings = job.head.shared.holdings
    (block,) = holdings.all()
    holdings.move(block, "h1", "copy")
    assert block.part(0, 1)[:4] == ("copy", 0, 1, "h1")
    assert not holdings.unused("h0")


@pytest.mark.parametrize("order", ["any", "exact"])
def test_chain_workers_prepare_different_shards_and_are_given_those(order: str) -> None:
    job = Job(EIGHT * 40, order=order, hosts=2)
    workers = job.workers[:3]
    assert all(worker.ask() for worker in workers)
    told = [job.head.upcoming(worker.me) for worker in workers]
    assert None not in told and len({*told}) == 3
    for worker, shard in reversed([*zip(workers, told, strict=True)]):
        worker.todo = []
        assert worker.ask() and worker.claim is not None
        assert worker.claim.work[0].shard == shard


def test_nothing_more_is_begun_and_nobody_helps_while_enough_is_ready() -> None:
    job = Job([[True] * 8 * BLOCK] * 50, budget=200)
    pool = job.head.shared.pool
    assert pool.hungry
    while job.work():
        pass
    assert 200 <= 10 * len(job.rows_of) <= 1.25 * 200 + 30
    job.look()
    assert not pool.hungry
    while job.ask("train", 0):
        pass
    assert job.work()


@pytest.mark.parametrize("bound", [False, True])
def test_a_process_that_works_on_for_a_pass_given_up_is_ended_unless_it_has_copies_of_a_dataset(
    bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(EIGHT)
    me, attempt = job.workers[0].me.worker, job.head.attempt
    assert job.workers[0].ask() and attempt is not None and attempt.planner is not None
    monkeypatch.setattr(attempt, "bound", lambda: {me} if bound else set())
    with attempt.shared.changed:
        attempt.planner.abandon(attempt.planner.active[me].pass_)
        assert attempt.planner.look(time.monotonic()) == []
        assert attempt.planner.look(time.monotonic() + 60) == ([] if bound else [me])


def test_nobody_is_late_while_this_machine_stands_still() -> None:
    job, now = Job(EIGHT, hosts=2), time.monotonic()
    assert job.workers[0].ask()
    nodes = [about(host) for host in job.hosts]
    job.head._look_once(nodes, now)
    assert job.head._look_once(nodes, now + 5000) == []
    assert len(job.head.hosts.workers) == 4 and not job.head.shared.pool.avoided
    after = (job.head._look_once(nodes, now + 5000 + second) for second in range(1, 400))
    assert any("its handle" in handles for handles in after), "it does hang"


def test_a_place_ahead_of_the_data_is_refused() -> None:
    job = Job(EIGHT, ranks=2, batch=2)
    assert job.head.position(0, 0, 0, 0)["rows"] == 0
    with pytest.raises(ValueError, match="step 1 is not reached"):
        job.head.position(0, 0, 1, 0)
