"""Train worker: builds what a step needs: model, averaged model, optimiser, schedule, scaler."""

from __future__ import annotations

from typing import Any

from stoker.config.schema import TrainConfig
from stoker.errors import UsageError
from stoker.train import optimizers, strategies
from stoker.train.state import Worker


def build(worker: Worker, records: int | None) -> None:
    """Train worker: fill in the worker, with the same weights on every rank.

    Args:
        worker: has the configuration and the recipe.
        records: per epoch, for the schedule; None if unknown.

    Raises:
        UsageError: this host does not support the configuration.
    """
    import torch

    config = worker.config
    torch.manual_seed(config.seed)
    build_model(worker, records)
    for split in ("train", "val"):
        module = worker.recipe.on_device(split)
        worker.modules[split] = module.to(worker.device) if module is not None else (lambda batch: batch)
    torch.manual_seed(config.seed + worker.rank)


def build_model(worker: Worker, records: int | None) -> None:
    """Train worker: model, averaged model, optimiser, schedule and scaler; see `build`."""
    import torch

    train = worker.config.train
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
        raise UsageError(f"train.ema_decay: not with {train.strategy}, which shards; use train.strategy=fsdp")
    worker.optimizer = optimizers.make_optimizer(worker.recipe, worker.model, train, worker.world_size)
    worker.schedule = optimizers.make_schedule(worker.recipe, worker.optimizer, train, records)
    if train.precision == "fp16":
        worker.scaler = torch.amp.GradScaler(worker.device.type)


def make_ema(model: Any, decay: float, sharded: bool, device: Any) -> Any:
    """Train worker: timm's ModelEmaV3, a copy whose weights are a moving average of the model's.

    Its decay grows with the steps up to `decay`, so that a short run does not average in its first weights.

    Args:
        model: before it is wrapped, sharded or compiled.
        decay: `train.ema_decay`.
        sharded: shard the copy like the model.
        device: for the shards.
    """
    from timm.utils import ModelEmaV3

    # Buffers stay whole if parameters are sharded, and one kernel for all cannot take both.
    mixed = sharded and any(buffer.is_floating_point() for buffer in model.buffers())
    keeper = ModelEmaV3(
        model, decay=decay, use_warmup=True, stochastic_rounding=not sharded, foreach=not mixed
    )
    if sharded:
        keeper.module = strategies.shard(keeper.module, device)
    return keeper


def compile_forward(model: Any, sharded: bool) -> None:
    """Train worker: torch.compile in place, which keeps the parameters' names.

    The calls that gather a shard cannot be compiled and would break the graph around them, so a model to be
    sharded is compiled block by block, inside these calls.
    """
    import torch

    if not sharded:
        model.compile()
        return
    for block in strategies.blocks(model) or [model]:
        block.forward = torch.compile(block.forward)


def check_device(train: TrainConfig, device: Any) -> None:
    """Train worker: check that this host supports the precision and torch.compile.

    Raises:
        UsageError: it does not.
    """
    import torch

    wants_bf16 = train.precision == "bf16" and device.type == "cuda"
    if wants_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise UsageError(f"train.precision: {name} has no bf16 arithmetic; use fp16")
    if train.compile:
        import shutil

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
