"""A pass that is interrupted anywhere, any number of times, still gives every record once."""

from __future__ import annotations

import gc
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import long_passes
from stoker.errors import DataError
from stoker.protocol import BadRecord, BlockReport, DataCursor, PassPlan, Plan
from stoker.read.sources import record_id
from stoker.serve import recipe_pass
from stoker.serve.accounting import EpochAccount
from stoker.serve.cursor import Trail, refuse_other_data
from stoker.serve.items import Numbers, ReadyBlock
from stoker.serve.recipe_pass import RecipePass, Splitter
from tests.refusals import refused

PLAN = Plan(seed=1, shuffle=True, order="any", block_records=4, fingerprint="f")
EPOCH = st.lists(st.lists(st.booleans(), min_size=1, max_size=11), min_size=1, max_size=6)
"""Shards of records; True: the record is good."""


def pass_of(splitter: Splitter, account: EpochAccount, trail: Trail) -> RecipePass:
    plan = PassPlan(1, 0, "train", shuffle=True, block_records=4)
    return RecipePass(
        plan=plan, number=0, splitter=splitter, account=account, total=None, trail=trail
    )


@dataclass
class Run:
    shards: list[list[bool]]
    start: DataCursor
    exact: bool
    chance: random.Random

    def __post_init__(self) -> None:
        self.made: list[list[int]] = []
        books = EpochAccount.since("train", 0, self.start)
        self.stream = pass_of(Splitter(1, 1, equal=True), books, Trail(self.start))
        tasks = []
        for shard, records in enumerate(self.shards):
            begun = self.start.begun(shard)
            if begun is not None:
                tasks.append(self.task(shard, records, begun[0]))
        while tasks:
            task = tasks[0] if self.exact else self.chance.choice(tasks)
            if next(task, None) is None:
                tasks.remove(task)
        self.stream.splitter.ended = True

    def task(self, shard: int, records: list[bool], skip: int):
        """Groups of four records; a block may hold the rows of several groups."""
        groups = [records[i : i + 4] for i in range(0, len(records), 4)]
        waiting: list[int] = []
        for nth, group in enumerate(groups):
            if nth < skip:
                continue
            keys = [f"{shard}/{4 * nth + i}" for i in range(len(group))]
            known = self.start.quarantined.get(shard, {})
            group = [good and key not in known for key, good in zip(keys, group, strict=True)]
            ids = [record_id(key) for key, good in zip(keys, group, strict=True) if good]
            bad = [
                BadRecord(key, "bad", passing=True, place=place)
                for place, (key, good) in enumerate(zip(keys, group, strict=True))
                if not good
            ]
            report = BlockReport(
                shard=shard, nth=nth, last=nth == len(groups) - 1, rows=len(ids), records=len(group),
                id_sum=sum(map(record_id, keys)), bad=bad, bad_id_sum=sum(record_id(b.key) for b in bad),
            )  # fmt: skip
            self.stream.account.take(report, "a")
            self.stream.trail.report(report)
            waiting += ids
            if waiting and (report.last or self.chance.random() < 0.6):
                self.made.append(waiting)
                self.stream.arrived(
                    ReadyBlock(replace(report, rows=len(waiting)), "a", f"{len(self.made) - 1}")
                )
                waiting = []
            yield True

    def ids(self, rows: range) -> list[int]:
        return [
            self.made[int(self.stream.blocks[s.block].file)][i]
            for s in self.stream.splitter.slices(rows.start, rows.stop)
            for i in range(s.start, s.stop)
        ]


