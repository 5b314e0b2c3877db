"""Generators of a dataset, a collate function or a stage: each record draws anew, the same in any process."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from damage import chained, read_all
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from stoker import DataLoader
from stoker.data import Record, RecordTransform, read_torch

RECORDS = 24
KINDS: dict[str, Any] = {
    "random": random.Random,
    "Generator": np.random.default_rng,
    "RandomState": np.random.RandomState,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator, dtype=torch.float64))
    return float(generator.random() if hasattr(generator, "random") else generator.rand())


class Slots:
    __slots__ = ("rng",)

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self) -> float:
        return draw(self.rng)


class Compose:
    """As that of Albumentations: its parts share generators of two kinds."""

    def __init__(self, seed: int) -> None:
        self.py_random, self.random_generator = random.Random(seed), np.random.default_rng(seed)
        self.parts = [Slots(self.py_random), Slots(self.random_generator)]

    def __call__(self) -> float:
        return sum(part() for part in self.parts)


COMPOSES = {"train": Compose(7)}


class Lazy:
    rng: Any = None

    def __call__(self, *_: Any) -> float:
        if self.rng is None:
            self.rng = random.Random(3)
        return self.rng.random()


class Inherits(Compose):
    shared = np.random.RandomState(1)

    def __call__(self) -> float:
        return draw(self.shared)


def of_global() -> float:
    return COMPOSES["train"]()


def closed_over(rng: Any) -> Any:
    return lambda: draw(rng)


HOLDERS: dict[str, Any] = {
    **{kind: (lambda make=make: functools.partial(draw, make(5))) for kind, make in KINDS.items()},
    "slots": lambda: Slots(random.Random(0)),
    "Compose in a dict": lambda: {"train": Compose(0)}["train"].__call__,
    "global": lambda: of_global,
    "closure": lambda: closed_over(np.random.default_rng(0)),
    "class attribute": lambda: Inherits(0),
    "created in the first call": Lazy,
}


class Drawing(Dataset[Any]):
    def __init__(self, make: Any) -> None:
        self.nested = ({"tf": [make]},)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        return self.nested[0]["tf"][0]()


class Plain(Drawing):
    def __getitem__(self, index: int) -> Any:
        return index


class Streams(IterableDataset[Any]):
    def __iter__(self) -> Any:
        info = get_worker_info()
        yield from range(RECORDS // 2 if info else RECORDS)


class Collates:
    def __init__(self, make: Any) -> None:
        self.make = make

    def __call__(self, records: list[Any]) -> list[float]:
        return [self.make() for _ in records]


def monai(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.nested[0]["tf"][0] = Slots(np.random.RandomState(info.seed % 2**32))


def epochs(**options: Any) -> list[float]:
    torch.manual_seed(0)
    loader = DataLoader(batch_size=4, **options)
    return [float(value) for _ in range(2) for batch in loader for value in batch]


@pytest.mark.usefixtures("loader_in_this_process")
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("where", ["dataset", "subset", "collate", "stream"])
def test_draws_of_a_loader_are_distinct_and_repeatable(where: str, holder: str) -> None:
    def options() -> dict[str, Any]:
        make = HOLDERS[holder]()
        if where in ("dataset", "subset"):
            dataset = Drawing(make)
            return {"dataset": dataset if where == "dataset" else Subset(dataset, range(RECORDS))}
        dataset: Any = Streams() if where == "stream" else Plain(None)
        return {"dataset": dataset, "collate_fn": Collates(make), "num_workers": 2}

    found = epochs(**options())
    assert len({*found}) == len(found) == 2 * RECORDS
    assert epochs(**options()) == found


@pytest.mark.usefixtures("loader_in_this_process")
def test_worker_init_fn_may_give_a_dataset_other_generators(recwarn: Any) -> None:
    found = epochs(dataset=Drawing(Lazy()), num_workers=2, worker_init_fn=monai)
    assert len({*found}) == 2 * RECORDS and not recwarn.list


@pytest.mark.parametrize("holder", HOLDERS)
def test_draws_of_a_torch_dataset_are_distinct_and_the_same_in_any_process(holder: str) -> None:
    def run() -> list[float]:
        dataset = Drawing(HOLDERS[holder]())  # as another process has it
        return [record["drawn"] for record in read_all(read_torch(dataset, columns=("drawn",)))]

    found = run()
    assert len({*found}) == RECORDS and run() == found


class Stage(RecordTransform):
    def __init__(self, make: Any) -> None:
        self.make = make

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        record["drawn"] = record.get("drawn", 0) + self.make()
        return record


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("per", ["record", "batch"])
def test_draws_of_a_stage_depend_on_record_and_epoch_only(per: str, holder: str) -> None:
    def run(keys: range, epoch: int) -> list[float]:
        make = HOLDERS[holder]()  # as another process has it
        entry = (
            Stage(make)
            if per == "record"
            else lambda batch: {"drawn": [make() for _ in batch["i"]]}
        )
        records = [{"key": f"{key}", "i": key} for key in keys]
        columns, report = chained(records, entry, epoch=epoch, seed=3)
        assert not report.bad
        return [float(value) for value in columns["drawn"]]

    found = [*run(range(8), 0), *run(range(8, 16), 0), *run(range(16), 1)]
    assert len({*found}) == 32
    if per == "record":
        assert found[:16] == run(range(16), 0)
