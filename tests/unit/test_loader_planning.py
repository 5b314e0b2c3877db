"""The service behind `stoker.DataLoader`: which process reads what, for how long, and for which script."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset, default_collate

from stoker.config.schema import Config
from stoker.loader.loader_pass import LoaderPass
from stoker.loader.loader_service import LoaderAttempt, LoaderService
from stoker.loader.loader_source import PAGES, LoaderSource
from stoker.loader.script_state import ScriptState
from stoker.loader.work import LoaderWork, LoadRequest
from stoker.protocol import (
    BadRecord,
    BlockReport,
    Claim,
    Made,
    Process,
    Shard,
)
from stoker.serve import service
from stoker.serve.blocks.packing import pack, unpack
from stoker.serve.passes import ServiceState
from stoker.serve.pool import ChainHost


def batches(numbers: Iterable[int], of: str = "") -> list[tuple[int, Shard, int]]:
    """Places with a batch each; those of another name or number have other records."""
    requests = {
        n: LoadRequest(0, batches=((n, [n]),), digests=(f"{of}{n}".encode(),)) for n in numbers
    }
    return [(n, Shard(f"batch {n}", items=(request,)), 0) for n, request in requests.items()]


class TwoHosts:
    """The service's planner and chain workers `a` on a CPU host and `b` on one that trains; no Ray."""

    def __init__(self, budget: int, trains: bool) -> None:
        shared = ServiceState(print, budget, {})
        self.pool = shared.pool
        self.hosts = [ChainHost("a", 1), ChainHost("b", 1, trains)]
        for at in (0.0, 3.0):
            self.pool.update(self.hosts, trains, at)
        self.pool.workers_are({"a": "a", "b": "b"}, 3.0)
        self.attempt = LoaderAttempt(0, shared, {"s": {}})
        self.planner = self.attempt.planner

    def open(self, key: str, streams: int, stall_s: float = 60.0, of: str = "s") -> LoaderPass:
        """A pass of the loader `of` over so many streams, or over 99 batches."""
        self.attempt.open(key, of, streams, stall_s)
        shards = (
            [(n, Shard(f"worker {n}"), 0) for n in range(streams)]
            if streams
            else batches(range(99), key)
        )
        self.attempt.submit(key, shards, len(shards))
        self.planner.advance()
        return self.attempt.passes[key]

    def claim(self, worker: str) -> Claim | None:
        return self.planner.claim(Process(worker, worker, "1"))

    def made(self, worker: str, claim: Claim, nth: int, last: bool = False) -> bool:
        shard = claim.work[0].number
        report = BlockReport(shard, nth, last, rows=1, records=1, bytes_out=150, seconds=2.0)
        return self.planner.reported(
            Process(worker, worker, "1"), claim.number, Made(report, f"{shard}.{nth}")
        )

    def given(self, worker: str) -> Claim:
        claim = self.claim(worker)
        assert claim is not None
        return claim


def test_a_pass_that_nobody_takes_from_does_not_keep_another_from_being_made() -> None:
    """A training pass that was left fills the room for batches; validation goes on."""
    head, found = TwoHosts(budget=300, trains=False), list[str]()
    with head.attempt.shared.changed:
        head.open("train", 0, of="train")
        val = head.open("val", 0, of="val")
        for _ in range(9):
            claim = head.given("a")
            found.append(claim.plan.split)
            head.made("a", claim, 0, last=True)
            if claim.plan.split == "val":  # its script takes what is there
                (val.next,) = val.ready
                val.next = (val.next[0] + 1, 0)
                val.ready.clear()
    assert found.count("val") >= 6


def test_batches_are_made_in_their_order_though_calls_of_a_script_overtake_each_other() -> None:
    head = TwoHosts(budget=10**9, trains=False)
    with head.attempt.shared.changed:
        head.attempt.open("train", "s", 0, 60.0)
        for numbers in ((4, 5), (0, 1), (2, 3)):
            head.attempt.submit("train", batches(numbers), 6)
        head.planner.advance()
        made = [head.given(worker).work[0].shard.path for worker in ("a", "b")]
    assert made == ["batch 0", "batch 1"]


