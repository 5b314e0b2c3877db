"""`stoker.DataLoader` against torch's: one table, whole and interrupted anywhere; then scenes apart."""

from __future__ import annotations

import copy
import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from alike import same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading import Records, Stream, Together, row
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from stoker import DataLoader

pytestmark = pytest.mark.usefixtures("loader_in_this_process")


class Counts(IterableDataset[Any]):
    """Shuffled anew by each copy's own count of epochs, where that grows."""

    def __init__(self, by: int = 1) -> None:
        self.by, self.epoch = by, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        self.epoch += self.by
        numbers = list(range(worker, 23, workers))
        random.Random(5 + self.epoch).shuffle(numbers)
        for number in numbers:
            assert get_worker_info() == info, "also while other streams are read"
            yield 100 * self.epoch + number


class Own(Sampler[int]):
    def __len__(self) -> int:
        return 23


class Positions(Own):
    def __init__(self) -> None:
        self.epoch = self.at = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(23, generator=own(self.epoch)).tolist()
        while self.at < 23:
            self.at += 1
            yield order[self.at - 1]
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Yielded(Own):
    """As torchdata's StatefulDistributedSampler: its state is what it has yielded, also at its end."""

    def __init__(self) -> None:
        self.yielded, self.skip = 0, 0

    def __iter__(self) -> Iterator[int]:
        self.yielded, self.skip = self.skip, 0
        for index in range(self.yielded, 23):
            self.yielded += 1
            yield 22 - index

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["yielded"]


