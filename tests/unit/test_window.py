"""Runs that share blocks: who makes which, what is kept for whom, and which runs may share."""

from __future__ import annotations

import importlib
import sys
from itertools import pairwise
from typing import Any

import pytest

from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.messages import BlockReport
from stoker.read.identity import identity_of
from stoker.serve import joining
from stoker.serve.datasets import DatasetSource
from stoker.serve.joining import depends_on
from stoker.serve.opening import open_data
from stoker.serve.sharing import Shared, Window


def block(nth: int, last: bool = False, run: str = "one", seconds: float = 0.1) -> Shared:
    return Shared([], BlockReport(0, nth, last, rows=4, seconds=seconds, bytes_out=10), run)


def window_of(most_bytes: int = 1000) -> Window:
    """A window that two runs have joined."""
    window = Window(most_bytes)
    assert not window.join("one", {}) and not window.join("two", {})
    return window


def test_a_shard_has_one_maker_and_others_get_each_block_as_it_is_made() -> None:
    window = window_of()
    assert window.take("one", "s", 0, "a", 0.0) == "make"
    assert window.take("two", "s", 0, "b", 0.1) == "wait"
    window.offer("s", block(0), 0.2)
    assert window.take("two", "s", 0, "b", 0.3) == block(0)
    assert window.take("two", "s", 1, "b", 0.3) == "wait"
    window.offer("s", block(1, last=True), 0.4)
    assert window.take("two", "s", 1, "b", 0.5) == block(1, last=True)
    assert not window.making


def test_a_run_that_comes_later_finds_what_was_made_before_it() -> None:
    window = window_of()
    assert window.take("one", "s", 0, "a", 0.0) == "make"
    window.offer("s", block(0, last=True), 0.1)
    assert window.take("two", "s", 0, "b", 100.0) == block(0, last=True)


def test_another_takes_over_from_a_maker_that_stops_or_falls_silent() -> None:
    window = window_of()
    window.take("one", "s", 0, "a", 0.0)
    window.offer("s", block(0), 0.1)
    window.left("s", "somebody else", 0.2)
    assert window.take("two", "s", 1, "b", 1.0) == "wait"
    window.left("s", "a", 1.0)
    assert window.take("two", "s", 1, "b", 1.4) == "wait", "its last block may be on its way"
    assert window.take("two", "s", 1, "b", 1.5) == "make"
    assert window.take("one", "s", 1, "a", 6.4) == "wait"
    assert window.take("one", "s", 1, "a", 6.6) == "make", "it was silent for five seconds"


def test_slow_blocks_are_waited_for_but_never_as_long_as_work_may_take() -> None:
    window = window_of()
    window.offer("r", block(0, last=True, seconds=4.0), 0.0)
    window.take("one", "s", 0, "a", 0.0)
    assert window.take("two", "s", 0, "b", 15.0) == "wait"
    assert window.take("two", "s", 0, "b", 16.1) == "make"
    window.offer("r", block(0, last=True, seconds=1000.0), 17.0)
    assert window.take("one", "s", 0, "a", 16.1 + 30.0) == "make"


def test_a_maker_is_waited_for_if_it_comes_to_the_wanted_block_next_or_after_that() -> None:
    for wanted, answer in ((2, "make"), (3, "wait"), (4, "wait"), (5, "make")):
        window = window_of()
        window.take("one", "s", 3, "a", 0.0)
        assert window.take("two", "s", wanted, "b", 0.1) == answer


def test_the_oldest_blocks_give_way() -> None:
    window = window_of(25)
    for place in "stu":
        window.take("one", place, 0, "a", 0.0)
        window.offer(place, block(0, last=True), 0.0)
    window.offer("u", block(0, last=True), 0.0)  # made twice, kept once
    assert [place for place, _ in window.blocks] == ["t", "u"] and window.bytes == 20
    assert window.take("two", "s", 0, "b", 50.0) == "make"


def test_who_is_ahead_waits_until_one_that_is_a_little_behind_has_caught_up() -> None:
    window = window_of(25)
    for at, place in enumerate("stuvw"):
        assert window.take("one", place, 0, "a", float(at)) == "make"
        window.offer(place, block(0, last=True), float(at))
    assert window.take("two", "s", 0, "b", 5.0) == "make", "it gave way"
    assert window.take("one", "x", 0, "a", 5.1) == "wait"
    window.offer("s", block(0, last=True), 5.2)
    assert window.take("one", "x", 0, "a", 5.3) == "make"
    assert window.take("two", "t", 0, "b", 5.4) == "make"
    assert window.take("two", "y", 0, "c", 5.5) == "make", "who is behind does not wait"


def test_nobody_waits_for_a_run_that_is_far_behind() -> None:
    window = window_of(25)
    for at, place in enumerate("stuv"):
        window.take("one", place, 0, "a", float(at))
        window.offer(place, block(0, last=True), float(at))
    assert window.take("two", "s", 0, "b", 29.9) == "make"
    assert window.take("one", "x", 0, "a", 29.9) == "wait"
    assert window.take("one", "x", 0, "a", 30.1) == "make"


def test_with_a_run_its_blocks_and_its_work_are_gone() -> None:
    window = window_of()
    window.take("one", "s", 0, "a", 0.0)
    window.offer("s", block(0), 0.1)
    window.take("two", "t", 0, "b", 0.2)
    window.offer("t", block(0, run="two"), 0.3)
    window.ended("one")
    assert window.take("two", "s", 0, "b", 0.4) == "make"
    assert window.take("two", "t", 0, "c", 0.4) == block(0, run="two")
    assert list(window.runs) == ["two"] and window.bytes == 10