def test_a_pass_whose_script_was_interrupted_while_it_was_opened_is_not_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "Agents", lambda *_, **__: SimpleNamespace(run="run", nodes=set()))
    given = {
        "config": Config(),
        "node": "head",
        "budget_bytes": 300,
        "most_waiting": 64,
    }
    head = LoaderService(**given)
    monkeypatch.setattr(head, "start_engine", lambda me: None)
    head.setups["n"] = "setup"

    def opened(key: str) -> list[str]:
        whose = None, key, f"n/{key}", "loader", 0, False, 60.0, "head", "job"
        head.open(*whose, "", None, 1, batches([0]), None)
        return [each.plan.split for each in head.attempt.planner.passes] if head.attempt else []

    head.close("first")  # the calls overtook each other
    assert opened("first") == []
    assert opened("second") == ["n/second"]
    assert opened("second") == ["n/second"], "Ray asks again after a broken connection"


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> float:
    """When all of a test happens."""
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now)
    return now


def test_each_pass_has_the_deadline_of_its_loader(began: float) -> None:
    head = TwoHosts(budget=10**9, trains=False)
    with head.attempt.shared.changed:
        patient, hasty = head.open("patient", 0, 600.0), head.open("hasty", 0, 40.0)
        assert head.given("a") and head.given("b")
        head.planner.look(began + 50)
        ((place, reason),) = hasty.failed.items()
        assert place == hasty.next and "no result for 50 s (stall_timeout_s: 40)" in reason
        assert "DataLoader" in reason and "data." not in reason
        assert not patient.failed and not head.attempt.over
        head.planner.look(began + 560)
        assert "(stall_timeout_s: 600)" in patient.failed[patient.next]


def test_a_stream_may_pause_for_half_as_long_as_its_loader_waits() -> None:
    """One that hangs is then read elsewhere, before its pass is given up."""
    head, began = TwoHosts(budget=10**9, trains=False), time.monotonic()
    with head.attempt.shared.changed:
        stream = head.open("stream", 1, 600.0)
        claim = head.given("a")
        assert [head.made("a", claim, nth) for nth in range(3)] == [True] * 3
        batches = head.open("batches", 0, 600.0, of="t")
        assert head.given("b").plan.split == "t"
        head.planner.recovery.patience.took("t", "b", 0.1)
        assert head.planner.look(began + 100) == ["b"], "the other pass's"
        assert head.planner.look(began + 290) == []
        assert head.planner.look(began + 310) == ["a"] and not (stream.failed or batches.failed)


def test_a_stream_goes_on_where_it_is_read_although_its_host_gets_no_other_work() -> None:
    """Enough is ready, so the training host has stopped helping; its stream is the one waited for."""
    head = TwoHosts(budget=1000, trains=True)
    with head.attempt.shared.changed:
        train = head.open("train", 2)
        for worker in "ab":
            claim = head.given(worker)
            for nth in range(4):
                head.made(worker, claim, nth)
        head.pool.update(head.hosts, head.planner.hungry, 4.0)
        train.ready = {place: block for place, block in train.ready.items() if place[0] != 1}
        train.next = (1, 4)
        assert not head.pool.may_work("b")
        going_on = head.given("b")
        assert (going_on.work[0].number, going_on.work[0].skip) == (1, 4)
        assert head.claim("a") is None, "nobody else reads it"


class Draws(IterableDataset[Any]):
    state = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(6):
            self.state = self.state * 5 + 1
            yield self.state


def test_a_block_that_is_made_again_leaves_the_copy_of_the_stream_alone() -> None:
    """A host's agent died and took a batch along; the chain worker that reads the stream makes it again."""

    def read(source: LoaderSource, served: int) -> Iterator[Any]:
        shard = Shard(
            "worker 0", items=(LoadRequest(7, worker=0, served=served),), home="w" if served else ""
        )
        return (unpack(record[PAGES])[1].batch for record in source.read(shard, None))

    def two_passes(again: bool) -> list[Any]:
        work = LoaderWork(
            Draws(), default_collate, True, True, 1, False, 1, None, False, keeps=True
        )
        source = LoaderSource(
            (pack([(str(Path.cwd()), [], {}, ScriptState())]), pack([work])), True
        )
        first = read(source, 0)
        taken = [next(first) for _ in range(4)]
        if again:
            made_again = [*itertools.islice(read(source.apart(), 0), 2)]
            assert [each.tolist() for each in made_again] == [each.tolist() for each in taken[:2]]
        return [
            each if each is None else each.tolist() for each in (*taken, *first, *read(source, 1))
        ]

    assert two_passes(again=True) == two_passes(again=False)


