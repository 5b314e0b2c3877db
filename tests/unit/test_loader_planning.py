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
from stoker.errors import Failure
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


def at(claim: Claim | None) -> tuple[int, int]:
    """The shard of a claim, and how many of its blocks are skipped."""
    assert claim is not None
    return claim.work[0].number, claim.work[0].skip


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


@pytest.mark.parametrize("streams", [(0, 0), (1, 1), (1, 0), (0, 1)])
def test_scripts_that_share_a_chain_worker_get_batches_alike(streams: tuple[int, int]) -> None:
    head, taken = TwoHosts(budget=10**9, trains=False), [0, 0]
    with head.attempt.shared.changed:
        passes = [head.open(f"{number}", count) for number, count in enumerate(streams)]
        while sum(taken) < 40:
            claim, go_on = head.given("a"), True
            nth, streamed = claim.work[0].skip, not claim.work[0].shard.path.startswith("batch")
            while go_on and sum(taken) < 40:
                go_on = head.made("a", claim, nth, last=not streamed) and streamed
                nth += 1
                for number, each in enumerate(passes):
                    if each.ready.pop(each.next, None):
                        taken[number] += 1
                        shard, block = each.next
                        each.next = (shard, block + 1) if each.streams else (shard + 1, 0)
    assert min(taken) >= 15, taken


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


def test_reading_a_stream_again_up_to_its_place_takes_as_long_as_it_moves(began: float) -> None:
    head = TwoHosts(budget=10**9, trains=False)
    with head.attempt.shared.changed:
        train = head.open("train", 2)
        claim = head.given("a")
        head.given("b")
        head.planner.begins(
            Process("b", "b", "2")
        )  # waits for a process, which may be busy with the other
        for _ in range(3):
            for item in (*head.planner.active.values(), *head.planner.again):
                item.quiet_since -= 50
                item.stuck_since -= 50
            made = Made(BlockReport(nth=7), "")
            assert head.planner.reported(Process("a", "a", "1"), claim.number, made)
            assert head.planner.look(began) == [] and not train.failed
        head.planner.look(began + 60)
        assert "no result for 60 s" in train.failed[train.next], "it hangs"


def test_batches_that_hang_are_named_with_host_and_index(began: float) -> None:
    """The second time, each index is told as it begins; a script that has waited too long asks."""
    head = TwoHosts(budget=10**9, trains=False)
    with head.attempt.shared.changed:
        train = head.open("train", 0, 60.0)
        head.planner.recovery.patience.took("s", "a", 0.1)
        head.planner.recovery.patience.took("s", "b", 0.1)
        first = head.given("a")
        assert not first.care.names and head.planner.look(began + 30) == ["a"]
        head.pool.avoided = set()
        again = head.given("b")
        assert again.work == first.work and again.care.names
        head.attempt.suspects.does(again.care.task, "loading index 57")
        doing = head.attempt.under_way(train)
    assert doing == "host b: DataLoader batch 0, loading index 57"


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


def test_a_stream_that_another_worker_has_taken_over_stays_with_that_one_in_the_next_pass() -> None:
    head = TwoHosts(budget=10**9, trains=False)
    with head.attempt.shared.changed:
        head.open("first", 1)
        claim = head.given("a")
        head.made("a", claim, 0)
        head.planner.failed(
            Process("a", "a", "1"), claim.number, Failure("OSError", text="OSError: no space"), 3
        )
        for item in head.planner.again:
            item.not_before = 0.0
        claim = head.given("b")
        head.made("b", claim, 1, last=True)
        head.planner.ended(Process("b", "b", "1"))
        head.planner.advance()
        head.attempt.close("first")
        head.open("second", 1)
        assert head.claim("a") is None, (
            "its copy of the dataset is not the one that served the first pass"
        )
        assert head.given("b").work[0].shard.home == "b"


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

    def __init__(self, budget: int = 10**9) -> None:
        super().__init__(budget, trains=False)
        self.made_batches: list[int] = []
        self.had: dict[str, list[int]] = {}

    def rank(self, key: str, ranks: int = 2) -> LoaderPass:
        self.attempt.open(key, key, 0, 60.0, ranks)
        self.had[key] = []
        return self.attempt.passes[key]

    def ask(self, key: str, *groups: Iterable[int]) -> None:
        first = self.attempt.passes[key].known
        for place, numbers in enumerate(groups, first):
            request = LoadRequest(
                0,
                batches=tuple((n, [n]) for n in numbers),
                digests=tuple(b"%d" % n for n in numbers),
            )
            self.attempt.submit(key, [(place, Shard(f"batch {place}", items=(request,)), 0)], None)

    def make(self, most: int = 99) -> None:
        while most and (claim := self.claim("a")) is not None:
            most -= 1
            for work in claim.work:
                self.made_batches += [number for number, _ in work.shard.items[0].batches]
                report = BlockReport(work.number, 0, True, rows=1, records=1, bytes_out=150)
                made = Made(report, f"{len(self.made_batches)}")
                if not self.planner.reported(Process("a", "a", "1"), claim.number, made):
                    break  # there is no room for more
        self.planner.ended(Process("a", "a", "1"))

    def take(self, key: str) -> list[int]:
        """What the script of a pass has now, as the service gives it."""
        pass_ = self.attempt.passes[key]
        pass_.given.clear()
        while pass_.next in pass_.ready:
            parts = pass_.given[pass_.next] = pass_.ready.pop(pass_.next)
            self.attempt.sharing.taken(pass_, pass_.next, parts)
            for group, start, stop in parts:
                self.had[key] += [int(each) for each in group.digests[start:stop]]
            pass_.next = (pass_.next[0] + 1, 0)
        return self.had[key]

    def held(self) -> int:
        gc.collect()
        return len(self.attempt.shared.holdings.all())


