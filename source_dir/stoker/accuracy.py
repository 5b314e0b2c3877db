"""Train worker: the default metrics of recipes."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


class Accuracy:
    """Train worker: the share of targets that the highest score predicts, over all ranks.

    The same as torchmetrics' `MulticlassAccuracy(average="micro")`, which takes two seconds to import.
    """

    higher_is_better = True

    def __init__(self) -> None:
        self.counts = torch.zeros(3, dtype=torch.int64)
        """Correct targets, all targets (of F1, twice the correct labels, all labels), scores that are NaN."""

    def to(self, device: torch.device) -> Accuracy:
        self.counts = self.counts.to(device)
        return self

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add scores (records, classes, …) or class indices, and class indices (records, …)."""
        scores = preds.ndim == target.ndim + 1
        found = preds.argmax(1) if scores else preds
        refuse_other_shape(found, target, preds)
        if (scores and preds.shape[1] < 2) or not (is_whole(found) and is_whole(target)):
            raise ValueError(
                f"preds of shape {tuple(preds.shape)} and target are no classes; return scores of two or more"
                " classes, or class indices, or define metrics(), for example with BinaryAccuracy"
            )
        if ((target < 0) | (target >= preds.shape[1] if scores else target < 0)).any():
            raise ValueError(
                f"target holds {target.min():g} … {target.max():g}, not only classes; define metrics(), with"
                " ignore_index if some are to be ignored"
            )
        counts = [
            (found == target).sum(),
            self.counts.new_tensor(target.numel()),
            preds.isnan().sum(),
        ]
        self.counts += torch.stack(counts)

    def compute(self) -> float:
        """On every rank; NaN if a score is: `argmax` would take it for the highest."""
        correct, targets, unknown = self.of_all_ranks()
        return math.nan if unknown else float(correct / targets.clamp(min=1))

    def of_all_ranks(self) -> Tensor:
        counts = self.counts.clone()
        if dist.is_initialized():
            dist.all_reduce(counts)
        return counts


class F1(Accuracy):
    """Train worker: the F1 score of labels that scores above 0 predict, over all classes, records and ranks.

    Scores are those before the sigmoid. The same as torchmetrics' `MultilabelF1Score(average="micro")` of them.
    """

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add scores and vectors of 0 and 1, both records × classes."""
        refuse_other_shape(preds, target, preds)
        if not ((target == 0) | (target == 1)).all():
            raise ValueError(
                "target holds other values than 0 and 1; see CheckLabel(…, multi_label=True), or define"
                " metrics()"
            )
        found, wanted = preds > 0, target > 0
        part, whole = 2 * (found & wanted).sum(), found.sum() + wanted.sum()
        self.counts += torch.stack([part, whole, preds.isnan().sum()])


def refuse_other_shape(found: Tensor, target: Tensor, preds: Tensor) -> None:
    if found.shape != target.shape:
        raise ValueError(
            f"preds of shape {tuple(preds.shape)} do not fit target of shape {tuple(target.shape)}"
        )


def is_whole(values: Tensor) -> bool:
    return not values.is_floating_point() or bool((values % 1 == 0).all())