class Ranks(TwoHosts):
    """Passes that want batches of the same name; `a` makes whatever there is."""

    def __init__(self, *keys: str, budget: int = 10**9, ranks: int = 2) -> None:
        super().__init__(budget, trains=False)
        self.made_batches: list[int] = []
        self.had: dict[str, list[int]] = {key: [] for key in keys}
        for key in keys:
            self.attempt.open(key, key, 0, 60.0, ranks)

    def ask(self, key: str, *numbers: int) -> None:
        first = self.attempt.passes[key].known
        shards = [(first + n, *shard[1:]) for n, shard in enumerate(batches(numbers))]
        self.attempt.submit(key, shards, None)

    def make(self, worker: str = "a") -> None:
        while (claim := self.claim(worker)) is not None:
            for work in claim.work:
                self.made_batches += [number for number, _ in work.shard.items[0].batches]
                report = BlockReport(work.number, 0, True, rows=1, records=1, bytes_out=150)
                made = Made(report, f"{worker} {len(self.made_batches)}")
                if not self.planner.reported(Process(worker, worker, "1"), claim.number, made):
                    break  # there is no room for more
        self.planner.ended(Process(worker, worker, "1"))

    def take(self, key: str) -> list[int]:
        """What the script of a pass has now, as the service gives it."""
        pass_ = self.attempt.passes[key]
        pass_.given.clear()
        while pass_.next in pass_.ready:
            parts = pass_.give(pass_.next)
            self.attempt.sharing.taken(pass_, pass_.next, parts)
            for group, start, stop in parts:
                self.had[key] += [int(each) for each in group.digests[start:stop]]
            pass_.next = (pass_.next[0] + 1, 0)
        return self.had[key]

    def held(self) -> int:
        gc.collect()
        return len(self.attempt.shared.holdings.all())


def test_a_lost_block_that_several_ranks_need_is_made_again_once() -> None:
    """Also if the rank for which it was being made again ends before."""
    head = Ranks("0", "1")
    with head.attempt.shared.changed:
        head.ask("0", 0, 1)
        head.ask("1", 0, 1)
        head.make()
        head.planner.lose(head.attempt.shared.holdings.all())
        assert len(head.planner.again) == 2
        head.attempt.close("0")
        assert {item.pass_.plan.split for item in head.planner.again} == {"1"}
        head.make("b")
        assert not any(block.lost for block in head.attempt.shared.holdings.all())
        assert {block.node for block in head.attempt.passes["1"].needed} == {"b"}
        assert head.take("1") == [0, 1] and sorted(head.made_batches) == [0, 0, 1, 1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_for_ranks_that_come_late_stay_within_the_budget(ranks: int) -> None:
    head = Ranks("0", "1", budget=8 * 150, ranks=ranks)  # a quarter of it for these: two blocks
    with head.attempt.shared.changed:
        for number in range(6):
            head.ask("0", number)
            head.make()
            head.take("0")
        head.take("0")
        assert head.held() == (0 if ranks == 1 else 2)
        head.ask("1", *range(6))
        head.make()
        assert head.take("1") == [*range(6)]
        head.attempt.close("0"), head.attempt.close("1")
        assert head.held() == 0


def test_a_rank_that_does_not_take_its_batches_does_not_hold_up_the_others() -> None:
    """Not even when its own fill the budget."""
    head = Ranks("0", "1", budget=2 * 150)
    with head.attempt.shared.changed:
        head.ask("0", *range(9))
        head.ask("1", *range(9))
        for _ in range(9):
            head.make()
            head.take("1")
        assert head.take("1") == [*range(9)] and sorted(head.made_batches) == [*range(9)]


def test_batches_that_fail_do_so_for_each_rank_that_wants_them() -> None:
    head = Ranks("0", "1")
    with head.attempt.shared.changed:
        failed = [head.attempt.passes[key].failed for key in "01"]
        head.ask("0", 0, 1)
        head.ask("1", 0)
        claim = head.given("a")
        report = BlockReport(claim.work[0].number, 0, True, bad=[BadRecord("0", "it kills")])
        head.planner.reported(Process("a", "a", "1"), claim.number, Made(report, ""))
        assert failed == [{(0, 0): "it kills"}] * 2
        head.make()
        head.attempt.close("0"), head.attempt.close("1")
        assert head.held() == 0
