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
        """Correct targets, all targets, scores that are NaN."""

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

    The same as torchmetrics' `MultilabelF1Score(average="micro")`. The scores of a validation are taken for
    probabilities, of which those above 0.5 predict, if all are within 0 … 1 (± 0.001) and at least one in 20
    is below 0.05 or above 0.95.
    """

    meanings = (
        "f1 takes preds for scores before the sigmoid: those above 0 predict; return such scores or define"
        " metrics() if they are probabilities",
        "f1 takes preds for probabilities, since all are within 0 … 1: those above 0.5 predict",
    )

    def __init__(self) -> None:
        self.counts = torch.zeros(8, dtype=torch.int64)
        """Twice the correct labels, all labels; both at 0.5, not 0; scores: all, outside, at an end, NaN."""
        self.within, self.meaning = False, 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add scores and vectors of 0 and 1, both records × classes."""
        refuse_other_shape(preds, target, preds)
        if not ((target == 0) | (target == 1)).all():
            raise ValueError(
                "target holds other values than 0 and 1; see CheckLabel(…, multi_label=True), or define"
                " metrics()"
            )
        wanted, counts = target > 0.5, [self.counts.new_tensor(preds.numel())]
        counts += [
            ((preds < -1e-3) | (preds > 1.001)).sum(),
            ((preds < 0.05) | (preds > 0.95)).sum(),
        ]
        counts.append(preds.isnan().sum())
        for found in (preds > 0.5, preds > 0):
            counts = [2 * (found & wanted).sum(), found.sum() + wanted.sum(), *counts]
        self.counts += torch.stack(counts)

    def compute(self) -> float:
        counts = self.of_all_ranks()
        scores, outside, at_end, unknown = counts[4:].tolist()
        self.within = not outside
        self.meaning = int(self.within and 20 * at_end >= scores)
        part, whole = counts[2 * self.meaning :][:2]
        return math.nan if unknown else float(part / whole.clamp(min=1))

    def news(self, told: set[str]) -> list[str]:
        """What the scores are taken for, if that is uncertain or has changed since it was `told`."""
        now, other = self.meanings[self.meaning], self.meanings[1 - self.meaning]
        changed = other in told
        told.discard(other)  # to be told again when it returns
        return [now] * (self.within or changed)


def refuse_other_shape(found: Tensor, target: Tensor, preds: Tensor) -> None:
    if found.shape != target.shape:
        raise ValueError(
            f"preds of shape {tuple(preds.shape)} do not fit target of shape {tuple(target.shape)}"
        )


def is_whole(values: Tensor) -> bool:
    return not values.is_floating_point() or bool((values % 1 == 0).all())
