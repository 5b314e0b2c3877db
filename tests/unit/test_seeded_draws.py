"""What users' code draws from the global generators depends on (seed, epoch, record), and on nothing else."""

from __future__ import annotations

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
from damage import blocks

from stoker.config.schema import Config
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
