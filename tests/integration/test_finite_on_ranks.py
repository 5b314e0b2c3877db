"""What is not finite on one train worker, or in one shard, ends the run on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import feed, make, run

from stoker.train import strategies
from stoker.train.manager import check_state
from stoker.train.state import Progress


def answer(rank: int, worker: Any, progress: Progress) -> str:
    try:
        check_state(worker, progress)
    except FloatingPointError as error:
        return str(error)
    return ""


def cases(rank: int, folder: str) -> dict[Any, str]:
    del folder
    found: dict[Any, str] = {}
    for strategy in ("ddp", "fsdp"):
        worker, step = make(rank, 2, strategy=strategy, optimizer="adamw", ema_decay=0.9)
        run(worker, step, feed(16, 4, rank, 2), epochs=1)
        worker.kept = "step-00000001"
        found[strategy, "sound"] = answer(rank, worker, Progress(0, loss_sum=torch.tensor(1.0)))
        bad_loss = torch.tensor(float("nan") if rank else 1.0)
        found[strategy, "loss"] = answer(rank, worker, Progress(0, loss_sum=bad_loss))
        name, weight = next(iter(strategies.plain(worker.model).named_parameters()))
        spoils = {
            "ema": dict(worker.ema.module.named_parameters())[name],
            "optimizer": worker.optimizer.state[weight]["exp_avg"],
            "weight": weight,
        }
        for kind, tensor in spoils.items():
            if rank:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                with torch.no_grad():
                    local.view(-1)[-1] = float("inf")
            found[strategy, kind] = answer(rank, worker, Progress(3))
            if rank:
                with torch.no_grad():
                    local.view(-1)[-1] = 0.0
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_say_the_same_of_what_one_has(ranks: list[dict[Any, str]], strategy: str) -> None:
    assert ranks[0] == ranks[1]
    found = {kind: text for (name, kind), text in ranks[0].items() if name == strategy}
    assert found["sound"] == ""
    assert found["loss"].startswith("the sum of the epoch's losses is nan by step 2 (epoch 1); ")
    assert found["weight"].startswith(
        "weight stem.weight holds NaN or infinity by step 2 (epoch 4); "
    )
    assert found["ema"].startswith("averaged weight stem.weight holds NaN or infinity")
    assert found["optimizer"].startswith("optimiser state")
    assert found["weight"].endswith("; the checkpoint step-00000001 is kept")
