"""One optimiser step: accumulation, clipping, rates, averages, mixing; on two ranks: integration."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from steps import EVERYTHING, Tiny, assert_same, feed, make, run
from torch import nn

from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.train.build import build
from stoker.train.evaluation import try_validation
from stoker.train.state import Worker
from stoker.train.step import Step, autocast


@pytest.fixture(scope="module")
def single() -> dict[int, Any]:
    return {n: run(*make(**EVERYTHING), feed(n, 8)) for n in (20, 22)}


@pytest.mark.parametrize("count", [20, 22])
@pytest.mark.long
def test_one_worker_accumulates_alike(single: Any, count: int) -> None:
    assert_same(run(*make(**EVERYTHING, accumulate_steps=2), feed(count, 4)), single[count], 1e-4)


def test_clipping_binds_and_the_norm_is_that_before_it(single: Any) -> None:
    assert max(single[22]["norms"]) > 0.4


def test_layers_before_the_last_learn_more_slowly_and_the_rate_warms_up(single: Any) -> None:
    rates = single[22]["rates"]
    assert len(set(rates[0])) > 1
    assert max(rates[0]) < max(rates[2])


def test_the_averaged_weights_lag_behind(single: Any) -> None:
    weights, averaged = single[22]["weights"], single[22]["ema"]
    assert not torch.equal(weights["head.weight"], averaged["head.weight"])


@pytest.mark.parametrize("kind", ["module", "function", "text"])
def test_on_device_returns_a_module_or_a_function(kind: str) -> None:
    class Half(nn.Module):
        def forward(self, batch: Any) -> Any:
            return {**batch, "image": batch["image"] / 2}

    class Halved(Tiny):
        def on_device(self, split: str) -> Any:
            return {"module": Half(), "function": Half().forward, "text": "half"}[kind]

    if kind == "text":
        with pytest.raises(
            UsageError, match=r"^recipe: Halved.on_device\('train'\) returned a str"
        ):
            make(recipe=Halved)
        return
    worker, step = make(recipe=Halved)
    batch = feed(8, 8)[0]
    assert torch.equal(step.prepare(batch)["image"], batch["image"] / 2)
    values, _ = try_validation(worker, batch)
    assert values["val/loss"] == pytest.approx(float(step.loss_of(step.prepare(batch))))


def test_tied_weights_are_averaged_once_in_a_step() -> None:
    class Tied(Tiny):
        def model(self) -> Any:
            model = super().model()
            model.blocks[1] = model.blocks[0]
            return model

    worker, step = make(recipe=Tied, ema_decay=0.9)
    expected = worker.model.blocks[0][0].weight.detach().clone()
    for batch in feed(24, 8):
        step.accumulate(batch)
        step.update()
        expected.lerp_(
            worker.model.blocks[0][0].weight.detach(), 1 - worker.ema.get_decay(worker.step)
        )
    torch.testing.assert_close(worker.ema.module.blocks[1][0].weight.detach(), expected)


@pytest.mark.parametrize(
    "options", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}]
)
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
    with pytest.raises(UsageError, match=r"train\.layer_decay: Sequential does not group"):
        build(worker, records=24)


class Linear(Tiny):
    def model(self) -> Any:
        return Classifier()


class Classifier(nn.Linear):
    """Not a module of torch's own: PyTorch 2.6 captures the forward of those only as a part of another."""

    def __init__(self) -> None:
        super().__init__(64, 5)

    def forward(self, x: Any) -> Any:
        return super().forward(x.flatten(1))


def linear(**train: Any) -> Worker:
    config = Config.model_validate({"train": {"lr": 0.1, **train}})
    worker = Worker(config, Linear(), None, 0, 0, 1, torch.device("cpu"))
    build(worker, records=16)
    return worker


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch.compile captures, without the C++ compiler's half minute: that is a soak test's."""
    found = list[Any]()

    def keep(graph: Any, inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    return found


def compiled_and_not() -> list[dict[str, Any]]:
    workers = [linear(compile=compiled) for compiled in (False, True)]
    return [run(worker, Step(worker), feed(16, 8)) for worker in workers]


@pytest.mark.long
def test_a_captured_model_trains_alike_and_saves_the_same_names(graphs: list[Any]) -> None:
    plain, other = compiled_and_not()
    assert graphs
    assert other["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert other["weights"].keys() == plain["weights"].keys()


@pytest.mark.long
def test_the_trial_of_a_validation_captures_nothing(graphs: list[Any]) -> None:
    """Captured for its few records, the model would be captured again for any number, and trained so."""
    worker = linear(compile=True)
    values, _ = try_validation(worker, feed(4, 4)[0])
    assert "val/acc1" in values and not graphs
    run(worker, Step(worker), feed(16, 8))
    assert len(graphs) == 1


@pytest.mark.soak
def test_a_compiled_model_trains_alike_and_saves_the_same_names() -> None:
    plain, other = compiled_and_not()
    assert other["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert other["weights"].keys() == plain["weights"].keys()


def test_without_a_compiler_compile_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        UsageError, match=r"train\.compile: torch\.compile needs a C\+\+ compiler"
    ) as refused:
        make(compile=True)
    assert len(str(refused.value).splitlines()) == 1
