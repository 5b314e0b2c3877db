"""`stoker.DataLoader` against torch's: samplers, epochs, persistent workers, streams, interruptions."""

from __future__ import annotations

import copy
import itertools
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from alike import equal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from stoker import DataLoader
from stoker.loader.work import batch_digest

pytestmark = pytest.mark.usefixtures("loader_in_this_process")


class Numbers(Dataset[Any]):
    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Counts(IterableDataset[Any]):
    def __init__(self, seed: int | None = 5, by: int = 1) -> None:
        self.seed, self.by, self.epoch = seed, by, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        self.epoch += self.by
        numbers = list(range(worker, 23, workers))
        random.Random(None if self.seed is None else self.seed + self.epoch).shuffle(numbers)
        for number in numbers:
            assert get_worker_info() == info, "also while other streams are read"
            yield 100 * self.epoch + number


class Positions(Sampler[int]):
    def __init__(self) -> None:
        self.epoch = self.at = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(23, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < 23:
            self.at += 1
            yield order[self.at - 1]
        self.epoch, self.at = self.epoch + 1, 0

    def __len__(self) -> int:
        return 23

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Yielded(Sampler[int]):
    """As torchdata's StatefulDistributedSampler: its state is what it has yielded, also at its end."""

    def __init__(self) -> None:
        self.yielded, self.skip = 0, 0

    def __iter__(self) -> Iterator[int]:
        self.yielded, self.skip = self.skip, 0
        for index in range(self.yielded, 23):
            self.yielded += 1
            yield 22 - index

    def __len__(self) -> int:
        return 23

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["yielded"]


class Eager(Sampler[int]):
    """Draws when it is asked for an iterator, not when that is asked for its first index."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(23).tolist())

    def __len__(self) -> int:
        return 23


def arguments(kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(9)
    if kind == "shuffled":
        return {"batch_size": 4, "shuffle": True, "generator": generator}
    if kind == "global":
        return {"batch_size": 4, "shuffle": True}
    if kind == "batches":
        sampler = BatchSampler(RandomSampler(Numbers(), generator=generator), 5, drop_last=True)
        return {"batch_sampler": sampler, "generator": generator}
    if kind == "global batches":
        return {"batch_sampler": BatchSampler(RandomSampler(Numbers()), 5, drop_last=True)}
    if kind == "weighted":
        return {"batch_size": 4, "sampler": WeightedRandomSampler(range(1, 24), 17)}
    if kind in ("positions", "yielded"):
        return {"batch_size": 4, "sampler": Positions() if kind == "positions" else Yielded()}
    if kind == "eager":
        return {"batch_size": 4, "sampler": Eager()}
    if kind == "dropping":
        return {"batch_size": 4, "sampler": Yielded(), "drop_last": True}
    return {"batch_size": 4}


EXAMPLES = int(os.environ.get("STOKER_LOADER_EXAMPLES", "40"))
KINDS = (
    *("in order", "shuffled", "global", "batches", "global batches", "weighted"),
    *("positions", "yielded", "dropping", "eager", "stream"),
)


def loader(of: type[Any], kind: str, workers: int, persistent: bool) -> Any:
    dataset = Counts(by=kind == "epochs") if kind in ("stream", "epochs") else Numbers()
    return of(dataset, num_workers=workers, persistent_workers=persistent, **arguments(kind))


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def passes(of: type[Any], kind: str, workers: int, persistent: bool, count: int) -> list[Any]:
    torch.manual_seed(1)
    made = loader(of, kind, workers, persistent)
    return [(lists(made), float(torch.rand(()))) for _ in range(count)]


@pytest.mark.long
@pytest.mark.parametrize("kind", [*KINDS, "epochs"])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_passes_of_persistent_workers_are_torchs(kind: str, workers: int, persistent: bool) -> None:
    expected = passes(TorchLoader, kind, workers, persistent, 3)
    assert passes(DataLoader, kind, workers, persistent, 3) == expected


@pytest.mark.long
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    kind=st.sampled_from(KINDS),
    workers=st.integers(0, 3),
    persistent=st.booleans(),
    stops=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=5),
)
def test_interrupted_anywhere_a_loader_gives_what_it_would_have_given(
    kind: str, workers: int, persistent: bool, stops: list[tuple[int, bool]]
) -> None:
    """Each stop is a new process: after some batches, in any pass; before its first batch, perhaps opened."""
    settled = {"workers": workers, "persistent": persistent and workers > 0}
    whole = [batches for batches, _ in passes(DataLoader, kind, count=3, **settled)]
    found: list[list[Any]] = [[]]
    torch.manual_seed(1)
    made = loader(DataLoader, kind, **settled)
    for take, opens in [*stops, (1000, True)]:
        left = take
        while left and len(found) <= 3:
            part = lists(itertools.islice(iter(made), left))
            found[-1] += part
            left -= len(part)
            if left:
                found.append([])
                torch.rand(())  # as the script does between its passes
        if opens and not take:
            iter(made)
        state, drawn = made.state_dict(), torch.get_rng_state()
        torch.manual_seed(77)
        made = loader(DataLoader, kind, **settled)
        made.load_state_dict(state)
        assert made.state_dict() == state, "also before the first batch"
        torch.set_rng_state(drawn)
    assert found[:3] == whole


@pytest.mark.long
def test_a_dataset_that_counts_its_epochs_counts_those_that_were_given_up_too() -> None:
    made = DataLoader(Counts(), batch_size=4, num_workers=2, persistent_workers=True)
    next(iter(made))
    assert {n // 100 for batch in made for n in batch.tolist()} == {2}
    copies = DataLoader(Counts(), batch_size=4, num_workers=2)
    assert [{n // 100 for batch in copies for n in batch.tolist()} for _ in range(2)] == [{1}, {1}]


@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 2, "persistent_workers": True}]
)
def test_a_pass_that_another_one_over_the_same_copies_has_ended_says_so(
    options: dict[str, Any],
) -> None:
    made = DataLoader(Counts(), batch_size=4, **options)
    first = iter(made)
    next(first)
    assert len(lists(made)) == len(lists(made))
    with pytest.raises(RuntimeError, match="another pass over this loader has begun"):
        next(first)
    over = iter(made)
    assert list(over) and list(made) and list(over) == []


@pytest.mark.parametrize("taken", [3, 9])
def test_a_state_of_a_stream_that_does_not_repeat_is_refused(taken: int) -> None:
    """At its first batch, and also where all of its batches were taken."""
    made = DataLoader(Counts(seed=None), batch_size=5, num_workers=2)
    iterator = iter(made)
    for _ in range(min(taken, 6)):
        next(iterator)
    again = DataLoader(Counts(seed=None), batch_size=5, num_workers=2)
    again.load_state_dict(made.state_dict())
    with pytest.raises(RuntimeError, match=r"was opened again.* are not those delivered"):
        list(again)


class Drawn(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        yield from info.dataset.drawn if info else ()


def draws(worker: int) -> None:
    info: Any = get_worker_info()
    assert torch.initial_seed() == info.seed
    info.dataset.drawn = [worker, random.random(), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.long
def test_what_worker_init_fn_draws_for_a_stream_is_what_it_draws_in_torch() -> None:
    found = []
    for of in (TorchLoader, DataLoader):
        torch.manual_seed(4)
        found.append(list(of(Drawn(), batch_size=None, num_workers=2, worker_init_fn=draws)))
    assert found[0] == found[1] and len(set(found[1])) == 8


def seeds(worker: int) -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


class Shuffled(IterableDataset[Any]):
    """All workers draw the same order, of which each takes its part."""

    def __init__(self, by: str) -> None:
        self.by = by

    def __iter__(self) -> Iterator[Any]:
        orders = {
            "random": lambda: random.sample(range(40), 40),
            "numpy": lambda: np.random.permutation(40).tolist(),
            "torch": lambda: torch.randperm(40).tolist(),
        }
        info: Any = get_worker_info()
        for number in orders[self.by]()[info.id :: info.num_workers]:
            yield number, *(float(order()[0]) for order in orders.values())


@pytest.mark.parametrize("by", ["random", "numpy", "torch"])
@pytest.mark.parametrize("persistent", [False, True])
def test_streams_that_worker_init_fn_seeds_draw_alike_as_in_torch(
    by: str, persistent: bool
) -> None:
    options: Any = {"batch_size": 3, "num_workers": 2, "worker_init_fn": seeds}
    loader = DataLoader(Shuffled(by), persistent_workers=persistent, **options)
    first, second = list(loader), list(loader)
    if by == "random":
        assert equal(first, list(TorchLoader(Shuffled(by), **options)))
    for found in (first, second):
        assert sorted(int(number) for batch in found for number in batch[0]) == list(range(40))
    assert equal(first, second) is not persistent, "torch's go on, too"
    for taken in (1, 6):
        whole = DataLoader(Shuffled(by), persistent_workers=persistent, **options)
        pass_two = [list(whole), list(itertools.islice(whole, taken))][1]
        again = DataLoader(Shuffled(by), persistent_workers=persistent, **options)
        again.load_state_dict(whole.state_dict())
        assert equal([*pass_two, *again], second)


@pytest.mark.long
def test_streams_draw_what_they_draw_in_torch() -> None:
    found = []
    for of in (TorchLoader, DataLoader):
        torch.manual_seed(4)
        found.append(list(of(Shuffled("numpy"), batch_size=3, num_workers=2)))
    assert equal(*found)


class Stateful(Counts):
    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def test_that_the_state_of_a_dataset_is_not_saved_is_said() -> None:
    with pytest.warns(
        UserWarning, match=r"does not include that of its dataset \(Stateful\.state_dict\)"
    ):
        DataLoader(Stateful()).state_dict()


def test_that_a_sampler_counts_what_is_drawn_ahead_is_said() -> None:
    with pytest.warns(
        UserWarning, match=r"so Positions\.state_dict\(\) counts some that the loop does not"
    ):
        made = DataLoader(Numbers(), sampler=Positions())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(made)
        DataLoader(Numbers(), sampler=Positions(), num_workers=2)  # torch's workers are ahead, too
        DataLoader(Numbers(), shuffle=True)


class Shorter(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def test_a_state_beyond_the_end_of_a_stream_is_refused() -> None:
    made = DataLoader(Shorter(20), batch_size=4)
    iterator = iter(made)
    for _ in range(4):
        next(iterator)
    again = DataLoader(Shorter(12), batch_size=4)
    again.load_state_dict(made.state_dict())
    with pytest.raises(RuntimeError, match="its first 4 batches are not those delivered"):
        list(again)


def pipe() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return IterableWrapper(list(range(40))).shuffle().sharding_filter()


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_datapipes_are_shuffled_and_divided_as_torch_does(workers: int) -> None:
    found = []
    for of in (TorchLoader, DataLoader):
        torch.manual_seed(3)
        made = of(pipe(), batch_size=4, num_workers=workers)
        found.append([lists(made) for _ in range(2)])
    assert found[0] == found[1]
    assert sorted(n for batch in found[1][0] for n in batch) == list(range(40))


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


@pytest.mark.parametrize("workers", [0, 2])
def test_copies_of_a_dataset_go_on_also_after_the_folder_and_the_module_path_have_changed(
    workers: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"batch_size": 4, "num_workers": workers, "persistent_workers": workers > 0}
    ours, theirs = DataLoader(Counts(), **shape), TorchLoader(Counts(), **shape)
    for number in range(4):
        if number == 2:
            monkeypatch.chdir(tmp_path)
            monkeypatch.syspath_prepend(str(tmp_path))  # as importing a package may do
        assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]


class CollatesItself:
    """Mixed into a loader: its `collate_fn` is a method of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, collate_fn=self.collate, **options)

    def collate(self, batch: list[int]) -> list[int]:
        return batch


