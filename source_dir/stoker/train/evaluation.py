"""Train worker: evaluates batches of the validation split, before training those of its first records."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from stoker.chain.collating import collate_of
from stoker.config.schema import Config
from stoker.errors import UsageError, where_raised
from stoker.events.kinds import MetricTable, Note
from stoker.figures import count_of
from stoker.protocol import BlockReport
from stoker.recipe import Batch, Recipe
from stoker.train import strategies
from stoker.train.device import on_tensors
from stoker.train.feed import as_one_batch
from stoker.train.state import Worker, count_records, same_draws
from stoker.train.step import autocast
from stoker.train.stopping import known


class Evaluation:
    def __init__(self, worker: Worker, epoch: int | None) -> None:
        self.worker, self.epoch = worker, epoch
        model = worker.model if worker.ema is None else worker.ema.module
        if epoch is not None:
            strategies.share_buffers(model)
        self.model = strategies.plain(model).eval()
        self.sharded, self.spare = strategies.is_sharded(self.model), dict[str, Any]()
        with self.quietly():
            self.scores = Scores(worker)
        # Of losses, records that have one, those with preds and target, all records.
        self.sums = torch.zeros(4, dtype=torch.float64)

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Without gradients; random states are restored, so that validation does not affect training."""
        with torch.no_grad(), same_draws(self.worker.device):
            yield

    def take(self, batch: Batch) -> None:
        """Evaluate a batch as it came from the feed; one without records, if other ranks need this one."""
        worker, records = self.worker, count_records(batch)
        if self.sharded and not self.spare:
            self.spare = on_tensors(
                strategies.first_record(batch), lambda value: value.to(worker.device)
            )
        if not records:
            if self.sharded:
                # The forward passes of other ranks need this rank's shard of the weights.
                self._step(self.spare)
            return
        self.sums[3] += records
        result = self._step(batch)
        loss = result.get("loss")
        if loss is not None:
            self.sums[0] += float(loss) * records
            self.sums[1] += records
        if self.scores.update(result):
            self.sums[2] += records

    def _step(self, batch: Batch) -> dict[str, Any]:
        worker = self.worker
        with evaluating(worker.modules["val"]) as module:
            batch = module(batch)
        with autocast(worker):
            result: Any = worker.recipe.validation_step(self.model, batch)
        if not isinstance(result, dict):
            raise UsageError(
                f"recipe: {type(worker.recipe).__name__}.validation_step returned a {type(result).__name__};"
                " return a dict: loss, preds and target, as far as there are"
            )
        return result

    def result(self) -> dict[str, float]:
        worker, sums = self.worker, self.sums
        fed = torch.zeros(worker.world_size, dtype=torch.float64)
        fed[worker.rank] = self.scores.fed
        if worker.world_size > 1:
            sums, fed = sums.to(worker.device), fed.to(worker.device)
            dist.all_reduce(sums)
            dist.all_reduce(fed)
        losses, with_loss, scored, records = sums.tolist()
        values = {"val/loss": losses / records} if with_loss else {}
        for what, count in (("a loss", with_loss), ("preds and target", scored)):
            if count and abs(count - records) > 1e-6 * records:
                raise UsageError(
                    f"recipe: {type(worker.recipe).__name__}.validation_step returned {what} for some records"
                    f" only ({count:.0f} of {records:.0f}); return that in each batch, or in none"
                )
        ranks = [rank for rank, flag in enumerate(fed.tolist()) if flag]
        with self.quietly():
            if len(ranks) == worker.world_size:
                self.scores.compute(few=self.epoch is None)
            elif ranks:
                # Fewer records than ranks: torchmetrics mixes up the states of ranks of which some have none.
                self.scores.compute(group=dist.new_group(ranks))
                scores = self.scores
                own = scores.values, scores.tables, scores.notes
                scores.values, scores.tables, scores.notes = strategies.from_rank(own, ranks[0])
        return values | self.scores.values

    def tell(self) -> None:
        for table in self.scores.tables:
            self.worker.log(MetricTable(epoch=self.epoch, step=self.worker.step, **table))
        tell_once(self.worker, self.scores.notes)


