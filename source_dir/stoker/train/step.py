"""Train worker: one optimiser step, made of `train.accumulate_steps` batches.

for window in windows(feed, train.accumulate_steps):
    for batch in window:
        step.accumulate(batch)      forward and backward
    step.update()                   clip, optimiser, schedule, averaged weights
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from stoker.errors import UsageError
from stoker.recipe import Batch, classification_loss
from stoker.train import strategies
from stoker.train.state import Worker, count_records, loss_value

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def windows(feed: Iterable[Batch], size: int) -> Iterator[Iterator[Batch]]:
    """The batches of each optimiser step, as they come; the last may be fewer."""
    batches = (batch for batch in feed)
    try:
        for first in batches:
            yield itertools.chain([first], itertools.islice(batches, size - 1))
    finally:
        # A caller that leaves early may still hold the last window: the feed ends all the same.
        batches.close()


def autocast(worker: Worker) -> Any:
    name = DTYPES.get(worker.config.train.precision)
    if name is None:
        return contextlib.nullcontext()
    return torch.autocast(worker.device.type, dtype=getattr(torch, name))


class Step:
    """The mechanics of a step; one object serves all steps of a run.

    The gradient is that of the mean loss over all records of the window, on all train workers: a short
    last batch, or a short last window of an epoch, counts by its records.
    """

    def __init__(self, worker: Worker) -> None:
        train = worker.config.train
        self.worker, self.size = worker, train.accumulate_steps
        self.clip, self.smoothing = train.clip_grad_norm, train.label_smoothing
        self.mix = make_mix(worker)
        self.loss: Any = None
        """Mean loss of the last step on this rank, a tensor on the device."""
        self.rows = 0
        self.grad_norm: Any = None
        """Norm of the last step's gradient before clipping, a tensor; None without clipping."""
        self._begin()

    def _begin(self) -> None:
        self._batches, self._first_rows, self._weight, self._rows = 0, 0, 0.0, 0
        self._loss: Any = 0.0

    def accumulate(self, batch: Batch) -> None:
        worker = self.worker
        self._batches += 1
        rows = count_records(batch)
        self._rows += rows
        self._first_rows = self._first_rows or rows
        # Relative to the window's first batch: 1 but for the last batch of an epoch.
        weight = rows / self._first_rows
        self._weight += weight
        with self._syncing(self._batches == self.size):
            loss = self.loss_of(self.prepare(batch))
            factor = weight / self.size
            scaled = loss * factor if factor != 1 else loss
            if worker.scaler is not None:
                scaled = worker.scaler.scale(scaled)
            scaled.backward()
        self._loss += loss.detach().double() * weight
        worker.feed_step += 1

    def prepare(self, batch: Batch) -> Batch:
        """The batch as the model takes it: the recipe's `on_device`, mixed, in the memory order asked for."""
        batch = self.worker.modules["train"](batch)
        if self.mix is not None:
            batch = self.mix(batch)
        if self.worker.config.train.channels_last:
            for name, value in batch.items():
                if torch.is_tensor(value) and value.ndim == 4:
                    batch[name] = value.contiguous(memory_format=torch.channels_last)
        return batch

    def loss_of(self, batch: Batch) -> Any:
        """The recipe's loss of a prepared batch; what else its step gives is not kept until backward."""
        worker = self.worker
        with autocast(worker):
            if self.smoothing:
                result: Any = classification_loss(worker.model, batch, self.smoothing)
            else:
                result = worker.recipe.training_step(worker.model, batch)
        return loss_value(result)

    def _syncing(self, last: bool) -> Any:
        """Under ddp gradients are averaged over ranks with the window's last batch only.

        Under fsdp with each batch: unsynchronised gradients would be whole ones, as large as the model.
        """
        if last or not strategies.is_ddp(self.worker.model):
            return contextlib.nullcontext()
        return self.worker.model.no_sync()

    def update(self) -> None:
        worker, optimizer = self.worker, self.worker.optimizer
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        if self._batches < self.size and strategies.is_ddp(worker.model):
            strategies.average_gradients(parameters)
        if worker.scaler is not None:
            worker.scaler.unscale_(optimizer)
        if self.size > 1 and self._weight != self.size:
            # Backward divided by the size of a full window; a shorter one is made up for here.
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, self.size / self._weight)
        if self.clip is not None:
            norm: Any = clip_grad_norm_(parameters, self.clip)
            self.grad_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if worker.scaler is not None:
            worker.scaler.step(optimizer)
            worker.scaler.update()
        else:
            self._step_optimizer()
        optimizer.zero_grad(set_to_none=True)
        worker.step += 1
        if worker.schedule is not None:
            # Every rank takes as many records in a step as every other.
            worker.schedule.advance(self._rows * worker.world_size, worker.step)
        if worker.ema is not None:
            worker.ema.update(strategies.plain(worker.model), step=worker.step)
        self.loss, self.rows = self._loss / self._weight, self._rows
        self._begin()

    def _step_optimizer(self) -> None:
        worker = self.worker
        try:
            worker.optimizer.step()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            if worker.step or not strategies.is_sharded(worker.model):
                raise
            raise UsageError(
                f"train.optimizer: {type(worker.optimizer).__name__} cannot work on sharded parameters"
                f" ({' '.join(str(error).split())[:120]}); use train.strategy=ddp or another optimiser"
            ) from error


def make_mix(worker: Worker) -> Any:
    train = worker.config.train
    if not train.mixup and not train.cutmix:
        return None
    from torchvision.transforms import v2

    model = strategies.plain(worker.model)
    classes = getattr(worker.recipe, "num_classes", None) or getattr(model, "num_classes", None)
    if not isinstance(classes, int):
        raise UsageError(
            "train.mixup, train.cutmix: give the recipe a field num_classes, so that labels mix"
        )
    kinds: list[Any] = []
    if train.mixup:
        kinds.append(v2.MixUp(alpha=train.mixup, num_classes=classes, labels_getter=_labels))
    if train.cutmix:
        kinds.append(v2.CutMix(alpha=train.cutmix, num_classes=classes, labels_getter=_labels))
    either = v2.RandomChoice(kinds) if len(kinds) > 1 else kinds[0]

    def mix(batch: Batch) -> Batch:
        if not batch["image"].is_floating_point():
            raise UsageError(
                "train.mixup, train.cutmix: on_device('train') must give images as floats"
            )
        image, label = either(batch["image"], batch["label"])
        return {**batch, "image": image, "label": label}

    return mix


def _labels(inputs: tuple[Any, Any]) -> Any:
    return inputs[1]
