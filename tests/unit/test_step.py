"""One optimiser step is the same step, whatever its records are spread over: batches, ranks, shards.

Two processes with gloo run all cases once, in the strategies ddp and fsdp; the tests compare what they
wrote with a single train worker that takes the same records in one batch.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stoker.config import UsageError
from stoker.recipe import Recipe
from stoker.schema import Config
from stoker.training import strategies
from stoker.training.build import build
from stoker.training.step import Step, autocast, windows
from stoker.training.worker import Worker

EVERYTHING: dict[str, Any] = {
    "optimizer": "adamw",
    "lr": 0.01,
    "weight_decay": 0.05,
    "scheduler": "cosine",
    "warmup_epochs": 1,
    "epochs": 3,
    "clip_grad_norm": 0.4,
    "label_smoothing": 0.1,
    "ema_decay": 0.8,
    "layer_decay": 0.7,
}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "accumulated": {"accumulate_steps": 2},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
}


class Blocks(nn.Module):
    """Two residual blocks, without anything that looks beyond a record."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 48, 3, padding=1), nn.GELU(), nn.Conv2d(48, 32, 3, padding=1))
            for _ in range(2)
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        return {"stem": r"^stem", "blocks": r"^blocks\.(\d+)"}


class Tiny(Recipe):
    num_classes: int = 5
    explode: bool = False

    def model(self) -> Any:
        return Blocks()

    def on_device(self, split: str) -> Any:
        return Explode() if self.explode else None


class Explode(nn.Module):
    """The second batch of rank 1 alone makes gradients that fp16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, batch: Any) -> Any:
        import torch.distributed as dist

        self.calls += 1
        factor = 1e30 if self.calls == 2 and dist.is_initialized() and dist.get_rank() == 1 else 1.0
        return {**batch, "image": batch["image"] * factor}


def make(rank: int = 0, world: int = 1, explode: bool = False, **train: Any) -> tuple[Worker, Step]:
    config = Config.model_validate({"seed": 3, "train": train})
    worker = Worker(config, Tiny(explode=explode), None, 0, rank, world, torch.device("cpu"))
    build(worker, steps_per_epoch=3)
    return worker, Step(worker)


def records(count: int) -> tuple[Any, Any]:
    source = torch.Generator().manual_seed(5)
    return torch.randn(count, 1, 8, 8, generator=source), torch.randint(5, (count,), generator=source)


def feed(count: int, batch: int, rank: int = 0, world: int = 1) -> list[Any]:
    """What each rank gets of `count` records: `batch` per step, the rest shared evenly."""
    image, label = records(count)
    batches = []
    for first in range(0, count, batch * world):
        each = min(batch, (count - first) // world)
        own = slice(first + rank * each, first + (rank + 1) * each)
        batches.append({"image": image[own], "label": label[own]})
    return batches


def run(worker: Worker, step: Step, batches: list[Any], epochs: int = 2) -> dict[str, Any]:
    import torch.distributed as dist

    losses, norms, rates = [], [], []
    for _ in range(epochs):
        for window in windows(batches, worker.config.train.accumulate_steps):
            for batch in window:
                step.accumulate(batch)
            step.update()
            loss = step.loss.clone()
            if worker.world_size > 1:
                dist.all_reduce(loss)
            losses.append(float(loss) / worker.world_size)
            norms.append(None if step.grad_norm is None else float(step.grad_norm))
            rates.append([group["lr"] for group in worker.optimizer.param_groups])
    averaged = strategies.full_state(worker.ema.module, None)[0] if worker.ema else {}
    return {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "weights": strategies.full_state(worker.model, None)[0],
        "ema": averaged,
        "steps": (worker.step, worker.feed_step),
    }


def process(rank: int, port: int, folder: str) -> None:
    """One of two ranks: every case in both strategies."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
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
        before = strategies.full_state(worker.model, None)[0], worker.scaler.get_scale()
        run(worker, step, feed(8, 4, rank, 2), epochs=1)
        after = strategies.full_state(worker.model, None)[0], worker.scaler.get_scale()
        found[strategy, "overflow"] = (before, after)
        run(worker, step, feed(8, 4, rank, 2), epochs=1)
        found[strategy, "recovered"] = strategies.full_state(worker.model, None)[0]
    try:
        run(*make(rank, 2, optimizer="novograd", strategy="fsdp"), feed(8, 4, rank, 2))
    except Exception as error:
        found["refused"] = f"{type(error).__name__}: {error}"
    torch.save(found, Path(folder) / f"rank-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.spawn(process, (port, str(folder)), nprocs=2, join=False)
    while not context.join(timeout=120):
        pass
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def single() -> dict[int, Any]:
    return {n: run(*make(**EVERYTHING), feed(n, 8)) for n in (20, 22)}


def assert_same(found: Any, expected: Any, tolerance: float) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["norms"] == pytest.approx(expected["norms"], rel=10 * tolerance)
    assert found["rates"] == expected["rates"]
    for kind in ("weights", "ema"):
        assert found[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            torch.testing.assert_close(found[kind][name], value, rtol=tolerance, atol=tolerance)


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


@pytest.mark.parametrize("count", [20, 22])
def test_one_worker_accumulates_alike(single: Any, count: int) -> None:
    assert_same(run(*make(**EVERYTHING, accumulate_steps=2), feed(count, 4)), single[count], 1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_16_bits_stay_near_to_32(ranks: list[Any], single: Any, strategy: str, precision: str) -> None:
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
        assert found["refused"].startswith("UsageError: train.optimizer: NvNovoGrad cannot work on sharded")


def test_clipping_binds_and_the_norm_is_that_before_it(single: Any) -> None:
    assert max(single[22]["norms"]) > 0.4


def test_layers_before_the_last_learn_more_slowly_and_the_rate_warms_up(single: Any) -> None:
    rates = single[22]["rates"]
    assert len(set(rates[0])) > 1
    assert max(rates[0]) < max(rates[2])


def test_the_averaged_weights_lag_behind(single: Any) -> None:
    weights, averaged = single[22]["weights"], single[22]["ema"]
    assert not torch.equal(weights["head.weight"], averaged["head.weight"])


@pytest.mark.parametrize("options", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}])
def test_images_and_labels_mix_alike_and_the_same_in_every_run(options: dict[str, float]) -> None:
    torch.manual_seed(1)
    worker, step = make(**options)
    image = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 8, 8)
    batch = {"image": image, "label": torch.arange(4)}
    mixed = step.prepare(batch)
    # Record i holds i everywhere and has class i, so the mean of the image is that of the labels.
    torch.testing.assert_close(mixed["image"].mean((1, 2, 3)), mixed["label"] @ torch.arange(5.0))
    torch.testing.assert_close(mixed["label"].sum(1), torch.ones(4))
    assert (mixed["label"] > 0).sum() > 4
    again = make(**options)[1].prepare(batch)
    assert torch.equal(again["image"], mixed["image"])
    losses = run(worker, step, feed(24, 8), epochs=4)["losses"]
    assert all(loss == loss and loss < 5 for loss in losses)