class Drawing(Own):
    """Draws as it goes; its own state is empty."""

    def __init__(self) -> None:
        self.generator = own()

    def __iter__(self) -> Iterator[int]:
        for _ in range(23):
            yield int(torch.randint(23, (1,), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Eager(Own):
    """Draws when it is asked for an iterator, not when that is asked for its first index."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(23).tolist())


def own(seed: int = 9) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn_batches(generator: torch.Generator | None) -> dict[str, Any]:
    sampler = RandomSampler(range(23), generator=generator)
    batches = BatchSampler(sampler, 5, drop_last=True)
    return {"batch_sampler": batches, "batch_size": 1, "generator": generator}


def uneven(worker: int, workers: int) -> Iterator[Any]:
    """Its workers come to their ends at different times."""
    return (torch.tensor([worker, n]) for n in range(5 + 6 * worker))


ORDERS: dict[str, Callable[[], list[int]]] = {
    "random": lambda: random.sample(range(40), 40),
    "numpy": lambda: np.random.permutation(40).tolist(),
    "torch": lambda: torch.randperm(40).tolist(),
}


def seeds(worker: int) -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


def drawn_order(by: str) -> Stream:
    """Where all workers draw the same order, each takes its part."""

    def read(worker: int, workers: int) -> Iterator[Any]:
        for number in ORDERS[by]()[worker::workers]:
            yield torch.tensor([number, *(float(order()[0]) for order in ORDERS.values())])

    return Stream(read)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True, "generator": own()},
    "shuffled globally": lambda: {"shuffle": True},
    "batches": lambda: drawn_batches(own()),
    "batches globally": lambda: drawn_batches(None),
    "weighted": lambda: {"sampler": WeightedRandomSampler(range(1, 24), 17, generator=own())},
    "weighted globally": lambda: {"sampler": WeightedRandomSampler(range(1, 24), 17)},
    "rank": lambda: {"sampler": DistributedSampler(range(23), 2, 1, seed=4)},
    "rank in order": lambda: {"sampler": DistributedSampler(range(23), 2, 0, shuffle=False)},
    "positions": lambda: {"sampler": Positions()},
    "yielded": lambda: {"sampler": Yielded()},
    "dropping": lambda: {"sampler": Yielded(), "drop_last": True},
    "drawing": lambda: {"sampler": Drawing()},
    "eager": lambda: {"sampler": Eager()},
    "stream": lambda: {"dataset": Counts(by=0)},
    "turns": lambda: {"dataset": Stream(uneven)},
    "whole turns": lambda: {"dataset": Stream(uneven), "drop_last": True},
    "single turns": lambda: {"dataset": Stream(uneven), "batch_size": None},
}
NOT_RESUMED = {"epochs": lambda: {"dataset": Counts()}}
"""A dataset with a state of its own begins again in a new process."""
NOT_TORCHS = {
    f"seeded {by}": lambda by=by: {"dataset": drawn_order(by), "worker_init_fn": seeds}
    for by in ORDERS
}
"""Without workers, torch's draw from the script's generators; persistent ones draw others in later passes."""
EXAMPLES = int(os.environ.get("STOKER_LOADER_EXAMPLES", "40"))


def loader(of: type[Any], kind: str, workers: int = 0, persistent: bool = False) -> Any:
    shape = {"batch_size": 4, "num_workers": workers, "persistent_workers": persistent}
    given = {**KINDS, **NOT_RESUMED, **NOT_TORCHS}[kind]()
    return of(**{"dataset": Records(count=23), **shape, **given})


def opened(made: Any) -> Any:
    """The script draws between iter() and next(), before the sampler is asked if there are no workers."""
    batches = iter(made)
    torch.rand((), generator=None if made.num_workers else made.generator)
    return batches


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def passes(of: type[Any], *case: Any, before: Callable[[Any, int], Any] | None = None) -> list[Any]:
    torch.manual_seed(1)
    made, found = loader(of, *case), []
    for epoch in range(3):
        if before:
            before(made, epoch)
        found.append((lists(opened(made)), float(torch.rand(()))))
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", [*KINDS, *NOT_RESUMED])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (3, False), (2, True)])
def test_batches_and_the_scripts_own_draws_are_those_of_torch(
    kind: str, workers: int, persistent: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(made: Any, epoch: int) -> None:
        if isinstance(made.sampler, DistributedSampler):
            made.sampler.set_epoch(epoch)
        if epoch == 2:  # as importing a package may do
            monkeypatch.chdir(tmp_path)
            monkeypatch.syspath_prepend(str(tmp_path))

    case = kind, workers, persistent
    assert passes(DataLoader, *case, before=before) == passes(TorchLoader, *case, before=before)


@pytest.mark.long
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    kind=st.sampled_from([*KINDS, *NOT_TORCHS]),
    workers=st.integers(0, 3),
    persistent=st.booleans(),
    stops=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=5),
)
def test_interrupted_anywhere_a_loader_gives_what_it_would_have_given(
    kind: str, workers: int, persistent: bool, stops: list[tuple[int, bool]]
) -> None:
    """Each stop is a new process: after some batches, in any pass; before its first batch, perhaps opened."""
    case = kind, workers, persistent and workers > 0
    whole = [batches for batches, _ in passes(DataLoader, *case)]
    found: list[list[Any]] = [[]]
    torch.manual_seed(1)
    made, is_open = loader(DataLoader, *case), False
    for take, opens in [*stops, (1000, True)]:
        left = take
        while (left or (opens and not take)) and len(found) <= 3:
            part = lists(itertools.islice(iter(made) if is_open else opened(made), left))
            found[-1] += part
            left, is_open = left - len(part), True
            if not left:
                break
            found.append([])
            is_open = False
            torch.rand(())  # as the script does between its passes
        state, drawn = made.state_dict(), torch.get_rng_state()
        torch.manual_seed(77)
        made = loader(DataLoader, *case)
        made.load_state_dict(state)
        assert made.state_dict() == state, "also before the first batch"
        torch.set_rng_state(drawn)
    assert found[:3] == whole


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


class CollatesItself:
    """Mixed into a loader: its `collate_fn` is a method of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, collate_fn=self.collate, **options)

    def collate(self, batch: list[int]) -> list[int]:
        return batch


class FailsOnTheWay(IterableDataset[Any]):
    def __iter__(self) -> Any:
        self.at = iter(range(5))
        return self

    def __next__(self) -> int:
        if (number := next(self.at)) == 2:
            raise ValueError("the third")
        return number


class Refills(Records):
    """Its records, and what is collated, lie in the same memory, as in buffers that are read into."""

    def __init__(self) -> None:
        super().__init__(count=12)
        self.record, self.batch = torch.zeros(1000), {"x": np.zeros((1, 1000)), "of": [0]}
        self.first: Any = None

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.record.fill_(index)

    def into_arrays(self, records: list[torch.Tensor]) -> Any:
        self.batch["x"][:] = records[0]
        self.batch["of"][0] = int(records[0][0])
        return self.batch

    def into_the_first(self, records: list[torch.Tensor]) -> Any:
        if self.first is None:
            self.first = default_collate(records)
        return self.first.fill_(records[0][0])


def refilled(of: type[Any], collates: Any) -> Any:
    records = Refills()
    collate = getattr(records, collates or "", default_collate if collates else None)
    size = 1 if collates else None
    return [copy.deepcopy(batch) for batch in of(records, size, collate_fn=collate)]


def side_by_side(of: type[Any], workers: int) -> Any:
    made = [of(range(12), batch_size=4, shuffle=True, num_workers=workers) for _ in range(2)]
    return [list(each) for each in zip(*made, strict=True)]


def datapipe(of: type[Any], workers: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = IterableWrapper(list(range(40))).shuffle().sharding_filter()
    made = of(pipe, batch_size=4, num_workers=workers)
    return [list(made) for _ in range(2)]


def collates_itself(of: type[Any], generator: torch.Generator | None) -> Any:
    made = type("Own", (CollatesItself, of), {})(Counts(), batch_size=4, generator=generator)
    return [list(made) for _ in range(3)]


def beyond_an_error(of: type[Any]) -> Any:
    iterator = iter(of(FailsOnTheWay(), batch_size=None))
    found = [next(iterator), next(iterator)]
    with pytest.raises(ValueError, match="the third"):
        next(iterator)
    return [*found, *iterator]


def sampled(of: type[Any], places: Any, single: bool) -> Any:
    sampler = Refilled(places)
    asked = {"batch_size": None, "sampler": sampler} if single else {"batch_sampler": sampler}
    return [str(batch) for batch in of(Records(), **asked)]


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def draw_for(_: int) -> list[float]:
    return draw()


def init_draws(of: type[Any]) -> Any:
    def draws(worker: int) -> None:
        info: Any = get_worker_info()
        assert torch.initial_seed() == info.seed
        info.dataset.drawn = [worker, *draw()]

    dataset = Stream(lambda worker, _: vars(get_worker_info().dataset)["drawn"])
    return list(of(dataset, batch_size=None, num_workers=2, worker_init_fn=draws))


def info_of(of: type[Any]) -> Any:
    return [
        list(of(dataset, batch_size=1, collate_fn=list))
        for dataset in (
            Records(lambda _: get_worker_info(), 3),
            Stream(lambda *_: (get_worker_info() for _ in range(3))),
        )
    ]


def padded(batch: Any, **_: Any) -> Any:
    return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)


def registered(of: type[Any]) -> Any:
    """A function of the script collates tensors."""
    functions = torch.utils.data._utils.collate.default_collate_fn_map
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(functions, torch.Tensor, padded)
        return list(of([torch.ones(n) for n in range(2, 14)], batch_size=2))


UNLIKE: list[list[Any]] = [
    [torch.tensor([1], dtype=torch.uint8), torch.tensor([300])],
    [torch.ones(1), torch.tensor([1e300], dtype=torch.float64)],
    [np.array([1]), np.array([1.5])],
    [torch.ones(2), torch.ones(2, requires_grad=True)],
]
PLACES: dict[str, Callable[[], Any]] = {
    "list": lambda: [0, 0],
    "lists": lambda: [[0], [0]],
    "tuple": lambda: ([0], [0]),
    "ndarray": lambda: np.zeros(2, int),
    "tensor": lambda: torch.zeros(2, dtype=torch.int64),
    "dict": lambda: {0: 0, 1: 0},
}
SHARED = {"batch_size": 3, "num_workers": 2}
SCENES: dict[str, Callable[[type[Any]], Any]] = {
    "nested records": lambda of: list(of(Records(row), batch_size=4)),
    "side by side": lambda of: side_by_side(of, 0),
    "side by side with workers": lambda of: side_by_side(of, 2),
    "iterators as batches": lambda of: list(
        of(Records(), batch_sampler=(iter([n, n + 1]) for n in range(3)))
    ),
    "fetched together": lambda of: list(
        of(Together(lambda asked: [row(n) for n in asked]), batch_size=5)
    ),
    "datapipe": lambda of: datapipe(of, 0),
    "datapipe with workers": lambda of: datapipe(of, 2),
    "collates itself": lambda of: collates_itself(of, None),
    "collates itself with a generator": lambda of: collates_itself(of, own()),
    "goes on after an error": beyond_an_error,
    "worker_init_fn draws": init_draws,
    **{
        f"worker_init_fn seeds {by}": lambda of, by=by: list(
            of(drawn_order(by), **SHARED, worker_init_fn=seeds)
        )
        for by in ORDERS
    },
    "streams draw": lambda of: list(of(drawn_order("numpy"), **SHARED)),
    "no worker info": info_of,
    "tensors of several types": lambda of: list(
        of([record for pair in 3 * UNLIKE for record in pair], batch_size=2)
    ),
    "a function that collates tensors": registered,
    **{
        f"memory filled again: {collates}": lambda of, collates=collates: refilled(of, collates)
        for collates in (None, "into_arrays", "into_the_first", "default_collate")
    },
    **{
        f"places filled again: {name}{', single' * single}": (
            lambda of, make=make, single=single: sampled(of, make(), single)
        )
        for name, make in PLACES.items()
        for single in (False, True)
    },
}


@pytest.mark.parametrize("scene", SCENES)
def test_a_loader_gives_what_torchs_gives(scene: str) -> None:
    found = []
    for of in (TorchLoader, DataLoader):
        torch.manual_seed(4)
        found.append([SCENES[scene](of), torch.rand(())])
    assert same(*found)


def numbers(found: Any) -> list[float]:
    return [found] if isinstance(found, float) else [n for each in found for n in numbers(each)]


@pytest.mark.long
@pytest.mark.parametrize("of", ["records", "batches", "streams"])
@pytest.mark.parametrize("size", [5, None])
def test_what_records_and_collate_draw_depends_on_seed_and_epoch_alone(
    of: str, size: int | None
) -> None:
    """And no two of them draw alike, in one epoch or in two."""
    dataset: Any = {
        "records": Records(draw_for),
        "batches": Together(lambda n: draw() if isinstance(n, int) else [draw() for _ in n]),
        "streams": Stream(lambda *_: (draw() for _ in range(20))),
    }[of]

    def drawn(workers: int, seed: int) -> list[float]:
        torch.manual_seed(seed)
        loader = DataLoader(
            dataset,
            batch_size=size,
            num_workers=workers,
            collate_fn=lambda records: (records, draw()),
        )
        return numbers([list(loader), list(loader)])

    first = drawn(3 if of == "streams" else 1, seed=0)  # divided among as many workers as there are
    assert drawn(3, seed=0) == first
    both = first + drawn(3, seed=1)
    assert len(set(both)) == len(both) >= 200


def test_ranks_with_one_seed_draw_alike_only_for_the_same_indices() -> None:
    """As do ranks of a tensor-parallel group, which must have the same batches."""
    drawn = []
    for part in (0, 1, 0):
        torch.manual_seed(0)
        sampler = DistributedSampler(range(6), 2, part, shuffle=False)
        made = DataLoader(Records(draw_for, 6), batch_size=3, sampler=sampler, collate_fn=list)
        drawn.append(numbers(list(made)))
    assert drawn[0] == drawn[2] and not {*drawn[0]} & {*drawn[1]}


def id_and_seed(_: int) -> Any:
    info: Any = get_worker_info()
    return info.id, info.seed


def test_a_record_is_told_of_the_worker_that_torch_would_ask() -> None:
    found = []
    for kind in (TorchLoader, DataLoader):
        torch.manual_seed(0)
        found.append(list(kind(Records(id_and_seed), batch_size=4, num_workers=2)))
    theirs, ours = ([(int(ids[0]), int(seeds[0])) for ids, seeds in each] for each in found)
    assert [worker for worker, _ in ours] == [worker for worker, _ in theirs]
    assert ours[:2] == theirs[:2] and len({seed for _, seed in ours}) == 11


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


class Stateful(Counts):
    length: int | None = None

    def __len__(self) -> int:
        self.length = 23  # the dataset has changed
        return self.length

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def begins_anew() -> None:
    made = DataLoader(Stateful(), batch_size=4)
    assert min(lists(made))[0] >= 100
    len(made)
    lists(made)


def test_what_a_state_or_an_option_cannot_include_is_said() -> None:
    for says, text in (
        (begins_anew, "begins with new copies of the dataset"),
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