def through(
    shards: list[list[bool]], cuts: list[float], exact: bool, seed: int, passing: float = 0.0
) -> tuple[list[int], Run]:
    """The ids of the epoch in order, interrupted at each of the cuts (fractions of what is left); each time,
    this share of the good records cannot be read."""
    chance = random.Random(seed)

    def now() -> list[list[bool]]:
        return [[good and chance.random() >= passing for good in records] for records in shards]

    run = Run(now(), DataCursor(epoch=0, plan=PLAN), exact, chance)
    seen: list[int] = []
    for cut in [*cuts, 1.0]:
        rows = round(cut * run.stream.splitter.rows)
        ids = run.ids(range(rows))
        seen += ids
        if cut == 1.0:
            break
        assert run.stream.trail is not None
        run.stream.trail.leave(
            chance.randint(0, rows)
        )  # positions before it are not asked for any more
        position = run.stream.position(rows, sum(ids))
        assert position.rows == len(seen)
        saved = json.loads(json.dumps(position.model_dump(mode="json")))
        run = Run(now(), DataCursor.model_validate(saved), exact, chance)
    run.stream.account.use(
        run.stream.splitter.rows, 0, sum(run.ids(range(run.stream.splitter.rows))), []
    )
    return seen, run


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(EPOCH, st.lists(st.floats(0, 0.99), max_size=4), st.booleans(), st.integers(0, 99))
def test_each_record_comes_once_whatever_the_interruptions(
    shards: list[list[bool]], cuts: list[float], exact: bool, seed: int
) -> None:
    seen, run = through(shards, cuts, exact, seed)
    expected = [
        record_id(f"{shard}/{i}")
        for shard, records in enumerate(shards)
        for i, good in enumerate(records)
        if good
    ]
    assert seen == expected if exact else sorted(seen) == sorted(expected)
    # The books of the whole epoch close: nothing is read twice, nothing is left out.
    counts = run.stream.account.reconcile()
    assert counts["read"] == sum(map(len, shards))
    assert counts["trained"] == len(expected)
    assert counts["quarantined"] == counts["read"] - len(expected)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(EPOCH, st.lists(st.floats(0, 0.99), max_size=4), st.booleans(), st.integers(0, 99))
def test_each_record_is_trained_or_quarantined_once_whichever_can_be_read_at_a_time(
    shards: list[list[bool]], cuts: list[float], exact: bool, seed: int
) -> None:
    try:
        seen, run = through(shards, cuts, exact, seed, passing=0.2)
    except DataError as error:
        assert error.key == "block.remade"
        return
    assert len({*seen}) == len(seen)
    counts = run.stream.account.reconcile(sum(map(len, shards)))
    assert counts["trained"] == len(seen)


def test_a_record_that_could_be_read_and_cannot_when_its_block_is_made_again_is_named() -> None:
    cut = Run([[True] * 10], DataCursor(epoch=0, plan=PLAN), True, random.Random(0))
    position = cut.stream.position(2, sum(cut.ids(range(2))))
    with refused("block.remade"):
        Run([[True, False] + [True] * 8], position, True, random.Random(0))
    later = Run([[True] * 5 + [False] * 5], position, True, random.Random(0))
    assert later.stream.splitter.rows == 3, "in another block it is quarantined"
    behind = Run([[True, True, False, True] + [True] * 6], position, True, random.Random(0))
    assert behind.ids(range(1)) == [record_id("0/3")], "nothing moves"
    assert behind.stream.position(0, 0).quarantined == {0: {"0/2": "bad"}}


def test_of_a_block_with_bad_records_only_one_that_was_trained_is_missed() -> None:
    cut = Run([[False, True, True, True]], DataCursor(epoch=0, plan=PLAN), True, random.Random(0))
    position = cut.stream.position(2, sum(cut.ids(range(2))))
    behind = Run([[True, True, True, False]], position, True, random.Random(0))
    assert behind.stream.splitter.rows == 0
    with refused("block.remade"):
        Run([[True, True, False, True]], position, True, random.Random(0))


def test_a_record_that_could_not_be_read_stays_bad_in_a_block_that_is_made_again() -> None:
    cut = Run([[False] + [True] * 9], DataCursor(epoch=0, plan=PLAN), True, random.Random(0))
    position = cut.stream.position(2, sum(cut.ids(range(2))))
    assert position.quarantined == {0: {"0/0": "bad"}}
    resumed = Run([[True] * 10], position, True, random.Random(0))
    assert resumed.ids(range(1)) == [record_id("0/3")]
    assert resumed.stream.position(0, 0).quarantined == position.quarantined
    assert not resumed.stream.position(1, 0).quarantined, "the next block is not made again"


