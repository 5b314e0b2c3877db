"""Train worker: builds what a step needs: model, averaged model, optimiser, schedule, scaler."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from typing import Any

import torch

from stoker.checkpoints.format import Checkpoint
from stoker.config.schema import Config, TrainConfig
from stoker.errors import UsageError
from stoker.recipe import Batch, Recipe, Split
from stoker.train import strategies
from stoker.train.state import Worker
from stoker.train.strategies import plain


def build(worker: Worker, records: int | None, resumed: Checkpoint | None = None) -> None:
    """Fill in the worker, with the same weights on every rank."""
    if resumed is not None:
        worker.config = keeping_groups(worker.config, resumed.meta["config"])
    train, seed = worker.config.train, worker.config.seed
    torch.manual_seed(seed)
    check_device(train, worker.device)
    model = worker.recipe.model()
    sharded = train.strategy == "fsdp" and worker.world_size > 1
    if not sharded:
        model = model.to(worker.device)
        if train.channels_last:
            # Sharded weights must be contiguous; convolutions follow their input's memory format anyway.
            model = model.to(memory_format=torch.channels_last)
    if train.ema_decay is not None:
        worker.ema = make_ema(model, train.ema_decay, sharded, worker.device)
    if train.compile:
        compile_forward(model, sharded)
    worker.model = strategies.prepare_model(model, worker.device, train.strategy)
    if strategies.is_sharded(worker.model) and not sharded and worker.ema is not None:
        raise UsageError(
            f"train.ema_decay: not with {train.strategy}, which shards; use train.strategy=fsdp"
        )
    worker.optimizer = make_optimizer(worker.recipe, worker.model, train, worker.world_size)
    own = type(worker.recipe).optimizer is not Recipe.optimizer
    # Otherwise it keeps its own rate.
    if not own or train.scheduler != "none" or train.warmup_epochs:
        worker.schedule = Schedule(worker.optimizer, train, records)
    if train.precision == "fp16":
        worker.scaler = torch.amp.GradScaler(worker.device.type)
    for split in ("train", "val"):
        worker.modules[split] = on_device(worker.recipe, split).to(worker.device)
    torch.manual_seed(seed + worker.rank)


class OnDevice(torch.nn.Module):
    """The function that a recipe's `on_device` returns, or nothing, as a module."""

    def __init__(self, function: Callable[[Batch], Batch] | None) -> None:
        super().__init__()
        self.function = function

    def forward(self, batch: Batch) -> Batch:
        return batch if self.function is None else self.function(batch)


def on_device(recipe: Recipe, split: Split) -> torch.nn.Module:
    returned = recipe.on_device(split)
    if isinstance(returned, torch.nn.Module):
        return returned
    if returned is None or callable(returned):
        return OnDevice(returned)
    raise UsageError(
        f"recipe: {type(recipe).__name__}.on_device({split!r}) returned a {type(returned).__name__};"
        " return a module or a function from batch to batch, or None"
    )


def keeping_groups(config: Config, before: dict[str, Any]) -> Config:
    """With what the optimiser's state keeps, as a change of it may group the parameters in another way."""
    kept = {key: before["train"][key] for key in ("momentum", "weight_decay")}
    return config.model_copy(update={"train": config.train.model_copy(update=kept)})


def make_ema(model: Any, decay: float, sharded: bool, device: Any) -> Any:
    """timm's ModelEmaV3, a copy whose weights are a moving average of the model's.

    Its decay grows with the steps up to `decay`, so that a short run does not average in its first weights.
    """
    from timm.utils import ModelEmaV3

    # Buffers stay whole if parameters are sharded, and one kernel for all cannot take both.
    mixed = sharded and any(buffer.is_floating_point() for buffer in model.buffers())
    # Among a model's buffers it finds tied weights under each of their names, and would average them twice.
    tied = len([*model.parameters()]) < len([*model.named_parameters(remove_duplicate=False)])
    keeper = ModelEmaV3(
        model, decay=decay, use_warmup=True, foreach=not mixed, exclude_buffers=tied
    )
    if sharded:
        keeper.stochastic_rounding = False  # an attribute that timm before 1.0.31 ignores
        keeper.module = strategies.shard(keeper.module, device)
    return keeper


def compile_forward(model: Any, sharded: bool) -> None:
    """torch.compile in place, which keeps the parameters' names.

    The calls that gather a shard would break the graph, so blocks to be sharded are compiled inside these.
    """
    if not sharded:
        model.compile()
        return
    for block in strategies.blocks(model) or [model]:
        block.forward = torch.compile(block.forward)


