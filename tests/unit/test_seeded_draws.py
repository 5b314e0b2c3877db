"""What users' code draws, from the global generators or its own, depends on (seed, epoch, record) alone."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import blocks, chained, read_all
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from stoker import DataLoader
from stoker.config.schema import Config
from stoker.data import Record, RecordTransform, read_torch
from stoker.serve.opening import open_data

RECIPES = Path(__file__).parent.parent / "recipes"


def drawn(
    where: str,
    epoch: int = 0,
    only: int | None = None,
    block: int = 15,
    shard: int = 30,
    n: int = 60,
) -> dict[str, tuple[float, ...]]:
    """Key → the numbers drawn for that record in a pass, or in one shard: all that one process reads."""
    job: dict[str, Any] = {"recipe": "draws:Draws", "params": {"where": where, "n": n}, "seed": 3}
    data = open_data(Config.model_validate(job | {"tracking": {"record_ids": True}}))
    source, chain = data.sources["train"], data.chains["train"]
    shards, first = [*source.shards(shard, None)], only or 0
    shards = shards if only is None else [shards[only]]
    found: dict[str, tuple[float, ...]] = {}
    one_pass = {"seed": 3, "epoch": epoch, "block_records": block}
    for columns, _ in blocks(source, chain, shards, first=first, **one_pass):
        rows = zip(*(columns[name].tolist() for name in ("r", "n", "t")), strict=True)
        found |= dict(zip(columns["__key"], rows, strict=True))
    return found


PLACES = pytest.mark.parametrize("where", ["dataset", "source", "transform", "batch"])


@PLACES
def test_the_same_records_draw_the_same_whatever_a_process_did_before(where: str) -> None:
    whole = drawn(where)
    assert len(whole) == 60
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    other_process = drawn(where, only=1)
    assert len(other_process) == 30
    assert other_process == {key: whole[key] for key in other_process}


@PLACES
def test_every_record_and_every_epoch_draws_anew(where: str) -> None:
    epochs = [drawn(where, epoch) for epoch in range(3)]
    for generator in range(3):
        values = [numbers[generator] for epoch in epochs for numbers in epoch.values()]
        assert len(set(values)) == 3 * 60


@pytest.mark.parametrize("where", ["dataset", "transform"])
def test_how_records_are_cut_into_tasks_and_blocks_does_not_change_what_they_draw(
    where: str,
) -> None:
    assert drawn(where, block=7, shard=20) == drawn(where)


def test_a_group_with_the_same_first_record_draws_its_own() -> None:
    assert drawn("batch", n=14) != {k: v for k, v in drawn("batch", n=15).items() if k != "14"}


FIRST_BLOCK = """
import importlib, json, pickle, sys
from stoker.protocol import PassPlan, Work
from stoker.read.sources import seed_globals
from stoker.serve.shards import LoadedSplit, blocks_of
source, chain, shard = pickle.load(open(sys.argv[1], 'rb'))
plan = PassPlan(seed=3, epoch=0, split='train', shuffle=False, block_records=15)
assert 'torch' not in sys.modules
seed_globals('a record before')
importlib.invalidate_caches()
columns, _ = next(blocks_of(LoadedSplit(source, chain), plan, Work(0, shard)))
print(json.dumps(columns['t'].tolist()))
"""


@pytest.mark.long
def test_torch_is_seeded_also_where_users_code_is_the_first_to_import_it(tmp_path: Path) -> None:
    # A process of its own, as chain processes are: nothing but the transform itself loads torch.
    config = {"recipe": "draws:Draws", "params": {"where": "transform"}, "seed": 3}
    data = open_data(Config.model_validate(config))
    source, chain = data.sources["train"], data.chains["train"]
    (tmp_path / "work").write_bytes(pickle.dumps((source, chain, source.shards(30, None)[0])))
    paths = os.pathsep.join([str(RECIPES), *sys.path])
    command = [sys.executable, "-c", FIRST_BLOCK, str(tmp_path / "work")]
    environment = {**os.environ, "PYTHONPATH": paths}
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    here = drawn("transform")
    assert json.loads(out.stdout) == [here[str(i)][2] for i in range(15)]


def test_a_split_by_chance_is_the_same_for_both_splits_and_for_every_start() -> None:
    def opened() -> dict[str, set[int]]:
        data = open_data(Config.model_validate({"recipe": "draws:Split", "seed": 3}))
        return {split: set(source.dataset.indices) for split, source in data.sources.items()}

    first = opened()
    assert not first["train"] & first["val"]
    assert len(first["train"] | first["val"]) == 100
    torch.rand(7)
    assert opened() == first


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