def tell_once(worker: Worker, notes: list[str]) -> None:
    for note in notes:
        if note not in worker.noted:
            worker.noted.add(note)
            worker.log(Note(text=f"note: {note}"))


def sample_of(
    config: Config, recipe: Recipe, columns: dict[str, Any], report: BlockReport
) -> Batch:
    """The first records of a split, as the head made them, as a batch on the CPU."""
    collate = collate_of(config.recipe, config.params) if recipe.collates else None
    return as_one_batch(collate, copy.deepcopy(columns), report)  # what Ray delivers is read-only


def try_validation(worker: Worker, batch: Batch) -> tuple[dict[str, float], list[str]]:
    """Metrics of a few records, and notes: no epoch is lost to a validation that fails. Collective."""
    evaluation = Evaluation(worker, None)
    # Compiled for a few records, the model would be compiled again for any number of them.
    with torch.compiler.set_stance("force_eager"), evaluation.quietly():
        evaluation.take(on_tensors(batch, lambda value: value.to(worker.device)))
    values = evaluation.result()
    evaluation.scores.note_unfed()
    config = worker.config
    for key, name in (
        ("checkpoint.monitor", config.checkpoint.monitor),
        ("train.early_stopping.monitor", config.train.early_stopping.monitor),
    ):
        scores = evaluation.scores
        # More records may have more classes than the first.
        partial = [f"{shown}/" for shown in [*values, *(table["name"] for table in scores.tables)]]
        later = name in scores.later or (name or "").startswith(tuple(partial))
        if name is not None and name.startswith("val/") and not later:
            known(name, values, key)
    return values, evaluation.scores.notes


MOST_SCALARS = 100
"""Parts of one metric, and classes that have a curve each; more are a table."""
MOST_CELLS = 10_000


