"""A pass lists its shards as they are taken, in the order that it had when it listed all at once."""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import RECORDS, Head, Worker

from stoker.config.schema import Config
from stoker.data import Shard, Source, cut_indices, read_images, read_range
from stoker.protocol import BlockReport, DataCursor, PassPlan
from stoker.serve import planner
from stoker.serve.accounting import EpochAccount
from stoker.serve.items import Numbered, ReadyBlock, Rest
from stoker.serve.passes import Passes
from stoker.serve.pool import CacheAffinity
from stoker.serve.recipe_pass import RecipePass, Splitter

PLAN = PassPlan(1, 0, "train", shuffle=True, block_records=4)


def cut_at_once(n: int, records: int, order: Any, homes: int) -> list[Shard]:
    """How shards were listed when checkpoints were first written; their cursors count on this order."""
    parts: list[tuple[str, list[int]]]
    if order is None:
        parts = [(str(i), list(range(i, min(i + records, n)))) for i in range(0, n, records)]
    elif homes < 2:
        indices = order.permutation(n).tolist()
        parts = [("", indices[i : i + records]) for i in range(0, n, records)]
    else:
        whole = np.random.default_rng(0).permutation(n)
        parts = []
        for home in range(homes):
            own = order.permutation(whole[home::homes]).tolist()
            parts += [(str(home), own[i : i + records]) for i in range(0, len(own), records)]
        parts = [parts[i] for i in order.permutation(len(parts))]
    return [Shard("", rows=len(part), items=tuple(part), home=home) for home, part in parts]


def rest_at_once(shards: list[Shard], start: DataCursor) -> deque[Numbered]:
    left: deque[Numbered] = deque()
    for number, shard in enumerate(shards):
        begun = start.begun(number)
        if begun is not None:
            left.append((number, shard, begun[0]))
    return left


def inherit_at_once(work: deque[Numbered], ready: dict[int, dict[int, bool]]) -> list[Numbered]:
    """What is left when blocks of a shard exist already; True: the last one."""
    left = []
    for number, shard, skip in work:
        nth, last = skip, False
        while nth in ready.get(number, {}):
            last = ready[number][nth]
            nth += 1
        if not last:
            left.append((number, shard, nth))
    return left


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(0, 500),
    records=st.integers(1, 60),
    seed=st.none() | st.integers(0, 2**64 - 1),
    homes=st.integers(0, 12),
)
def test_shards_of_numbered_records_are_those_of_before(
    n: int, records: int, seed: int | None, homes: int
) -> None:
    orders = [None if seed is None else np.random.default_rng(seed) for _ in range(3)]
    before = cut_at_once(n, records, orders[0], homes)
    assert cut_indices(n, records, orders[1], homes) == before
    if n:
        now = read_range(n).shards(records, orders[2], homes)  # type: ignore[call-arg]
        assert len(now) == len(before) and [*now] == before
        assert [now[at] for at in reversed(range(-len(now), len(now)))] == [*reversed(before * 2)]
        assert now[1:-1:2] == before[1:-1:2]
        with pytest.raises(IndexError):
            now[len(now)]
    draws = [order.random() for order in orders if order is not None and (n or order is not orders[2])]
    assert len({*draws}) <= 1, "and as many numbers are drawn"


@pytest.mark.parametrize("homes", [0, 3])
@pytest.mark.parametrize("seed", [None, 5])
def test_shards_of_files_are_those_of_before(tmp_path: Path, homes: int, seed: int | None) -> None:
    for name in ("cat", "dog"):
        (folder := tmp_path / "train" / name).mkdir(parents=True)
        for n in range(60):
            (folder / f"{n}.jpg").write_bytes(b"jpeg")
    source: Any = read_images(str(tmp_path), "train")
    orders = [None if seed is None else np.random.default_rng(seed) for _ in range(2)]
    before = cut_at_once(source.count(), 7, orders[0], homes)
    now = source.shards(7, orders[1], homes)
    assert [(each.rows, each.home) for each in now] == [(each.rows, each.home) for each in before]
    for new, old in zip(now, before, strict=True):
        assert new.items == tuple(source.files[index] for index in old.items)
        assert (new.path, new.name) == (source.root, "")


