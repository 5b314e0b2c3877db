"""Deadly records are kept out of the chain, and the groups of a shard stay what they are.

A death of the process is an exception that nothing of the chain catches; everything else is real.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.chain.stages import RecordTransform
from stoker.data import read_torch
from stoker.protocol import BadRecord, BlockReport, PassPlan, Record, Shard, Work
from stoker.read.sources import Source, record_id
from stoker.serve.shards import Guard, LoadedSplit, blocks_of
from stoker.serve.suspects import Suspects

COUNT = 23


class DeadError(BaseException):
    """The process is gone."""


class Items:
    def __init__(self, kills: frozenset[int]) -> None:
        self.kills = kills
        self.x = np.arange(COUNT, dtype=np.float64)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.kills:
            raise DeadError
        return {"x": self.x[index : index + 1].copy(), "index": index}


class Unlisted(Source):
    def count(self) -> int:
        return COUNT

    def shards(self, records: int, order: Any) -> list[Shard]:
        return [Shard("all")]

    def read(self, shard: Shard, order: Any) -> Iterator[Record | BadRecord]:
        for index in range(COUNT):
            record = {"key": str(index), "x": np.array([float(index)]), "index": index}
            yield BadRecord("3", "made bad") if index == 3 else record


class Double(RecordTransform):
    """Works in place, so that a record that passes twice is another one; kills at some."""

    random = False

    def __init__(self, kills: frozenset[int]) -> None:
        self.kills = kills

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        if record["index"] in self.kills:
            raise DeadError
        record["x"] *= 2
        return record


def told(suspects: Suspects, method: str, what: str) -> str | None:
    """The coordinator's side, called at once."""
    if method == "record_begins":
        return suspects.begins("task", "train", what)
    suspects.does("task", what)
    return None


Given = list[tuple[dict[str, Any], BlockReport]]


def run(
    source: Source, kills: frozenset[int], block: int, skip: int
) -> tuple[Given, Suspects, int]:
    """As Ray runs a task: again whenever its process dies."""
    suspects, number = Suspects(), 0
    plan = PassPlan(seed=1, epoch=0, split="train", shuffle=False, block_records=block)
    (shard,) = source.shards(COUNT, None)
    work = Work(5, shard, skip)
    while True:
        guard = None
        if number:
            names = suspects.starts("task", "train", number)[1]
            guard = Guard({}, partial(told, suspects) if names else None)
        try:
            chain = Chain(as_stages([Double(kills)]), seed=1)
            return list(blocks_of(LoadedSplit(source, chain), plan, work, guard)), suspects, number
        except DeadError:
            number += 1


@settings(max_examples=60, deadline=None)
@given(
    st.sets(st.integers(0, COUNT - 1), max_size=3).map(frozenset),
    st.sets(st.integers(0, COUNT - 1), max_size=2).map(frozenset),
    st.sampled_from([1, 4, 10, 40]),
    st.integers(0, 1),
    st.booleans(),
)
@pytest.mark.long
def test_groups_keep_their_numbers_and_all_other_records(
    in_chain: frozenset[int], in_read: frozenset[int], block: int, skip: int, listed: bool
) -> None:
    in_read = in_read if listed else frozenset()
    source = read_torch(Items(in_read)) if listed else Unlisted()
    groups, suspects, deaths = run(source, in_chain, block, skip)
    bad = {3} - in_chain - in_read if not listed else set()
    skipped = set(range(skip * block))
    deadly = {i for i in in_chain | in_read if listed or i != 3}
    found = {int(key.removeprefix("item ")) for key in suspects.of("train")}
    assert found == (deadly - skipped) | (in_read & deadly)
    assert deaths == (2 + 2 * len(found) if found else 0)
    expected = [range(i, min(i + block, COUNT)) for i in range(skip * block, COUNT, block)]
    assert [report.nth for _, report in groups] == [skip + i for i in range(len(expected))]
    for members, (columns, report) in zip(expected, groups, strict=True):
        left = [i for i in members if i not in deadly | bad and not (not listed and i == 3)]
        assert report.records == len(members)
        assert report.id_sum == sum(record_id(str(i)) for i in members)
        assert sorted(int(b.key) for b in report.bad) == sorted(set(members) - set(left))
        assert columns.get("x", np.empty((0, 1))).ravel().tolist() == [2.0 * i for i in left]


class Reversed(Items):
    """Items whose keys are the numbers of others."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "key": str(COUNT - 1 - index)}


@pytest.mark.parametrize(
    ("in_read", "in_chain"), [({}, {2}), ({2}, {}), ({2}, {3}), ({2}, {COUNT - 3})]
)
def test_a_record_is_not_taken_for_the_item_of_its_number(
    in_read: set[int], in_chain: set[int]
) -> None:
    source = read_torch(Reversed(frozenset(in_read)))
    groups, suspects, _ = run(source, frozenset(in_chain), 10, 0)
    trained = sorted(x for columns, _ in groups for x in columns["x"].ravel().tolist())
    assert trained == [2.0 * i for i in range(COUNT) if i not in {*in_read, *in_chain}]
    assert len(suspects.of("train")) == len(in_read) + len(in_chain)


def test_a_record_that_was_bad_before_and_still_is_is_not_tried_elsewhere() -> None:
    class Unreadable(Unlisted):
        def read(self, shard: Shard, order: Any) -> Iterator[Record | BadRecord]:
            yield BadRecord("2", "cannot be read", passing=True)

    loaded = LoadedSplit(Unreadable(), Chain(as_stages([]), seed=1))
    plan = PassPlan(seed=1, epoch=0, split="train", shuffle=False, block_records=5)
    guard = Guard({"2": "cannot be read"}, None)
    [(_, report)] = blocks_of(loaded, plan, Work(0, Shard("all")), guard)
    assert [(bad.key, bad.passing) for bad in report.bad] == [("2", False)]


def test_a_bad_item_stays_bad_and_the_record_that_has_its_number_as_key_good() -> None:
    class Damaged(Reversed):
        damaged = True

        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 2 and self.damaged:
                raise ValueError("damaged")
            return super().__getitem__(index)

    source = read_torch(Damaged(frozenset()))
    (shard,) = source.shards(COUNT, None)
    plan = PassPlan(1, 0, "train", shuffle=False, block_records=COUNT)
    loaded = LoadedSplit(source, Chain(as_stages([Double(frozenset())]), seed=1))
    ((columns, report),) = blocks_of(loaded, plan, Work(0, shard))
    for damaged in (True, False):
        source.dataset.damaged = damaged
        known = {bad.called: bad.reason for bad in report.bad}
        ((again, remade),) = blocks_of(loaded, plan, Work(0, shard), Guard(known, None))
        assert again["x"].tolist() == columns["x"].tolist()
        assert [bad[:2] for bad in remade.bad] == [bad[:2] for bad in report.bad]
