"""Train worker: evaluates batches of the validation split, before training those of its first records."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from stoker.accuracy import F1
from stoker.chain.collating import collate_of
from stoker.config.schema import Config
from stoker.errors import UsageError, where_raised
from stoker.events.kinds import MetricTable, Note
from stoker.figures import count_of
from stoker.protocol import BlockReport
from stoker.read.sources import drawing
from stoker.recipe import Batch, Recipe
from stoker.train import strategies
from stoker.train.device import on_tensors
from stoker.train.feed import as_one_batch
from stoker.train.state import Worker, count_records, same_draws
from stoker.train.step import autocast, naming_text, single_record_fault
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
        with autocast(worker), naming_text(batch):
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
        if self.epoch is not None and len(ranks) > 1 and self.scores.found:
            self._refuse_shares(ranks)
        return values | self.scores.values

    def _refuse_shares(self, ranks: list[int]) -> None:
        """Refuse a metric of which each train worker knows only the value of its own records. Collective."""
        found = [self.scores.found] * self.worker.world_size
        dist.all_gather_object(found, self.scores.found)
        first, *others = (found[rank] for rank in ranks)
        for name, values in first.items():
            if not all(_alike(values, other[name]) for other in others):
                if (
                    name in self.scores.combined
                ):  # it may draw at random in compute, as estimates do
                    self.scores.notes.append(
                        f"metric {name} differs between train workers; shown is that of one of them. If it is"
                        " no random estimate, keep all its counts in add_state, and sync_on_compute=True"
                    )
                    continue
                raise UsageError(
                    f"recipe: {type(self.worker.recipe).__name__}.metrics: {name} differs between train"
                    " workers, so it is of a part of the validation; keep its counts in add_state of"
                    " torchmetrics.Metric, or add them up with torch.distributed.all_reduce in compute"
                )

    def tell(self) -> None:
        for table in self.scores.tables:
            self.worker.log(MetricTable(epoch=self.epoch, step=self.worker.step, **table))
        tell_once(self.worker, self.scores.notes)


def tell_once(worker: Worker, notes: list[str]) -> None:
    for note in notes:
        if note not in worker.noted:
            worker.noted.add(note)
            worker.log(Note(text=f"note: {note}"))


def carry_extremes(values: dict[str, float], history: list[dict[str, Any]]) -> None:
    """Let `min` and `max` of torchmetrics' MinMaxMetric cover the run: each validation creates it anew."""
    for name in [name.removesuffix("/raw") for name in values if name.endswith("/raw")]:
        for kind, pick in (("min", min), ("max", max)):
            before = [e["metrics"].get(f"{name}/{kind}") for e in history if not e.get("elsewhere")]
            if f"{name}/{kind}" in values:
                found = [
                    values[f"{name}/{kind}"],
                    *(value for value in before if value is not None),
                ]
                values[f"{name}/{kind}"] = pick(found)


def sample_of(
    config: Config, recipe: Recipe, columns: dict[str, Any], report: BlockReport
) -> Batch:
    """The first records of a split, as the head made them, as a batch on the CPU."""
    collate = collate_of(config.recipe, config.params) if recipe.collates else None
    return as_one_batch(collate, copy.deepcopy(columns), report)  # what Ray delivers is read-only


