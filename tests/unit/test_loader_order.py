"""`stoker.DataLoader` gives torch's batches: any sampler, workers, ranks, epochs, and from any place on."""

from __future__ import annotations

import copy
import itertools
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from alike import equal
from test_packing import same
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchLoader

from stoker import DataLoader
from stoker.errors import UsageError
from stoker.loader.makers import ProcessMaker
from stoker.loader.script_state import ScriptState
from stoker.loader.work import PAGES, LoaderSource, LoaderWork, LoadRequest
from stoker.protocol import Shard
from stoker.serve.blocks.packing import pack, unpack

pytestmark = pytest.mark.usefixtures("loader_in_this_process")


class Records(Dataset[Any]):
    def __init__(self, count: int = 43) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index)), index, {"name": f"record {index}"}


class Together(Records):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


class Stream(IterableDataset[Any]):
    """Its workers come to their ends at different times."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info else 0
        yield from (torch.tensor([worker, n]) for n in range(5 + 6 * worker))


def samplers(kind: str, rank: int, ranks: int, generator: torch.Generator | None) -> dict[str, Any]:
    records = Records()
    if ranks > 1:
        sampler = DistributedSampler(records, ranks, rank, shuffle=kind != "in order", seed=4)
        return {"sampler": sampler, "batch_size": 4}
    if kind == "in order":
        return {"batch_size": 4}
    if kind == "shuffled":
        return {"batch_size": 4, "shuffle": True, "generator": generator}
    if kind == "weighted":
        return {
            "batch_size": 4,
            "sampler": WeightedRandomSampler(range(1, 44), 30, generator=generator),
        }
    return {
        "batch_sampler": BatchSampler(
            RandomSampler(records, generator=generator), 5, drop_last=True
        )
    }


KINDS = ("in order", "shuffled", "weighted", "batches")


def epochs(kind: type[Any], count: int, arguments: dict[str, Any], seed: int) -> list[list[Any]]:
    torch.manual_seed(seed)
    loader = kind(Records(), **arguments)
    found = []
    for epoch in range(count):
        if isinstance(arguments.get("sampler"), DistributedSampler):
            arguments["sampler"].set_epoch(epoch)
        found.append([*loader, float(torch.rand(()))])
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "workers", "ranks", "own"),
    list(itertools.product(KINDS, (0, 1, 3), (1, 2), (False, True))),
)
def test_batches_and_the_scripts_own_draws_are_those_of_torch(
    kind: str, workers: int, ranks: int, own: bool
) -> None:
    for rank in range(ranks):
        found = []
        for loader in (TorchLoader, DataLoader):
            generator = torch.Generator().manual_seed(9) if own else None
            arguments = samplers(kind, rank, ranks, generator)
            # What torch makes does not depend on its workers, but takes processes.
            many = workers if loader is DataLoader else 0
            found.append(epochs(loader, 3, arguments | {"num_workers": many}, seed=rank))
        assert equal(*found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "size", "drop"), list(itertools.product((1, 2, 3, 5), (None, 1, 4), (False, True)))
)
def test_workers_of_an_iterable_dataset_take_turns_as_torchs_do(
    workers: int, size: int | None, drop: bool
) -> None:
    if size is None and drop:
        drop = False
    arguments = {"batch_size": size, "drop_last": drop, "num_workers": workers}
    expected = (
        list(TorchLoader(Stream(), **arguments)) if workers <= 2 else in_turns(workers, size, drop)
    )
    assert equal(list(DataLoader(Stream(), **arguments)), expected)


def in_turns(workers: int, size: int | None, drop: bool) -> list[Any]:
    """What torch's workers give, without its processes."""
    streams = []
    for worker in range(workers):
        records = [torch.tensor([worker, n]) for n in range(5 + 6 * worker)]
        step = size or 1
        cut = [records[i : i + step] for i in range(0, len(records), step)]
        cut = [batch for batch in cut if len(batch) == step or not drop]
        streams.append([batch[0] if size is None else torch.stack(batch) for batch in cut])
    rounds = itertools.zip_longest(*streams)
    return [batch for each in rounds for batch in each if batch is not None]


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_side_by_side_and_draws_between_iter_and_next_are_as_in_torch(workers: int) -> None:
    found = []
    for of in (TorchLoader, DataLoader):
        torch.manual_seed(0)
        first, second = (
            of(range(12), batch_size=4, shuffle=True, num_workers=workers) for _ in range(2)
        )
        both = [(one.tolist(), other.tolist()) for one, other in zip(first, second, strict=True)]
        late = iter(first)
        drawn = float(torch.rand(()))
        found.append((both, drawn, [batch.tolist() for batch in late], float(torch.rand(()))))
    assert found[0] == found[1]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("taken", [0, 2])