def ranges(numbers: set[int], chance: random.Random) -> list[tuple[int, int]]:
    """Sorted ranges of numbers, some of which touch."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number and chance.random() < 0.9:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


@settings(max_examples=300, deadline=None)
@given(
    count=st.integers(0, 60),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    exact=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_pass_that_goes_on_has_what_is_left_of_it_in_its_order(
    count: int, share: float, exact: bool, seed: int
) -> None:
    chance = random.Random(seed)
    shards = [Shard(f"s{n}") for n in range(count)]
    done = {n for n in range(count) if chance.random() < share}
    partial = {
        n: (chance.randint(0, 3), chance.randint(0, 9))
        for n in range(count)
        if n not in done and chance.random() < 0.3
    }
    plan = Passes(Config.model_validate({"recipe": "r"}), {}, {}).identity("f")
    start = DataCursor(epoch=0, plan=plan, done=ranges(done, chance), partial=partial)
    ready: dict[int, dict[int, bool]] = {}
    for n in range(count):
        if chance.random() < 0.4:
            last = chance.randint(0, 5)
            ready[n] = {nth: nth == last for nth in range(last + 1) if chance.random() < 0.8}
    expected = inherit_at_once(rest_at_once(shards, start), ready)

    pass_ = RecipePass(
        plan=PLAN, number=0, exact=exact, splitter=Splitter(1, 1, equal=True),
        account=EpochAccount("train", 0), total=None,
    )  # fmt: skip
    skip = {number: blocks for number, (blocks, _) in partial.items()}
    listing: Any = Future()
    pass_.coming = listing
    assert not pass_.listed() and not pass_.complete()
    listing.set_result(Rest(shards, start.done, skip))
    assert pass_.listed()
    taken = pass_.inherit(
        {n: {nth: block(n, nth, last) for nth, last in made.items()} for n, made in ready.items()}
    )
    delivered = [b for n in dict.fromkeys(b.report.shard for b in taken) for b in pass_.deliverable(n)]
    found: list[Numbered] = []
    while pass_.left:
        assert pass_.left == len(expected) - len(found) and not pass_.complete()
        most = chance.randint(1, 5)
        near = pass_.near(most)
        assert len(near) >= min(most, pass_.left)
        item = [near.popleft() for _ in range(chance.randint(1, len(near)))]
        pass_.begin(item)
        if chance.random() < 0.3:
            near.extendleft(reversed(item))
            continue
        found += item
        for number, _, nth in item:
            pass_.report(block(number, nth, True))
            delivered += pass_.deliverable(number)
    assert found == expected
    assert pass_.complete() and not pass_.near(5)
    places = [(each.report.shard, each.report.nth) for each in delivered]
    before = [(b.report.shard, b.report.nth) for b in taken]
    assert sorted(places) == sorted([*before, *((number, nth) for number, _, nth in expected)])
    if exact:
        assert places == sorted(places)


def block(shard: int, nth: int, last: bool) -> ReadyBlock:
    return ReadyBlock(BlockReport(shard, nth, last, 1), "h", f"{shard}.{nth}")


class AllAtOnce(Head):
    """Lists every shard of a pass before the first is chosen, as all passes did."""

    def begin(self, *given: Any) -> None:
        super().begin(*given)
        near, pass_ = self.stream.near, self.stream
        pass_.near = lambda count: near(10**9)  # type: ignore[method-assign]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("order", ["any", "exact"])
def test_work_is_chosen_as_if_all_shards_were_listed(
    order: str, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "PREPARED_S", 1e9)
    chance, claims = random.Random(3), 0
    groups = [chance.randint(1, 3) for _ in range(1500)]
    heads = [kind(groups, order, hosts=3, budget=3000) for kind in (Head, AllAtOnce)]
    for head in heads:
        head.source.shards = homed(head.source)  # type: ignore[method-assign]
        if cached:
            head.planner.affinity = CacheAffinity("memory")
        with head.attempt.changed:
            head.planner.look(0.0)
    names = [f"h{n}" for n in range(3) for _ in range(2)]
    pairs = [[Worker(head, node, f"{node}-{n}") for head in heads] for n, node in enumerate(names)]
    for _ in range(12_000):
        pair = chance.choice(pairs)
        if pair[0].todo:
            went_on = {worker.step() for worker in pair}
            assert len(went_on) == 1, "both continue, or neither"
            if False in went_on:
                for worker in pair:
                    worker.todo = []
        else:
            assert len({worker.ask() for worker in pair}) == 1
            assert pair[0].todo == pair[1].todo
            claims += bool(pair[0].todo)
        if chance.random() < 0.1:
            for head in heads:
                head.consume()
                with head.attempt.changed:
                    head.planner.look(0.0)
        if heads[0].stream.splitter.ended:
            break
    assert all(head.stream.splitter.ended for head in heads) and claims > 100
    assert heads[0].delivered == heads[1].delivered and len(heads[0].delivered) == sum(groups)
    assert heads[0].stream.account.read == heads[0].source.count()


def homed(source: Source) -> Any:
    """Its shards, each with one of seven homes."""
    shards = [
        Shard(each.path, rows=each.rows, home=str(number * 31 % 7))
        for number, each in enumerate(source.shards(RECORDS, None))
    ]
    return lambda records, order: shards


class Reordering(Source):
    """Permutes one list in place and returns it."""

    random = False

    def __init__(self) -> None:
        self.all = [Shard(f"s{n}", rows=1) for n in range(50)]

    def shards(self, records: int, order: Any) -> list[Shard]:
        order.shuffle(self.all)
        return self.all

    def read(self, shard: Shard, order: Any) -> Any:
        raise NotImplementedError

    def count(self) -> int:
        return len(self.all)


def test_the_list_of_a_users_source_may_change_with_the_next_pass() -> None:
    passes = Passes(Config.model_validate({"recipe": "r"}), {"train": Reordering()}, {})
    plans = [passes.plan("train", epoch, None) for epoch in range(2)]
    first = passes.rest(plans[0], None)
    now = [shard.path for _, shard, _ in first.take(10)]
    passes.rest(plans[1], None)
    now += [shard.path for _, shard, _ in first.take(100)]
    assert len({*now}) == 50, "each record once, although the second pass was listed meanwhile"
