"""A run that goes on from a checkpoint on disk does the very steps that it would have done.

Two processes with gloo train, save, and go on twice: with the state they have, and with new models, made
from another seed, that get the checkpoint's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import EVERYTHING, Tiny, feed, run
from torch import nn

from stoker.checkpoints import format as checkpoint
from stoker.checkpoints.format import Content
from stoker.config.schema import Config
from stoker.storage.checkpoint_store import open_store
from stoker.train import state as snapshot
from stoker.train import strategies
from stoker.train.build import build
from stoker.train.state import Progress, Worker
from stoker.train.step import Step

pytestmark = pytest.mark.long

CASES: dict[str, dict[str, Any]] = {
    "ddp fp32": {"strategy": "ddp"},
    "fsdp fp32": {"strategy": "fsdp"},
    "ddp fp16": {"strategy": "ddp", "precision": "fp16"},
    "fsdp fp16": {"strategy": "fsdp", "precision": "fp16"},
}


class Dropping(Tiny):
    def model(self) -> Any:
        return nn.Sequential(super().model(), nn.BatchNorm1d(5), nn.Dropout(0.3))


def start(rank: int, seed: int, train: dict[str, Any]) -> Worker:
    config = Config.model_validate(
        {"seed": seed, "train": {**EVERYTHING, "layer_decay": None, "batch_size": 8, **train}}
    )
    worker = Worker(config, Dropping(), None, 0, rank, 2, torch.device("cpu"))
    build(worker, records=6 * 16)
    return worker


def state(worker: Worker) -> dict[str, Any]:
    """What a step depends on, whole on rank 0."""
    weights, optimizer = strategies.Copier().copy(
        strategies.full_state(worker.model, worker.optimizer)
    )
    return {
        "weights": weights,
        "optimizer": optimizer,
        "ema": strategies.Copier().copy(strategies.full_state(worker.ema.module, None))[0],
        "scaler": worker.scaler.state_dict() if worker.scaler else None,
        "rate": worker.optimizer.param_groups[0]["lr"],
        "step": worker.step,
    }


def cases(rank: int, folder: str) -> dict[Any, Any]:
    found: dict[str, Any] = {}
    batches = feed(80, 8, rank, 2)
    for name, train in CASES.items():
        store = open_store(f"{folder}/{name}")
        worker = start(rank, 3, train)
        run(worker, Step(worker), batches[:2], epochs=1)
        if worker.scaler:
            worker.scaler.update(1024.0)  # another scale than a new scaler's
        progress = Progress(
            0, steps=2, samples=32, loss_sum=torch.tensor(float(rank)), loss_rows=16
        )
        parts = snapshot.gather(worker, snapshot.rank_part(worker, progress))
        live = snapshot.live_state(worker)
        meta = {
            "step": 2,
            "next_epoch": 0,
            "epoch_steps": 2,
            "epoch_samples": 32,
            "global_batch": 16,
        }
        if rank == 0:
            checkpoint.save(
                store, snapshot.checkpoint_content(live, parts, meta, strategies.Copier())
            )
        losses = run(worker, Step(worker), batches[2:], epochs=1)["losses"]
        whole = (losses, state(worker))

        other = start(rank, 11, train)
        run(other, Step(other), batches[:1], epochs=1)
        content: Content | None = (
            checkpoint.load_checkpoint(checkpoint.load_meta(store, "step-00000002"))
            if rank == 0
            else None
        )
        ranks = snapshot.restore_state(other, content)
        carried = snapshot.carried_progress(other, meta, ranks)
        assert carried is not None
        other.step = 2
        other.schedule.begin(carried.epoch, carried.carried_samples, other.step)
        snapshot.set_rng_state(ranks[rank]["rng"], other.device)
        losses = run(other, Step(other), batches[2:], epochs=1)["losses"]
        found[name] = (whole, (losses, state(other)), float(carried.loss_sum))
    return found


def assert_equal(one: Any, two: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            assert_equal(one[key], two[key], f"{where} {key}")
    elif isinstance(one, torch.Tensor):
        if "running" in where:
            # Averaged over ranks once more for the checkpoint: the same sum in another order.
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(one, two), where
    elif isinstance(one, list):
        for i, pair in enumerate(zip(one, two, strict=True)):
            assert_equal(*pair, f"{where} {i}")
    else:
        assert one == two, where


@pytest.mark.parametrize("name", CASES)
def test_weights_averages_optimiser_schedule_scaler_and_dropout_go_on_to_the_last_bit(
    ranks: list[Any], name: str
) -> None:
    for rank, found in enumerate(ranks):
        (losses, state), (resumed_losses, resumed_state), loss_sum = found[name]
        assert len(losses) == 3
        assert resumed_losses == losses
        assert_equal(resumed_state, state)
        assert state["step"] == 5
        assert loss_sum == rank, "each rank goes on with its own sums"
        if "fp16" in name:
            assert state["scaler"]["scale"] == 1024


def test_the_cases_train_and_differ(ranks: list[Any]) -> None:
    losses = {tuple(found[0][0]) for found in ranks[0].values()}
    assert len(losses) >= 2
    for (_, state), *_ in ranks[0].values():
        assert not torch.equal(state["ema"]["0.head.weight"], state["weights"]["0.head.weight"])
        assert state["weights"]["1.num_batches_tracked"] == 5
