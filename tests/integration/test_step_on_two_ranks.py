"""One optimiser step is the same step, whatever its records are spread over: batches, ranks, shards.

Two processes with gloo run all cases once, in the strategies ddp and fsdp; the tests compare what they
found with a single train worker that takes the same records in one batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import EVERYTHING, assert_same, feed, make, run

from stoker.train import strategies

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "accumulated": {"accumulate_steps": 2},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
}


def cases(rank: int, folder: str) -> dict[Any, Any]:
    del folder
    found: dict[Any, Any] = {}
    for strategy in ("ddp", "fsdp"):
        for name, options in CASES.items():
            worker, step = make(rank, 2, **{**EVERYTHING, **options}, strategy=strategy)
            size = 4 // options.get("accumulate_steps", 1)
            for count in (20, 22) if name == "accumulated" else (22,):
                found[strategy, name, count] = run(worker, step, feed(count, size, rank, 2))
                worker, step = make(rank, 2, **{**EVERYTHING, **options}, strategy=strategy)
        worker, step = make(rank, 2, explode=True, precision="fp16", strategy=strategy, lr=0.1)
        run(worker, step, feed(8, 4, rank, 2), epochs=1)
        before = (
            strategies.Copier().copy(strategies.full_state(worker.model, None))[0],
            worker.scaler.get_scale(),
        )
        run(worker, step, feed(8, 4, rank, 2), epochs=1)
        after = (
            strategies.Copier().copy(strategies.full_state(worker.model, None))[0],
            worker.scaler.get_scale(),
        )
        found[strategy, "overflow"] = (before, after)
        run(worker, step, feed(8, 4, rank, 2), epochs=1)
        found[strategy, "recovered"] = strategies.Copier().copy(
            strategies.full_state(worker.model, None)
        )[0]
    try:
        run(*make(rank, 2, optimizer="novograd", strategy="fsdp"), feed(8, 4, rank, 2))
    except Exception as error:
        found["refused"] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def single() -> dict[int, Any]:
    return {n: run(*make(**EVERYTHING), feed(n, 8)) for n in (20, 22)}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_half_batches_on_two_ranks_make_the_same_steps_as_whole_ones(
    ranks: list[Any], single: Any, strategy: str
) -> None:
    assert_same(ranks[0][strategy, "fp32", 22], single[22], 1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("count", [20, 22])
def test_accumulated_batches_make_the_same_steps_even_where_a_window_is_short(
    ranks: list[Any], single: Any, strategy: str, count: int
) -> None:
    found = ranks[0][strategy, "accumulated", count]
    assert_same(found, single[count], 1e-4)
    batches = {20: 10, 22: 12}[count]
    assert found["steps"] == (6, batches)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_16_bits_stay_near_to_32(
    ranks: list[Any], single: Any, strategy: str, precision: str
) -> None:
    found = ranks[0][strategy, precision, 22]["losses"]
    assert found == pytest.approx(single[22]["losses"], rel=0.02)
    assert found != single[22]["losses"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: list[Any], strategy: str) -> None:
    (weights, scale), (after, smaller) = ranks[0][strategy, "overflow"]
    assert all(torch.equal(weights[name], after[name]) for name in weights)
    assert [found[strategy, "overflow"][1][1] for found in ranks] == [scale / 2, scale / 2]
    assert smaller == scale / 2
    recovered = ranks[0][strategy, "recovered"]
    assert all(value.isfinite().all() for value in recovered.values())
    assert not torch.equal(recovered["head.weight"], after["head.weight"])


def test_an_optimiser_that_cannot_be_sharded_is_named(ranks: list[Any]) -> None:
    for found in ranks:
        assert found["refused"].startswith(
            "UsageError: train.optimizer: NvNovoGrad cannot work on sharded"
        )