def test_ranks_that_group_batches_differently_have_each_made_once() -> None:
    head = Ranks()
    with head.attempt.shared.changed:
        head.rank("0"), head.rank("1")
        head.ask("0", [0], [1, 2, 3], [4, 5])
        head.ask("1", [0, 1], [2], [3, 4, 5, 6, 7], [8])
        head.make()
        assert head.take("0") == [*range(6)] and head.take("1") == [*range(9)]
        head.ask("0", [6], [7, 8, 9])
        head.make()
        assert head.take("0") == [*range(10)] and head.take("1") == [*range(9)]
        head.ask("1", [9])
        assert head.take("1") == [*range(10)]
        assert sorted(head.made_batches) == [*range(10)]
        head.take("0"), head.take("1")
        assert head.held() == 0, "both have had all"


def test_a_rank_takes_over_what_one_that_ends_has_not_made() -> None:
    head = Ranks()
    with head.attempt.shared.changed:
        first = head.rank("0", 3)
        head.rank("1", 3), head.rank("2", 3)
        for key in "012":
            head.ask(key, [0, 1], [2, 3], [4, 5] if key == "0" else [4, 5, 6])
        head.make(1)
        claim = head.given("a")  # batches 2 and 3, for rank 0
        head.attempt.close("0")
        head.planner.advance()
        report = BlockReport(claim.work[0].number, 0, True, rows=1, records=1, bytes_out=150)
        head.planner.reported(Process("a", "a", "1"), claim.number, Made(report, "late"))
        head.make()
        assert head.take("1") == head.take("2") == [*range(7)]
        assert sorted(head.made_batches) == [*range(7)] and not first.share.asked


def test_a_lost_block_that_several_ranks_need_is_made_again_once() -> None:
    """Also if the rank for which it was being made again ends before."""
    head = Ranks()
    with head.attempt.shared.changed:
        head.rank("0"), head.rank("1")
        head.ask("0", [0], [1])
        head.ask("1", [0, 1])
        head.make()
        head.planner.lose(head.attempt.shared.holdings.all())
        assert len(head.planner.again) == 2
        head.attempt.close("0")
        assert {item.pass_.plan.split for item in head.planner.again} == {"1"}
        while (claim := head.claim("b")) is not None:
            for work in claim.work:
                report = BlockReport(work.number, 0, True, rows=1, records=1, bytes_out=150)
                made = Made(report, f"again {work.number}")
                head.planner.reported(Process("b", "b", "1"), claim.number, made)
        assert not any(block.lost for block in head.attempt.shared.holdings.all())
        assert {block.node for block in head.attempt.passes["1"].needed} == {"b"}
        assert head.take("1") == [0, 1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_for_ranks_that_come_late_stay_within_the_budget(ranks: int) -> None:
    head = Ranks(budget=8 * 150)  # a quarter of it for these: two blocks
    with head.attempt.shared.changed:
        head.rank("0", ranks), head.rank("1", ranks)
        for number in range(6):
            head.ask("0", [number])
            head.make()
            head.take("0")
        head.take("0")
        assert head.held() == (0 if ranks == 1 else 2)
        head.ask("1", *([number] for number in range(6)))
        head.make()
        assert head.take("1") == [*range(6)]
        head.attempt.close("0"), head.attempt.close("1")
        assert head.held() == 0


def test_a_rank_that_does_not_take_its_batches_does_not_hold_up_the_others() -> None:
    """Not even when its own fill the budget."""
    head = Ranks(budget=2 * 150)
    with head.attempt.shared.changed:
        head.rank("0"), head.rank("1")
        head.ask("0", *([number] for number in range(9)))
        head.ask("1", *([number] for number in range(9)))
        for _ in range(9):
            head.make()
            head.take("1")
        assert head.take("1") == [*range(9)] and sorted(head.made_batches) == [*range(9)]


def test_batches_that_fail_do_so_for_each_rank_that_wants_them() -> None:
    head = Ranks()
    with head.attempt.shared.changed:
        failed = [head.rank(key).failed for key in "01"]
        head.ask("0", [0], [1])
        head.ask("1", [0, 1])
        claim = head.given("a")
        report = BlockReport(claim.work[0].number, 0, True, bad=[BadRecord("0", "it kills")])
        head.planner.reported(Process("a", "a", "1"), claim.number, Made(report, ""))
        assert failed == [{(0, 0): "it kills"}] * 2
        head.make()
        head.attempt.close("0"), head.attempt.close("1")
        assert head.held() == 0