def test_what_a_run_offers_after_its_end_is_not_taken() -> None:
    window = window_of()
    window.ended("one")
    window.offer("s", block(0, last=True), 0.1)
    assert not window.blocks


def test_a_block_that_cannot_be_fetched_is_made_again_and_others_stay() -> None:
    window = window_of()
    for place in "st":
        window.offer(place, block(0, last=True), 0.1)
    window.lost("s", 0, "")
    assert window.take("two", "s", 0, "b", 0.4) == "make"
    assert window.take("two", "t", 0, "b", 0.4) == block(0, last=True)


def test_a_fast_run_waits_for_a_slow_one_for_half_a_minute_in_all() -> None:
    window, waits = window_of(25), 0
    for at in range(200):
        now, place = float(at), f"p{at}"
        # The slow one makes what the fast one had ten seconds ago, all the time.
        window.take("two", f"p{at - 10}", 0, "b", now)
        for tenth in range(10):
            if (answer := window.take("one", place, 0, "a", now + tenth / 10)) != "wait":
                assert answer == "make"
                window.offer(place, block(0, last=True), now)
                break
            waits += 1
        else:  # its other chain workers go on
            window.passed["one"][place] = now
    assert 250 < waits < 350


def test_only_runs_with_the_same_blocks_join() -> None:
    window = Window(1000)
    assert window.join("one", {"seed": "1", "train data": "a~b"}) == ""
    assert window.join("two", {"seed": "2", "train data": "a~b"}) == "seed"
    assert window.join("three", {"seed": "1", "train data": "a~c"}) == "train data"
    assert window.join("four", {"seed": "1", "train data": "a~b~c"}) == "", "it sampled more of the same"
    assert list(window.runs) == ["one", "four"]


def job(**changes: Any) -> Config:
    sections: dict[str, Any] = {"recipe": "timed:Timed", "params": {"records": 40}, "data": {"share": "x"}}
    return Config.model_validate(sections | changes)


def of(config: Config) -> dict[str, str]:
    data = open_data(config)
    fingerprints = {split: data.identity(split).text for split in data.sources}
    return depends_on(config, data.sources, data.chains, fingerprints, {})


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"train": {"lr": 0.5, "batch_size": 7, "epochs": 3}}, set()),
        ({"name": "other"}, set()),
        ({"data": {"order": "exact", "prefetch_s": 1}}, set()),
        ({"seed": 1}, {"seed", "train chain"}),
        ({"data": {"shuffle": False}}, {"data.shuffle"}),
        ({"data": {"block_records": 8}}, {"data.block_records"}),
        ({"data": {"max_pixels": 100}}, {"train chain"}),
        ({"tracking": {"record_ids": True}}, {"train chain"}),
        ({"params": {"records": 40, "kb": 1}}, {"train chain"}),
        ({"params": {"records": 41}}, {"train data"}),
    ],
)
def test_what_changes_a_block_and_nothing_else_keeps_runs_apart(
    changes: dict[str, Any], differs: set[str]
) -> None:
    one, other = map(of, (job(), job(**changes)))
    assert {name for name in one if one[name] != other[name]} == differs


def test_changed_code_keeps_runs_apart(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "SOURCE_FOLDER", tmp_path)
    config = job()
    seen = []
    for name, text in (("recipe.py", "a"), ("job.yaml", "x"), ("recipe.py", "b"), ("labels/names.txt", "c")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        seen.append(of(config)["code"])
    assert [later == before for before, later in pairwise(seen)] == [True, False, False]


MODULE = """
from stoker.data import read_torch

class Rows:
    def __init__(self, scale):
        self._scale = scale
        self.target = lambda label: label * scale

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return {"x": float(index), "label": self.target(1 if index == 77 else 0)}

def source(scale):
    return read_torch(Rows(scale))

def stages(scale):
    return [lambda record: {**record, "y": record["x"] * scale}]
"""


def test_the_same_code_in_two_staged_copies_is_the_same_and_other_numbers_inside_it_are_not(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for copy, scale in (("one", 2), ("two", 2), ("six", 3)):
        folder = tmp_path / copy
        folder.mkdir()
        (folder / "own_data.py").write_text(MODULE)
        (folder / "job.origins.json").write_text(copy)
        (folder / "job.commit").write_text(copy)
        monkeypatch.setattr(joining, "SOURCE_FOLDER", folder)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "own_data", raising=False)
        own: Any = importlib.import_module("own_data")
        chain = Chain(as_stages(own.stages(scale)), 0)
        known = identity_of(own.source(scale))
        found.append(
            depends_on(job(), {"train": own.source(scale)}, {"train": chain}, {"train": known.text}, {})
        )
    one, two, six = found
    assert one == two
    assert {name for name in one if one[name] != six[name]} >= {"train source", "train chain"}


def test_data_that_differs_at_each_read_is_not_shared() -> None:
    with pytest.raises(UsageError, match=r"data\.share: Noise returns a different record at each read"):
        depends_on(job(), {"train": None}, {}, {}, {"train": "Noise returns a different record at each read"})


def test_datasets_whose_blocks_ray_divides_are_refused() -> None:
    dataset = DatasetSource.__new__(DatasetSource)
    with pytest.raises(UsageError, match=r"read\('train'\) returns a ray\.data\.Dataset"):
        depends_on(job(), {"train": dataset}, {}, {}, {})
