"""One worker, ddp and fsdp train alike, and what one of them saved continues in any other.

Two processes with gloo run all cases once; the tests read what they wrote.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from alike import equal
from torch import nn

from stoker.train import strategies

STEPS = 3
OPTIMIZERS = {"momentum": {"momentum": 0.0}, "sgd": {"momentum": 0.9}, "adamw": {}, "madgrad": {}}


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 100)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(100, 101), nn.Linear(101, 100)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(100) if norm else nn.Identity()
        self.head = nn.Linear(100, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(self.norm(x)) * self.frozen


def make(strategy: str, optimizer: str, seed: int = 0, norm: bool = False) -> tuple[Any, Any]:
    from timm.optim import create_optimizer_v2

    torch.manual_seed(seed)
    model = strategies.prepare_model(Net(norm), torch.device("cpu"), strategy)
    return model, create_optimizer_v2(model, opt=optimizer, lr=0.02, **OPTIMIZERS[optimizer])


def train(model: Any, optimizer: Any, steps: range, rank: int = 0, world: int = 1) -> list[float]:
    """The mean loss over all ranks of some steps on global batches of 8 records."""
    import torch.distributed as dist

    losses = []
    for step in steps:
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        x = data[rank * 8 // world : (rank + 1) * 8 // world]
        loss = (model(x) - x[:, :3].exp()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if world > 1:
            dist.all_reduce(loss)
        losses.append(float(loss) / world)
    return losses


def cases(rank: int, folder: str) -> dict[Any, Any]:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        for name in OPTIMIZERS:
            model, optimizer = make(strategy, name, seed=rank)
            losses = train(model, optimizer, range(STEPS), rank, 2)
            weights, state = strategies.Copier().copy(strategies.full_state(model, optimizer))
            before = copy.deepcopy(weights), copy.deepcopy(state)
            later = train(model, optimizer, range(STEPS, 2 * STEPS), rank, 2)
            found[strategy, name] = (losses, later, weights, state)
            found["unchanged", strategy, name] = equal((weights, state), before)
            for other in ("ddp", "fsdp"):
                again, second = make(other, name, seed=7 + rank)
                strategies.load_full_state(again, second, weights, state)
                found[strategy, name, other] = train(
                    again, second, range(STEPS, 2 * STEPS), rank, 2
                )
    for strategy in ("ddp", "fsdp"):
        model, optimizer = make(strategy, "sgd", norm=True)
        train(model, optimizer, range(STEPS), rank, 2)
        own = strategies.plain(model).norm.running_mean.clone()
        strategies.share_buffers(model)
        found["buffers", strategy] = (own, strategies.plain(model).norm.running_mean.clone())
    found["sharded"] = [type(block).__name__ for block in strategies.blocks(Net())]
    found["parts"] = strategies.plain(make("fsdp", "sgd")[0]).stem.weight.to_local().shape
    given = {"x": torch.arange(3), "name": ["a", "b", "c"]} if rank else {}
    found["first"] = strategies.first_record(given)
    return found


@pytest.fixture(scope="module")
def single() -> dict[str, tuple[list[float], list[float]]]:
    runs = {}
    for name in OPTIMIZERS:
        model, optimizer = make("ddp", name)
        runs[name] = (
            train(model, optimizer, range(STEPS)),
            train(model, optimizer, range(STEPS, 2 * STEPS)),
        )
    return runs


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_with_half_batches_train_like_one(
    ranks: list[Any], single: Any, strategy: str, optimizer: str
) -> None:
    losses, later, weights, _ = ranks[0][strategy, optimizer]
    assert losses + later == pytest.approx(single[optimizer][0] + single[optimizer][1], rel=1e-4)
    assert list(weights) == list(Net().state_dict())
    assert ranks[1][strategy, optimizer][2:] == ({}, {})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_saved_state_continues_in_any_strategy(
    ranks: list[Any], strategy: str, optimizer: str
) -> None:
    _, later, weights, state = ranks[0][strategy, optimizer]
    assert ranks[0][strategy, optimizer, strategy] == later
    other = "fsdp" if strategy == "ddp" else "ddp"
    assert ranks[0][strategy, optimizer, other] == pytest.approx(later, rel=1e-5)
    model, own = make("ddp", optimizer, seed=9)
    strategies.load_full_state(model, own, weights, state)
    assert train(model, own, range(STEPS, 2 * STEPS)) == pytest.approx(later, rel=1e-4)


def test_a_state_is_a_copy_that_further_steps_leave_alone(ranks: list[Any]) -> None:
    assert all(found for key, found in ranks[0].items() if key[0] == "unchanged")


def test_one_worker_saves_and_continues_exactly() -> None:
    model, optimizer = make("fsdp", "adamw")
    train(model, optimizer, range(STEPS))
    saved = strategies.Copier().copy(strategies.full_state(model, optimizer))
    later = train(model, optimizer, range(STEPS, 2 * STEPS))
    again, second = make("ddp", "adamw", seed=5)
    strategies.load_full_state(again, second, *saved)
    assert train(again, second, range(STEPS, 2 * STEPS)) == later


def test_running_statistics_become_the_mean_over_ranks(ranks: list[Any]) -> None:
    for strategy in ("ddp", "fsdp"):
        own = [found["buffers", strategy][0] for found in ranks]
        shared = [found["buffers", strategy][1] for found in ranks]
        assert not torch.equal(own[0], own[1])
        assert torch.equal(shared[0], shared[1])
        torch.testing.assert_close(shared[0], (own[0] + own[1]) / 2)


def test_repeated_blocks_are_sharded_by_themselves_and_every_parameter_is(ranks: list[Any]) -> None:
    assert ranks[0]["sharded"] == ["Sequential", "Sequential"]
    assert [found["parts"] for found in ranks] == [(50, 8), (50, 8)]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("vit_tiny_patch16_224", {"Block": 12}),
        ("resnet18", {"BasicBlock": 8}),
        ("convnext_atto", {"ConvNeXtBlock": 12, "ConvNeXtStage": 3}),
        ("swin_tiny_patch4_window7_224", {"SwinTransformerBlock": 12, "SwinTransformerStage": 3}),
    ],
)
def test_timm_models_are_cut_at_their_blocks(name: str, kinds: dict[str, int]) -> None:
    import timm

    with torch.device("meta"):
        found = strategies.blocks(timm.create_model(name))
    names = [type(block).__name__ for block in found]
    assert {kind: names.count(kind) for kind in dict.fromkeys(names)} == kinds


def test_a_rank_without_records_gets_one_of_another(ranks: list[Any]) -> None:
    for found in ranks:
        assert found["first"]["x"].tolist() == [0]
        assert found["first"]["name"] == ["a"]