def test_a_pass_continues_also_if_the_script_drew_between_iter_and_next(
    taken: int, own: bool
) -> None:
    generator = torch.Generator().manual_seed(1) if own else None
    loader = DataLoader(range(12), batch_size=3, shuffle=True, generator=generator)
    iterator = iter(loader)
    torch.rand(1, generator=generator)
    found = [next(iterator).tolist() for _ in range(taken)]
    state, drawn = loader.state_dict(), torch.get_rng_state()
    found += [batch.tolist() for batch in iterator]
    for global_state in (drawn, torch.Generator().manual_seed(77).get_state()):
        again = DataLoader(
            range(12), batch_size=3, shuffle=True, generator=generator and torch.Generator()
        )
        again.load_state_dict(state)
        torch.set_rng_state(global_state)
        resumed = iter(again)
        assert again.state_dict() == state
        assert [batch.tolist() for batch in resumed] == found[taken:]


class Drawing(Sampler[int]):
    """Draws as it goes; its own state is empty."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        for _ in range(8):
            yield int(torch.randint(1000, (1,), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("taken", [0, 3])
def test_a_sampler_with_a_state_that_draws_as_it_goes_goes_on_where_it_was(taken: int) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(range(1000), sampler=Drawing(torch.Generator().manual_seed(1)))

    first = loader()
    batches = iter(first)
    torch.manual_seed(3)
    head = [int(next(batches)) for _ in range(taken)]
    state = first.state_dict()
    rest = list(map(int, batches))
    again = loader()
    again.load_state_dict(state)
    assert list(map(int, again)) == rest and len(head + rest) == 8


class Sized(list[int]):
    size = 0


class Sizes(Records):
    def __getitems__(self, indices: Any) -> list[Any]:
        return [(index, getattr(indices, "size", None)) for index in indices]


def sized() -> Iterator[Any]:
    for size in range(3):
        batch = Sized([size])
        batch.size = size
        yield batch


@pytest.mark.parametrize(
    "batches",
    [
        lambda: (iter([n, n + 1]) for n in range(3)),
        lambda: ((i for i in [n]) for n in range(3)),
        sized,
    ],
)
def test_a_batch_sampler_may_give_iterators_and_lists_with_attributes(batches: Any) -> None:
    dataset = Sizes() if batches is sized else Records()
    assert equal(*(list(of(dataset, batch_sampler=batches())) for of in (TorchLoader, DataLoader)))


def test_records_fetched_together_are_the_same() -> None:
    assert equal(
        list(DataLoader(Together(), batch_size=5)), list(TorchLoader(Together(), batch_size=5))
    )


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Draws(Records):
    def __getitem__(self, index: int) -> Any:
        return draw()


class DrawsTogether(Draws):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [draw() for _ in indices]


class DrawsInTurn(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (draw() for _ in range(20))


def collate(drawn: Any) -> Any:
    return drawn, draw()


def numbers(found: Any) -> list[float]:
    return [found] if isinstance(found, float) else [n for each in found for n in numbers(each)]


@pytest.mark.long
@pytest.mark.parametrize(
    "dataset", [Draws(), DrawsTogether(), DrawsInTurn()], ids=lambda d: type(d).__name__
)
@pytest.mark.parametrize("size", [5, None])
def test_what_records_and_collate_draw_depends_on_seed_and_epoch_alone(
    dataset: Any, size: int | None
) -> None:
    """And no two of them draw alike, in one epoch or in two."""

    def drawn(workers: int, seed: int) -> list[float]:
        torch.manual_seed(seed)
        loader = DataLoader(dataset, batch_size=size, num_workers=workers, collate_fn=collate)
        return numbers([list(loader), list(loader)])

    divided = isinstance(dataset, DrawsInTurn)  # among as many workers as there are
    first = drawn(3 if divided else 1, seed=0)
    assert drawn(3, seed=0) == first
    both = first + drawn(3, seed=1)
    assert len(set(both)) == len(both) >= 200


def test_ranks_with_one_seed_do_not_draw_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for rank in (0, 1, 0):
        monkeypatch.setattr(
            "torch.utils.data.dataloader._get_distributed_settings", lambda rank=rank: (2, rank)
        )
        torch.manual_seed(0)
        drawn.append(
            numbers(list(DataLoader(Draws(3), batch_size=3, num_workers=1, collate_fn=list)))
        )
    assert drawn[0] == drawn[2] and not {*drawn[0]} & {*drawn[1]}


@pytest.mark.long
@pytest.mark.parametrize("together", [3, 100])
@pytest.mark.parametrize("after", [0, 4, 5, 11])
def test_batches_made_several_at_a_time_come_one_by_one_in_order(
    monkeypatch: pytest.MonkeyPatch, together: int, after: int
) -> None:
    """As on a cluster, where quick batches are made in groups; a pass goes on within one, too."""

    def loader() -> DataLoader:
        torch.manual_seed(0)
        return DataLoader(Draws(), batch_size=4, num_workers=2)

    alone = list(loader())
    monkeypatch.setattr(ProcessMaker, "pace", lambda _, least: (together, least))
    grouped = loader()
    found = list(itertools.islice(grouped, after))
    again = loader()
    again.load_state_dict(grouped.state_dict())
    assert equal(found + list(again), alone)


class Refills(Records):
    """Its records, and what is collated, lie in the same memory, as in buffers that are read into."""

    def __init__(self) -> None:
        super().__init__(12)
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


@pytest.mark.parametrize("collates", [None, "into_arrays", "into_the_first", default_collate])
def test_batches_made_several_at_a_time_may_lie_in_the_same_memory(
    collates: Any, tmp_path: Path
) -> None:
    records = Refills()
    collate = getattr(records, collates) if isinstance(collates, str) else collates
    size = 1 if collates else None
    expected = [copy.deepcopy(batch) for batch in TorchLoader(Refills(), size, collate_fn=collate)]
    collate = DataLoader(records, size, collate_fn=collate).collate_fn
    work = LoaderWork(records, collate, False, bool(size), size, False, 0, None, False)
    source = LoaderSource((pack([(str(tmp_path), [], {}, ScriptState())]), pack([work])))
    found = []
    for first in (
        0,
        4,
        8,
    ):  # in groups, as on a cluster; from the second one on, batches lie in its Room
        batches = tuple((n, [n] if size else n) for n in range(first, first + 4))
        (group,) = source.read(Shard("batches", items=(LoadRequest(7, batches=batches),)), None)
        found += [made.batch for made in unpack(group[PAGES].copy())[1:]]
    assert len(found) == 12 and all(map(same, found, expected))


class Asked(Records):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return info.id, info.seed


class AsksNone(Records):
    def __init__(self) -> None:
        super().__init__(3)

    def __getitem__(self, index: int) -> Any:
        return get_worker_info()


class StreamsNone(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (get_worker_info() for _ in range(3))


@pytest.mark.parametrize("together", [1, 3])
def test_a_record_is_told_of_the_worker_that_torch_would_ask(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    monkeypatch.setattr(ProcessMaker, "pace", lambda _, least: (together, least))
    found = []
    for kind in (TorchLoader, DataLoader):
        torch.manual_seed(0)
        found.append(list(kind(Asked(), batch_size=4, num_workers=2)))
    theirs, ours = ([(int(ids[0]), int(seeds[0])) for ids, seeds in each] for each in found)
    assert [worker for worker, _ in ours] == [worker for worker, _ in theirs]
    assert ours[:2] == theirs[:2] and len({seed for _, seed in ours}) == 11


def test_without_workers_there_is_no_worker_info_as_in_torch() -> None:
    for dataset in (AsksNone(), StreamsNone()):
        assert [batch[0] for batch in DataLoader(dataset, batch_size=1, collate_fn=list)] == [
            None
        ] * 3


class Broken(Records):
    def __getitem__(self, index: int) -> Any:
        if index % 10 == 3:
            raise KeyError(f"no record {index}")
        return torch.tensor(index)


class NoSample(Exception):  # noqa: N818
    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)
        self.code = code


class TwoArguments(Exception):  # noqa: N818
    """Cannot be unpickled."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)


