"""Streams and copies of a dataset in a `stoker.DataLoader`: draws, continuation, and refused states."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from alike import equal
from loading import Records, Stream
from PIL import Image
from test_loader_order import ORDERS, SHARED, Counts, Positions, drawn_order, lists, loader, seeds
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler

from stoker import DataLoader
from stoker.loader.digests import batch_digest

pytestmark = pytest.mark.usefixtures("loader_in_this_process")


@pytest.mark.long
def test_a_dataset_that_counts_its_epochs_counts_those_that_were_given_up_too() -> None:
    made = loader(DataLoader, "epochs", 2, True)
    next(iter(made))
    assert {n // 100 for batch in lists(made) for n in batch} == {2}
    copies = loader(DataLoader, "epochs", 2)
    assert [{n // 100 for batch in lists(copies) for n in batch} for _ in range(2)] == [{1}, {1}]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_another_one_over_the_same_copies_has_ended_says_so(workers: int) -> None:
    made = loader(DataLoader, "epochs", workers, workers > 0)
    first = iter(made)
    next(first)
    assert len(lists(made)) == len(lists(made))
    with pytest.raises(RuntimeError, match="another pass over this loader has begun"):
        next(first)
    over = iter(made)
    assert list(over) and list(made) and list(over) == []


@pytest.mark.parametrize("by", ORDERS)
@pytest.mark.parametrize("persistent", [False, True])
def test_streams_that_worker_init_fn_seeds_draw_alike_as_in_torch(
    by: str, persistent: bool
) -> None:
    def made() -> DataLoader[Any]:
        options: Any = {**SHARED, "worker_init_fn": seeds, "persistent_workers": persistent}
        return DataLoader(drawn_order(by), **options)

    once = made()
    first, second = list(once), list(once)
    for found in (first, second):
        assert sorted(int(number) for batch in found for number in batch[0]) == list(range(40))
    assert equal(first, second) is not persistent, "torch's go on, too"
    for taken in (1, 6):
        whole, again = made(), made()
        pass_two = [list(whole), list(itertools.islice(whole, taken))][1]
        again.load_state_dict(whole.state_dict())
        assert equal([*pass_two, *again], second)


@pytest.mark.parametrize("workers", [0, 2])
def test_copies_of_a_dataset_go_on_also_after_the_folder_and_the_module_path_have_changed(
    workers: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (loader(of, "epochs", workers, workers > 0) for of in (DataLoader, TorchLoader))
    for number in range(4):
        if number == 2:
            monkeypatch.chdir(tmp_path)
            monkeypatch.syspath_prepend(str(tmp_path))  # as importing a package may do
        assert lists(ours) == lists(theirs)


class CountsItsLength(Counts):
    length: int | None = None

    def __len__(self) -> int:
        self.length = 23
        return self.length


def test_copies_that_begin_anew_because_the_dataset_has_changed_are_told() -> None:
    made = DataLoader(CountsItsLength(), batch_size=4)
    assert min(lists(made))[0] >= 100
    len(made)
    with pytest.warns(UserWarning, match="begins with new copies of the dataset"):
        lists(made)


class Countless(list[int]):
    def __len__(self) -> int:
        raise NotImplementedError


class Permuted(Countless):
    """Draws from a generator that no state includes."""

    drawn = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.drawn.permutation(43).tolist())


def shuffled(worker: int, workers: int) -> list[int]:
    return random.Random(None).sample(numbers := range(worker, 23, workers), len(numbers))


def at_epoch(epoch: int) -> DistributedSampler[Any]:
    sampler = DistributedSampler(Records(), 1, 0)
    sampler.set_epoch(epoch)
    return sampler


CHANGED: dict[str, tuple[Any, Any, int, str]] = {
    "fewer batches": (
        {"dataset": Records(), "sampler": Countless(range(43))},
        {"dataset": Records(), "sampler": Countless(range(20))},
        9,
        "after 9 batches, but the sampler now has 5",
    ),
    "draws that no state includes": (
        *[{"dataset": Records(), "sampler": Permuted()}] * 2,
        2,
        r"after 2 batches, and the sampler now gives other .*set_epoch",
    ),
    "no set_epoch": (
        {"dataset": Records(), "sampler": at_epoch(3)},
        {"dataset": Records(), "sampler": at_epoch(0)},
        2,
        r"after 2 batches, and the sampler now gives other .*set_epoch",
    ),
    "a shorter stream": (
        {"dataset": Stream(lambda *_: range(20))},
        {"dataset": Stream(lambda *_: range(12))},
        4,
        "its first 4 batches are not those delivered",
    ),
    "a shuffled stream": (
        *[{"dataset": Stream(shuffled), "num_workers": 2}] * 2,
        3,
        r"was opened again.* are not those delivered",
    ),
    "a shuffled stream at its end": (
        *[{"dataset": Stream(shuffled), "num_workers": 2}] * 2,
        6,
        r"was opened again.* are not those delivered",
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_state_of_batches_that_no_longer_come_is_refused(change: str) -> None:
    """Records would be lost and repeated."""
    before, after, taken, text = CHANGED[change]
    made = DataLoader(batch_size=4, **before)
    iterator = iter(made)
    for _ in range(taken):
        next(iterator)
    state, again = made.state_dict(), DataLoader(batch_size=4, **after)
    again.load_state_dict(state)
    for _ in range(2):  # the state is not used up by a pass that could not be opened
        with pytest.raises((ValueError, RuntimeError), match=text):
            list(again)
        if isinstance(after["dataset"], Stream):
            return
    if change != "fewer batches":
        del state["place"]["indices"]  # as in states of versions that knew no digest
        again.load_state_dict(state)
        assert sum(1 for _ in again) == 9


class Stateful(Counts):
    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def test_what_a_state_or_an_option_cannot_include_is_said() -> None:
    for says, text in (
        (
            lambda: DataLoader(Stateful()).state_dict(),
            r"that of its dataset \(Stateful\.state_dict\)",
        ),
        (
            lambda: DataLoader(Records(), sampler=Positions()),
            r"Positions\.state_dict\(\) counts some",
        ),
        (lambda: DataLoader(Counts(), on_error="quarantine"), "no effect on an IterableDataset"),
    ):
        with pytest.warns(UserWarning, match=text):
            says()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(Records(), sampler=Positions(), num_workers=2)  # torch's workers are ahead, too
        DataLoader(Records(), shuffle=True)


VALUES = [
    {"b": torch.ones(2, dtype=torch.bfloat16), "a": [1, 2.5, "c", None, b"d"]},
    [np.arange(6).reshape(2, 3), np.float32(2), np.array(["x", None], object)],
    (torch.zeros(0), torch.tensor(True), 1 << 70, 2j, frozenset({"p", "q"})),
    torch.arange(40_000, dtype=torch.int32),
    Image.new("RGB", (3, 2), (1, 2, 3)),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_digest_depends_on_values_alone(value: Any) -> None:
    assert batch_digest(value, 7) == batch_digest(copy.deepcopy(value), 7) != batch_digest(value, 8)


def test_digests_of_values_that_differ_somewhere_differ() -> None:
    whole = torch.arange(1 << 20, dtype=torch.int32)
    others = [whole.clone() for _ in range(3)]
    others[0][0] = 1
    others[1][-1] = 1
    others[2][[0, 500_000]] = others[2][[500_000, 0]]
    values = [
        whole,
        *others,
        whole.to(torch.int64),
        whole.reshape(2, -1),
        {"a": 1},
        {"a": 2},
        {"b": 1},
        [1],
        ["1"],
    ]
    assert len({batch_digest(value) for value in values}) == len(values)