def test_channels_last_changes_the_memory_order_and_not_the_numbers() -> None:
    plain, other = make(lr=0.1), make(lr=0.1, channels_last=True)
    first, second = run(*plain, feed(16, 8)), run(*other, feed(16, 8))
    assert second["losses"] == pytest.approx(first["losses"], rel=1e-5)
    assert other[0].model.blocks[0][0].weight.is_contiguous(memory_format=torch.channels_last)
    prepared = other[1].prepare({"image": torch.rand(4, 3, 8, 8)})
    assert prepared["image"].is_contiguous(memory_format=torch.channels_last)


def test_validation_computes_in_the_precision_of_training() -> None:
    worker, _ = make(precision="bf16")
    with autocast(worker):
        assert worker.model(torch.rand(2, 1, 8, 8)).dtype == torch.bfloat16


def test_layer_decay_is_refused_where_the_model_names_no_layers() -> None:
    class Flat(Tiny):
        def model(self) -> Any:
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))

    config = Config.model_validate({"train": {"layer_decay": 0.5}})
    worker = Worker(config, Flat(), None, 0, 0, 1, torch.device("cpu"))
    with pytest.raises(UsageError, match=r"train\.layer_decay: Sequential does not say"):
        build(worker, steps_per_epoch=3)


class Linear(Tiny):
    def model(self) -> Any:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


def test_a_compiled_model_trains_alike_and_saves_the_same_names() -> None:
    runs = []
    for compiled in (False, True):
        config = Config.model_validate({"train": {"compile": compiled, "lr": 0.1}})
        worker = Worker(config, Linear(), None, 0, 0, 1, torch.device("cpu"))
        build(worker, steps_per_epoch=2)
        runs.append(run(worker, Step(worker), feed(16, 8)))
    assert runs[1]["losses"] == pytest.approx(runs[0]["losses"], rel=1e-5)
    assert runs[1]["weights"].keys() == runs[0]["weights"].keys()


def test_without_a_compiler_compile_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UsageError, match=r"train\.compile: torch\.compile needs a C\+\+ compiler") as refused:
        make(compile=True)
    assert len(str(refused.value).splitlines()) == 1