class Raises(Records):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.kind, self.arguments = type(error), error.args

    def __getitem__(self, index: int) -> Any:
        raise self.kind(*self.arguments)


def test_without_workers_the_exception_itself_is_raised_as_by_torch() -> None:
    for of in (TorchLoader, DataLoader):
        with pytest.raises(NoSample) as caught:
            next(iter(of(Raises(NoSample("none", 7)))))
        assert caught.value.args == ("none", 7) and caught.value.code == 7
    assert re.search(
        r"(?s)at index 0 \(batch 0\), on host .*Traceback.*in __getitem__",
        caught.value.__notes__[0],
    )


class RaisesTwo(Records):
    def __getitem__(self, index: int) -> Any:
        raise TwoArguments("none", 7)


def test_an_exception_that_cannot_be_sent_is_told_in_words() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)TwoArguments at index 0.*in __getitem__"):
        next(iter(DataLoader(RaisesTwo())))


class Stops(Records):
    def __getitem__(self, index: int) -> Any:
        return next(iter(()))


def test_a_record_that_raises_stop_iteration_does_not_end_the_pass_as_if_it_were_whole() -> None:
    with pytest.raises(RuntimeError, match="StopIteration at index 0"):
        list(DataLoader(Stops()))


@pytest.mark.parametrize("size", [4, None])
def test_quarantine_leaves_records_out_and_counts_them(size: int | None) -> None:
    loader = DataLoader(Broken(), batch_size=size, on_error="quarantine", bad_record_budget=0.2)
    found = [i for batch in loader for i in batch.reshape(-1).tolist()]
    assert found == [i for i in range(43) if i % 10 != 3]
    assert [index for index, _ in loader.quarantine.records] == [3, 13, 23, 33]
    assert "KeyError" in loader.quarantine.records[0][1]