def fails_alone(
    config: Config, recipe: Recipe, workers: int, columns: dict[str, Any], report: BlockReport
) -> str:
    """Why the model cannot train on one record; empty if it can, or cannot be tried here."""
    with drawing(f"{config.seed}/recipe"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that weights are not loaded
        try:
            with torch.device("meta"):  # without weights, which may not fit into this host's memory
                if not any(isinstance(part, _BatchNorm) for part in recipe.model().modules()):
                    return ""
        except Exception:
            if config.train.batch_size == 1:
                return ""  # the first step tells, which costs nothing
        try:
            batch = {
                name: values[:1]
                for name, values in sample_of(config, recipe, columns, report).items()
            }
            module = recipe.on_device("train")
            model = recipe.model().train()
            if workers > 1 and any(isinstance(part, SyncBatchNorm) for part in model.modules()):
                return ""  # it counts the records of all train workers
            recipe.training_step(model, module(batch) if module else batch)
        except ValueError as error:
            return single_record_fault(error)
        except Exception:
            return ""  # the train workers report it, or can do it
    return ""


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
        later = name is not None and ("_per_class/" in name or name in evaluation.scores.later)
        if name is not None and name.startswith("val/") and not later:
            known(name, values, key)
    return values, evaluation.scores.notes


MOST_SCALARS = 100
"""Curves of one metric; a metric with more values has only a table."""
MOST_CELLS = 10_000


class Scores:
    def __init__(self, worker: Worker) -> None:
        self.recipe, self.classes, self.told = worker.recipe, worker.classes, worker.noted
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
        self.found: dict[str, list[Any]] = {}
        """What metrics give on this train worker."""
        self.combined: set[str] = set()
        """Metrics with a state, which torchmetrics combines over the train workers by default."""

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
            self.found[name] = []  # on all ranks, which compare: also on one without records
            if combined := any(part.metric_state for part in parts):
                self.combined.add(name)
            if parts and group is not None:
                if not self.fed:
                    continue
                for part in parts:
                    part.process_group = group
            try:
                found = metric.compute()
            except Exception as error:
                if not few or not isinstance(error, ValueError | RuntimeError):
                    raise self._failed(name, error) from error
                self.notes.append(
                    f"metric {name}: cannot be computed from the first records ({_why(error)}); if it cannot"
                    " from all, the validation of the first epoch fails"
                )
                self.later.add(f"val/{name}")
            else:
                self.notes += metric.news(self.told) if isinstance(metric, F1) else []
                arrays = map(_as_array, tree_leaves(found))
                # Of those, curves and tables are not compared: they may be large.
                self.found[name] = [
                    None if array is None or (combined and array.size > MOST_SCALARS) else array
                    for array in arrays
                ]
                self._show(f"val/{name}", found, self.classes)

    def _failed(self, name: str, error: Exception) -> UsageError:
        kind = type(self.metrics[name]).__name__
        return UsageError(
            f"recipe: {type(self.recipe).__name__}.metrics: {name} ({kind}): {_why(error)}"
        )

    def _show(self, name: str, value: Any, classes: Sequence[str], curve: bool = False) -> None:
        nested = isinstance(value, Mapping | list | tuple)
        if nested and len(value) > MOST_SCALARS and _as_array(value) is None:
            # Such as the IoU of each image, by (image, class).
            self.notes.append(
                f"{name} is not shown: {len(value):,} parts are more than {MOST_SCALARS}"
            )
        elif isinstance(value, Mapping):
            self._show_parts(name, value, classes)
        elif (array := _as_array(value)) is not None:
            self._show_array(name, array, classes, curve)
        elif isinstance(value, list | tuple):
            for number, part in enumerate(value):
                self._show(f"{name}/{number}", part, classes, curve=True)
        else:
            self.notes.append(f"{name} is not shown: it is a {type(value).__name__}, not a number")

    def _show_parts(self, name: str, parts: Mapping[Any, Any], classes: Sequence[str]) -> None:
        counted = None
        if any(str(key).endswith("map_per_class") for key in parts):
            # MeanAveragePrecision lists the classes that have boxes, and -1 for what it was not asked for.
            counted = _as_array(parts.get("classes")).reshape(-1).astype(int)
            classes = [classes[n] if 0 <= n < len(classes) else str(n) for n in counted]
        labels = _with_names([str(key) for key in parts], classes)
        for key, part in parts.items():
            named, array = f"{name}/{labels[str(key)]}", _as_array(part)
            if counted is None or not (key == "classes" or str(key).endswith("_per_class")):
                self._show(named, part, classes)
            elif key != "classes" and array.size == len(classes) and not (array < 0).all():
                self._show_array(named, array.reshape(-1), classes, single=len(classes) == 1)

    def _show_array(
        self,
        name: str,
        array: Any,
        classes: Sequence[str],
        curve: bool = False,
        single: bool = False,
    ) -> None:
        if array.size == 1 and not single:
            self.values[name] = float(array.reshape(()))
            return
        if not array.size or array.size > MOST_CELLS:
            shape = " × ".join(f"{size:,}" for size in array.shape)
            reason = f"{shape} values are more than {MOST_CELLS:,}" if array.size else "it is empty"
            self.notes.append(f"{name} is not shown: {reason}")
            return
        square = array.ndim == 2 and array.shape[0] == array.shape[1]
        axes = [
            list(classes)
            if size == len(classes) and (axis == 0 or square)
            else [*map(str, range(size))]
            for axis, size in enumerate(array.shape)
        ]
        if array.ndim == 2 and not square and array.shape[1] == len(classes):
            axes[1] = list(classes)
        by_class = axes == [list(classes)]
        paths = [[label] for label in axes[0]] if square else [*map(list, itertools.product(*axes))]
        cells = array.diagonal() if square else array.reshape(-1)
        if len(cells) <= MOST_SCALARS and (not curve or by_class):
            names = ["/".join(map(_plain, path)) for path in paths]
            if len({*names}) < len(names):
                names = [f"{number}-{text}" for number, text in enumerate(names)]
            self.values |= {
                f"{name}/{n}": float(cell) for n, cell in zip(names, cells, strict=True)
            }
            if array.ndim == 1:
                return  # the report has them from the scalars
        elif not curve:
            self.notes.append(
                f"{name}: {len(cells)} values, more than {MOST_SCALARS}: only in the report"
            )
        rows = (
            [" / ".join(path) for path in itertools.product(*axes[:-1])]
            if array.ndim > 1
            else axes[0]
        )
        table = array.reshape(len(rows), -1)
        columns = axes[-1] if array.ndim > 1 else ["value"]
        values = [[_cell(cell) for cell in row] for row in table]
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
    if isinstance(value, list | tuple) and not all(
        isinstance(part, bool | int | float) for part in value
    ):
        return None
    try:
        array = np.asarray(value)
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


def _alike(one: list[Any], other: list[Any]) -> bool:
    """Whether values agree up to rounding; NaN agrees with NaN, and what is no number with anything."""
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if a is not None and b is not None]
    return len(one) == len(other) and all(
        a.shape == b.shape and np.allclose(a, b, rtol=1e-6, equal_nan=True) for a, b in pairs
    )


def _at_least_float32(values: Any) -> Any:
    low = torch.is_tensor(values) and values.dtype in (torch.bfloat16, torch.float16)
    return values.float() if low else values


def _plain(label: str) -> str:
    """A label as a part of a metric's name, which MLflow takes."""
    return re.sub(r"[^\w.\- :]", "_", label).strip(" .")[:60] or "_"


def _with_names(keys: list[str], classes: Sequence[str]) -> dict[str, str]:
    """Keys as parts of metrics' names, with the names of classes that they number.

    ClasswiseWrapper has `multiclassaccuracy_0`, … for all classes, IntersectionOverUnion `iou/cl_1`.
    """
    found = {key: re.fullmatch(r"(.+?)(/cl)?_(\d+)", key) for key in keys}
    whole = (
        [int(match[3]) for match in found.values() if match]
        == [*range(len(keys))]
        == [*range(len(classes))]
    )
    named = {}
    for key, match in found.items():
        number = int(match[3]) if match and (match[2] or whole) else len(classes)
        parts = [match[1], classes[number]] if match and number < len(classes) else [key]
        named[key] = "/".join(map(_plain, parts))
    return named


def _cell(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else round(float(value), 6)