class Scores:
    def __init__(self, worker: Worker) -> None:
        self.recipe, self.classes = worker.recipe, worker.classes
        count = getattr(worker.recipe, "num_classes", None)
        if not self.classes and isinstance(count, int):
            self.classes = [str(number) for number in range(count)]
        self.own = type(worker.recipe).metrics is not Recipe.metrics
        try:
            made = worker.recipe.metrics()
            self.metrics = {name: metric.to(worker.device) for name, metric in made.items()}
        except Exception as error:
            raise UsageError(
                f"recipe: {type(worker.recipe).__name__}.metrics: {_why(error)}"
            ) from error
        self.fed = False
        self.values: dict[str, float] = {}
        self.tables: list[dict[str, Any]] = []
        """Events for the report: `name`, `rows`, `columns`, `values`."""
        self.notes: list[str] = []
        self.later: set[str] = set()

    def update(self, result: Mapping[str, Any]) -> bool:
        """Returns whether the metrics, if any, have taken a batch's result."""
        if fed := "preds" in result and "target" in result:
            self.fed = True
            preds = tree_map(_at_least_float32, result["preds"])
            for name, metric in self.metrics.items():
                try:
                    metric.update(preds, result["target"])
                except Exception as error:
                    raise self._failed(name, error) from error
        return fed and bool(self.metrics)

    def compute(self, few: bool = False, group: Any = None) -> None:
        """Fill `values`, `tables` and `notes`. Collective, on all ranks or none."""
        for name, metric in self.metrics.items():
            modules = metric.modules() if isinstance(metric, torch.nn.Module) else ()
            parts = [part for part in modules if hasattr(part, "process_group")]
            if parts and group is not None:
                if not self.fed:
                    continue
                for part in parts:
                    part.process_group = group
            try:
                value = metric.compute()
            except Exception as error:
                if not few or not isinstance(error, ValueError | RuntimeError):
                    raise self._failed(name, error) from error
                self.notes.append(
                    f"metric {name}: cannot be computed from the first records ({_why(error)}); if it cannot"
                    " from all, the validation of the first epoch fails"
                )
                self.later.add(f"val/{name}")
            else:
                self._show(f"val/{name}", value)

    def _failed(self, name: str, error: Exception) -> UsageError:
        kind = type(self.metrics[name]).__name__
        return UsageError(
            f"recipe: {type(self.recipe).__name__}.metrics: {name} ({kind}): {_why(error)}"
        )

    def _show(self, name: str, value: Any) -> None:
        """Add a metric's value: a number, a vector by class, or a table; of a dict, each part."""
        array = _as_array(value)
        if array is not None:
            self._show_array(name, array)
        elif not isinstance(value, Mapping):
            self.notes.append(f"{name} is not shown: it is a {type(value).__name__}, not a number")
        elif len(value) > MOST_SCALARS:  # such as the IoU of each image, by (image, class)
            self.notes.append(
                f"{name} is not shown: {len(value):,} parts are more than {MOST_SCALARS}"
            )
        else:
            for key, part in zip(_labels([*map(str, value)]), value.values(), strict=True):
                self._show(f"{name}/{key}", part)

    def _show_array(self, name: str, array: Any) -> None:
        if array.size == 1:
            self.values[name] = float(array.reshape(()))
        elif not array.size or array.size > MOST_CELLS:
            shape = " × ".join(f"{size:,}" for size in array.shape)
            reason = f"{shape} values are more than {MOST_CELLS:,}" if array.size else "it is empty"
            self.notes.append(f"{name} is not shown: {reason}")
        elif array.shape == (len(self.classes),) and array.size <= MOST_SCALARS:
            for label, cell in zip(_labels(self.classes), array, strict=True):
                self.values[f"{name}/{label}"] = float(cell)
        else:
            by_class = {*array.shape} == {len(self.classes)}
            axes = [
                [*self.classes] if by_class else [*map(str, range(size))] for size in array.shape
            ]
            columns = axes.pop() if array.ndim > 1 else ["value"]
            rows = [" / ".join(path) for path in itertools.product(*axes)]
            values = [[_cell(cell) for cell in row] for row in array.reshape(len(rows), -1)]
            self.tables.append({"name": name, "rows": rows, "columns": columns, "values": values})

    def note_unfed(self) -> None:
        if self.own and not self.fed and self.metrics:
            self.notes.append(
                f"{count_of(len(self.metrics), 'metric')} ({', '.join(self.metrics)}) not computed:"
                " validation_step returns no preds and target"
            )


def _why(error: Exception) -> str:
    # Frames of torchmetrics count as not the user's, which leaves this file.
    here = rf" \({Path(__file__).name}:\d+\)$"
    return re.sub(here, "", " ".join(where_raised(error).split()))[:300]


def _as_array(value: Any) -> Any:
    if torch.is_tensor(value):
        if value.is_complex():
            return None
        return value.detach().to_dense().double().cpu().numpy()
    try:
        array = np.asarray(None if isinstance(value, tuple) else value)
        return array.astype(np.float64) if array.dtype.kind in "biuf" else None
    except (TypeError, ValueError):
        return None


@contextlib.contextmanager
def evaluating(module: Any) -> Iterator[Any]:
    """A recipe's `on_device("val")` in evaluation mode, as it is exported; training may share parts of it."""
    parts = [*module.modules()] if isinstance(module, torch.nn.Module) else []
    before = [part.training for part in parts]
    try:
        for part in parts:
            part.training = False
        yield module
    finally:
        for part, training in zip(parts, before, strict=True):
            part.training = training


def _at_least_float32(values: Any) -> Any:
    low = torch.is_tensor(values) and values.dtype in (torch.bfloat16, torch.float16)
    return values.float() if low else values


def _labels(texts: Sequence[str]) -> list[str]:
    """Texts as different parts of metrics' names, which MLflow takes."""
    plain = [re.sub(r"[^\w.\- :]", "_", text).strip(" .")[:60] or "_" for text in texts]
    if len({*plain}) < len(plain):
        plain = [f"{number}-{text}" for number, text in enumerate(plain)]
    return plain


def _cell(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else round(float(value), 6)