def test_quarantine_beyond_its_budget_is_an_error() -> None:
    loader = DataLoader(Broken(), batch_size=4, on_error="quarantine", bad_record_budget=0.05)
    with pytest.raises(RuntimeError, match="3 of 43 records cannot be loaded"):
        list(loader)


class Uncounted(Broken):
    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("whose", ["a rank's share", "no length", "a batch sampler"])
def test_the_budget_is_a_share_of_what_the_pass_reads(whose: str) -> None:
    options: dict[str, Any] = {"sampler": [3, 13, *range(4, 9)]}
    if whose == "no length":
        options = {"sampler": iter([3, 13, *range(4, 9)])}
    elif whose == "a batch sampler":
        options = {"batch_sampler": [[3, 13], [*range(4, 9)]]}
    dataset = Uncounted() if whose == "no length" else Broken()
    loader = DataLoader(dataset, **options, on_error="quarantine", bad_record_budget=0.1)
    with pytest.raises(RuntimeError, match="of 7 records cannot be loaded"):
        list(loader)


def test_the_budget_of_a_resumed_pass_is_that_of_the_whole_pass() -> None:
    options: dict[str, Any] = {"on_error": "quarantine", "bad_record_budget": 0.1}
    options["batch_sampler"] = [[*range(4, 13)], [13, 14]]
    loader = DataLoader(Broken(), **options)
    next(iter(loader))
    again = DataLoader(Broken(), **options)
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [[14]]


def test_what_a_pass_has_left_out_counts_also_after_it_was_resumed(tmp_path: Path) -> None:
    def loader(budget: float) -> DataLoader[Any]:
        indices = [np.int64(13), (3,), "b", *range(14, 54)]
        options: dict[str, Any] = {"on_error": "quarantine", "bad_record_budget": budget}
        return DataLoader(Broken(), batch_size=4, sampler=indices, **options)

    made = loader(0.2)
    next(iter(made))
    torch.save(made.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    again = loader(0.2)
    again.load_state_dict(state)
    assert len(list(again)) == 10
    assert [index for index, _ in again.quarantine.records] == [13, "(3,)", "b", 23, 33, 43, 53]
    strict = loader(4.5 / 43)
    strict.load_state_dict(state)
    with pytest.raises(RuntimeError, match="5 of 43 records cannot be loaded"):
        list(strict)


def test_quarantine_that_has_no_effect_is_said() -> None:
    with pytest.warns(UserWarning, match="no effect on an IterableDataset"):
        DataLoader(Stream(), on_error="quarantine")


def test_a_batch_without_a_good_record_does_not_vanish_on_one_rank_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rank would make a step fewer, and the others would wait for it."""
    options: dict[str, Any] = {"on_error": "quarantine", "bad_record_budget": 0.2}
    sampler = DistributedSampler(Broken(), 2, 1, shuffle=False)
    iterator = iter(DataLoader(Broken(), batch_size=1, sampler=sampler, **options))
    assert int(next(iterator)) == 1
    with pytest.raises(RuntimeError, match=r"no record of batch 1 can be loaded: KeyError"):
        next(iterator)
    assert [int(n) for n in DataLoader(Broken(), batch_size=1, **options)][:4] == [0, 1, 2, 4]


def test_a_loader_can_be_annotated_as_torchs() -> None:
    annotated: DataLoader[int] = DataLoader[int](list(range(3)), batch_size=None)
    assert list(annotated) == [0, 1, 2]


def test_what_cannot_be_sent_is_named() -> None:
    lock, records, wrapped = threading.Lock(), Records(), Subset(Records(), [0])
    vars(records)["parts"] = {"tf": [1, (lock,)]}
    vars(wrapped.dataset)["rows"] = (row for row in range(3))
    for loader, path in (
        (DataLoader(records), r"dataset.parts\['tf'\]\[1\]\[0\] \(lock\)"),
        (DataLoader(wrapped), r"dataset.dataset.rows \(generator\)"),
        (DataLoader(Records(), collate_fn=lambda rows: lock), r"collate_fn: lock \(lock\)"),
    ):
        with pytest.raises(UsageError, match=path):
            iter(loader)


def test_length_and_arguments_are_torchs() -> None:
    assert len(DataLoader(Records(), batch_size=4, drop_last=True)) == 10
    assert isinstance(DataLoader(Records()), TorchLoader)
    with pytest.raises(ValueError, match="on_error"):
        DataLoader(Records(), on_error="ignore")