class OurOwn(CollatesItself, DataLoader[Any]):
    pass


class TorchsOwn(CollatesItself, TorchLoader[Any]):
    pass


@pytest.mark.parametrize("own", [False, True])
def test_copies_of_a_dataset_go_on_where_the_loader_collates_itself(own: bool) -> None:
    found = []
    for of in (TorchsOwn, OurOwn):
        generator = torch.Generator().manual_seed(3) if own else None
        made = of(Counts(), batch_size=4, generator=generator)
        found.append([list(made) for _ in range(3)])
    assert found[0] == found[1]


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


class Refilled(Sampler[Any]):
    """Fills the same two places again for each batch."""

    def __init__(self, places: Any) -> None:
        self.places = places

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, 8, 2):
            for at in range(2):
                if isinstance(self.places[at], list):
                    self.places[at][0] = first + at
                else:
                    self.places[at] = first + at
            yield self.places


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    "places",
    [
        [0, 0],
        [[0], [0]],
        ([0], [0]),
        np.zeros(2, int),
        torch.zeros(2, dtype=torch.int64),
        {0: 0, 1: 0},
    ],
    ids=["list", "lists", "tuple", "ndarray", "tensor", "dict"],
)
def test_a_sampler_may_fill_again_what_it_has_given(places: Any, single: bool) -> None:
    def batches(of: type[Any]) -> list[str]:
        sampler = Refilled(places)
        asked = {"batch_size": None, "sampler": sampler} if single else {"batch_sampler": sampler}
        return [str(batch) for batch in of(Numbers(), **asked)]

    assert batches(DataLoader) == batches(TorchLoader)
