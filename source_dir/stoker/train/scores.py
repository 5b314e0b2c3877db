"""Train worker: the metrics of a validation: updated, computed, and shown as scalars and tables.

A number is a scalar. A vector has a scalar for each class, a square matrix has its diagonal, and a dict has
those of its parts: `val/iou/cat`, `val/map/map_50`. Tables go to the report, with all values.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.errors import UsageError, where_raised
from stoker.figures import count_of
from stoker.recipe import Recipe
from stoker.train.state import Worker, at_least_float32

MOST_SCALARS = 100
"""Of one metric: each is a curve. A larger one has a table only."""
MOST_CELLS = 10_000


class Scores:
    """Train worker: a recipe's metrics in one validation.

    Raises:
        UsageError: `metrics()`, or a metric, fails; names it.
    """

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
            raise UsageError(f"recipe: {type(worker.recipe).__name__}.metrics: {_why(error)}") from error
        self.fed = False
        """Whether this rank has updated them."""
        self.values: dict[str, float] = {}
        self.tables: list[dict[str, Any]] = []
        """Events for the report: `name`, `rows`, `columns`, `values`."""
        self.notes: list[str] = []
        """What is not shown, and why."""
        self.later: set[str] = set()
        """Metrics that need more than the first records."""

    def update(self, result: Mapping[str, Any]) -> None:
        """Add the `preds` and `target` that a validation step has returned, if any."""
        from torch.utils._pytree import tree_map

        if "preds" in result and "target" in result:
            self.fed = True
            preds = tree_map(at_least_float32, result["preds"])
            for name, metric in self.metrics.items():
                try:
                    metric.update(preds, result["target"])
                except Exception as error:
                    raise self._failed(name, error) from error

    @property
    def found(self) -> Any:
        """What `take` replaces."""
        return self.values, self.tables, self.notes

    def take(self, found: Any) -> None:
        """Replace what this rank has computed by what another has."""
        self.values, self.tables, self.notes = found

    def compute(self, few: bool = False, group: Any = None) -> None:
        """Fill `values`, `tables` and `notes`. Collective, on all ranks or none.

        Args:
            few: these are the first records only; what they are too few for is noted.
            group: of the ranks that have updated their metrics; None: all have.
        """
        for name, metric in self.metrics.items():
            parts: list[Any] = [] if group is None else [*getattr(metric, "modules", list)()]
            if parts := [part for part in parts if hasattr(part, "process_group")]:
                if not self.fed:
                    continue
                for part in parts:
                    part.process_group = group
            try:
                found = metric.compute()
            except Exception as error:
                if not few or not isinstance(error, ValueError | RuntimeError):
                    raise self._failed(name, error) from error
                text = (
                    f"cannot be computed from the first records ({_why(error)}); if it cannot from all, the"
                )
                self.notes.append(f"metric {name}: {text} validation of the first epoch fails")
                self.later.add(f"val/{name}")
            else:
                self._show(f"val/{name}", found, self.classes)

    def _failed(self, name: str, error: Exception) -> UsageError:
        kind = type(self.metrics[name]).__name__
        return UsageError(f"recipe: {type(self.recipe).__name__}.metrics: {name} ({kind}): {_why(error)}")

    def _show(self, name: str, value: Any, classes: Sequence[str], curve: bool = False) -> None:
        """Show a part of a metric.

        Args:
            name: of the part.
            value: as computed.
            classes: names of the classes that it may count.
            curve: it is one of several arrays, such as a curve's, so that only classes have scalars.
        """
        if (
            isinstance(value, Mapping | list | tuple)
            and len(value) > MOST_SCALARS
            and _as_array(value) is None
        ):
            # Such as the IoU of each image, by (image, class).
            self.notes.append(f"{name} is not shown: {len(value):,} parts are more than {MOST_SCALARS}")
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
        self, name: str, array: Any, classes: Sequence[str], curve: bool = False, single: bool = False
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
            list(classes) if size == len(classes) and (axis == 0 or square) else [*map(str, range(size))]
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
            self.values |= {f"{name}/{n}": float(cell) for n, cell in zip(names, cells, strict=True)}
            if array.ndim == 1:
                return  # the report has them from the scalars
        elif not curve:
            self.notes.append(f"{name}: {len(cells)} values, more than {MOST_SCALARS}: only in the report")
        rows = [" / ".join(path) for path in itertools.product(*axes[:-1])] if array.ndim > 1 else axes[0]
        table = array.reshape(len(rows), -1)
        self.tables.append(
            {
                "name": name,
                "rows": rows,
                "columns": axes[-1] if array.ndim > 1 else ["value"],
                "values": [[_cell(cell) for cell in row] for row in table],
            }
        )

    def note_unfed(self) -> None:
        """Note metrics of the recipe to which its validation step gives nothing."""
        if self.own and not self.fed and self.metrics:
            these = count_of(len(self.metrics), "metric")
            text = f"{these} ({', '.join(self.metrics)}) not computed: validation_step returns no"
            self.notes.append(f"{text} preds and target")


def _why(error: Exception) -> str:
    # Frames of torchmetrics count as not the user's, which leaves this file.
    return re.sub(r" \(scores\.py:\d+\)$", "", " ".join(where_raised(error).split()))[:300]


def _as_array(value: Any) -> Any:
    """Numbers as a float64 array; None: they are none."""
    import numpy as np
    import torch

    if torch.is_tensor(value):
        if value.is_complex():
            return None
        return value.detach().to_dense().double().cpu().numpy()
    if isinstance(value, list | tuple) and not all(isinstance(part, bool | int | float) for part in value):
        return None
    try:
        array = np.asarray(value)
        return array.astype(np.float64) if array.dtype.kind in "biuf" else None
    except (TypeError, ValueError):
        return None


def _plain(label: str) -> str:
    """A label as a part of a metric's name, which MLflow takes."""
    return re.sub(r"[^\w.\- :]", "_", label).strip(" .")[:60] or "_"


def _with_names(keys: list[str], classes: Sequence[str]) -> dict[str, str]:
    """Keys as parts of metrics' names, with the names of classes that they number.

    ClasswiseWrapper has `multiclassaccuracy_0`, … for all classes, IntersectionOverUnion `iou/cl_1`.
    """
    found = {key: re.fullmatch(r"(.+?)(/cl)?_(\d+)", key) for key in keys}
    whole = (
        [int(match[3]) for match in found.values() if match] == [*range(len(keys))] == [*range(len(classes))]
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