def test_a_consumed_shard_is_not_read_again_and_others_skip_their_whole_groups() -> None:
    run = Run(
        [[True] * 4, [True] * 9, [True] * 4], DataCursor(epoch=0, plan=PLAN), True, random.Random(0)
    )
    position = run.stream.position(4 + 6, 0)
    assert position.begun(0) is None
    assert position.begun(1) == (1, 2)
    assert position.begun(2) == (0, 0)
    # What was read of the group that was begun is read again, so it is not in the books yet.
    assert (position.books.read, position.books.trained) == (8, 10)


def test_a_place_ahead_of_the_data_is_refused() -> None:
    trail = Trail(DataCursor(epoch=0, plan=PLAN))
    stream = pass_of(Splitter(2, 4, equal=True), EpochAccount("train", 0), trail)
    assert stream.position(0, 0).rows == 0
    with pytest.raises(ValueError, match="step 1 is not reached"):
        stream.position(1, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "g"},
        {"seed": 2},
        {"shuffle": False},
        {"bucket_by": "ids"},
        {"cache_share": 0.25},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_data_or_another_order_are_refused(change: dict[str, object]) -> None:
    plan = PLAN.model_copy(update={"cache_share": 0.5})
    with refused("resume", code=2):
        refuse_other_data(DataCursor(epoch=0, plan=plan), plan.model_copy(update=change))


def test_other_validation_data_is_refused_where_the_checkpoint_names_its_own() -> None:
    saved = DataCursor(epoch=0, plan=PLAN.model_copy(update={"validation": "v~1"}))
    earlier = DataCursor.model_validate(
        {"epoch": 0, "plan": PLAN.model_dump(exclude={"validation"})}
    )
    for now in ("w~1", "v~2", ""):
        plan = PLAN.model_copy(update={"validation": now})
        refuse_other_data(earlier, plan)
        with refused("resume", code=2):
            refuse_other_data(saved, plan)
    refuse_other_data(saved, saved.plan.model_copy(update={"validation": "v~1~2"}))


def test_what_may_differ_between_the_two_runs() -> None:
    other = PLAN.model_copy(update={"order": "exact", "block_records": 9, "cache_share": 0.5})
    refuse_other_data(DataCursor(epoch=0, plan=PLAN), other)


@given(st.lists(st.integers(0, 50)))
def test_delivered_shards_take_memory_for_their_gaps_only(numbers: list[int]) -> None:
    kept = Numbers()
    for number in numbers:
        kept.add(number)
    assert {number for number in range(-1, 53) if number in kept} == set(numbers)
    assert [n for first, stop in kept.ranges for n in range(first, stop)] == sorted(set(numbers))
    assert all(stop < first for (_, stop), (first, _) in pairwise(kept.ranges)), "no two that touch"


EARLY, LATE = 3_200, 12_800
"""Multiples of what a loader submits at once, so that as much is under way at both."""


@pytest.mark.parametrize("drive", [long_passes.recipe, long_passes.loader])
def test_the_heads_memory_does_not_grow_with_the_batches_of_a_pass(
    drive: Callable[[int], Iterator[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_pass, "KEPT_STEPS", 100)
    monkeypatch.setattr(long_passes, "BATCH", 2)
    monkeypatch.setattr(long_passes, "SHARD", 8)
    held = {}
    tracemalloc.start()
    try:
        for batch in drive(LATE + 1000):  # to the end of the pass, whose account closes
            if batch in (EARLY, LATE):
                gc.collect()  # also what other tests have left
                held[batch] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held[LATE] - held[EARLY] < 2 * (LATE - EARLY), "less than any number for each batch"


def test_a_position_before_those_that_can_be_asked_for_is_refused() -> None:
    plan = Plan(seed=1, shuffle=True, order="any", block_records=4, fingerprint="f")
    trail = Trail(DataCursor(epoch=0, plan=plan))
    for nth in range(3):
        trail.report(BlockReport(7, nth, nth == 2, 4, records=4))
        trail.arrive(7, 4)
    whole = trail.after(6, 0)
    trail.leave(5)
    assert trail.after(6, 0) == whole and whole.partial == {7: (1, 2)}
    assert trail.after(12, 0).done == [(7, 8)] and trail.after(12, 0).books.read == 12
    with pytest.raises(ValueError, match="after 4 rows is no longer known, only from 5 on"):
        trail.after(4, 0)