def check_device(train: TrainConfig, device: Any) -> None:
    wants_bf16 = train.precision == "bf16" and device.type == "cuda"
    if wants_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise UsageError(f"train.precision: {name} has no bf16 arithmetic; use fp16")
    if train.compile:
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            compiler = get_cpp_compiler()
        except Exception:
            compiler = ""
        if not shutil.which(compiler):
            raise UsageError(
                "train.compile: torch.compile needs a C++ compiler on the hosts that train, and found none;"
                " install g++ or set train.compile=false"
            )


WARMUP_LR = 1e-5
"""Initial learning rate of a warm-up, unless `train.scale_lr` provides one."""


def scaled_lr(config: TrainConfig, workers: int) -> float:
    """The learning rate, scaled for batches larger than one worker's `batch_size`.

    A step averages over train workers × accumulate_steps batches. "linear" is the rule of Goyal et al.,
    "Accurate, Large Minibatch SGD" (arXiv 1706.02677), "sqrt" that of Krizhevsky (arXiv 1404.5997).
    """
    batches = float(workers * config.accumulate_steps)
    factors = {"none": 1.0, "linear": batches, "sqrt": math.sqrt(batches)}
    return config.lr * factors[config.scale_lr]


def make_optimizer(recipe: Recipe, model: Any, config: TrainConfig, workers: int) -> Any:
    own = recipe.optimizer(plain(model))
    if own is not None:
        return own
    from timm.optim import create_optimizer_v2

    try:
        optimizer = create_optimizer_v2(
            plain(model),
            opt=config.optimizer,
            lr=scaled_lr(config, workers),
            weight_decay=config.weight_decay,
            layer_decay=config.layer_decay,
            **({"momentum": config.momentum} if config.optimizer in MOMENTUM_OPTIMIZERS else {}),
        )
    except (AssertionError, KeyError, ValueError, TypeError) as error:
        raise UsageError(
            f"train.optimizer: timm cannot create {config.optimizer!r}: {error}"
        ) from None
    if config.layer_decay is not None and len({g["lr_scale"] for g in optimizer.param_groups}) == 1:
        raise UsageError(
            f"train.layer_decay: {type(plain(model)).__name__} does not group its parameters into layers;"
            " give it timm's method group_matcher, or leave layer_decay out"
        )
    return optimizer


MOMENTUM_OPTIMIZERS = {"sgd", "nesterov", "momentum", "sgdp", "rmsprop", "lars", "sgdw"}


class Schedule:
    """The learning rate as a function of training progress.

    Training ends with `train.epochs` or `train.max_steps`, whichever comes first; progress within an epoch is
    counted in records. The rate has no state, so a run resumed with another number of train workers, or
    another batch size, stays on the same curve, which ends with the training.
    """

    def __init__(self, optimizer: Any, train: TrainConfig, records: int | None) -> None:
        self.optimizer, self.train, self.records = optimizer, train, records
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.scales = [float(group.get("lr_scale", 1.0)) for group in optimizer.param_groups]
        self.begin(0)

    def begin(self, epoch: int, samples: int = 0, step: int = 0) -> None:
        self.epoch, self.samples = epoch, samples
        self._set(step)

    def advance(self, samples: int, step: int) -> None:
        self.samples += samples
        self._set(step)

    def _set(self, step: int) -> None:
        # An epoch may train fewer than all records: some are bad, or remain.
        epochs = self.epoch + min(self.samples / self.records, 1.0) if self.records else 0.0
        groups = self.optimizer.param_groups
        for group, rate, scale in zip(groups, self.rates, self.scales, strict=True):
            group["lr"] = self._rate(rate, epochs, step) * scale

    def _rate(self, rate: float, epochs: float, step: int) -> float:
        train = self.train
        if epochs < train.warmup_epochs:
            first = min(WARMUP_LR if train.scale_lr == "none" else train.lr, rate)
            return first + (rate - first) * epochs / train.warmup_epochs
        if train.max_steps is not None:
            epochs = max(epochs, step / train.max_steps * train.epochs)
        done = min(epochs / train.epochs, 1.0)
        if train.scheduler == "cosine":
            return rate * 0.5 * (1 + math.cos(math.pi * done))
        if train.scheduler == "linear":
            return rate * (1 - done)
        if train.scheduler == "step":
            thirds = min(int(3 * done + 1e-9), 2)
            return float(rate * 0.1**thirds)
        return rate


def learning_rate(optimizer: Any) -> float:
    """The present rate; with layer decay that of the last layers, the largest."""
    return float(max(group["lr"] for group in optimizer.param_groups))
