"""Train worker: the default metrics of recipes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Accuracy:
    """Train worker: the share of targets that the highest score predicts, over all ranks.

    The same as torchmetrics' `MulticlassAccuracy(average="micro")`, which takes two seconds to import.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64)
        """Correct targets, all targets."""

    def to(self, device: torch.device) -> Accuracy:
        self.counts = self.counts.to(device)
        return self

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add scores (records, classes, …) or class indices, and class indices (records, …)."""
        found = preds.argmax(1) if preds.ndim == target.ndim + 1 else preds
        if found.shape != target.shape:
            raise ValueError(
                f"preds of shape {tuple(preds.shape)} do not fit target of shape {tuple(target.shape)}"
            )
        self.counts += torch.stack([(found == target).sum(), self.counts.new_tensor(target.numel())])

    def compute(self) -> float:
        """On every rank."""
        counts = self.counts.clone()
        if dist.is_initialized():
            dist.all_reduce(counts)
        return float(counts[0] / counts[1].clamp(min=1))


class F1(Accuracy):
    """Train worker: the F1 score of labels that scores above 0 predict, over all classes, records and ranks.

    The same as torchmetrics' `MultilabelF1Score(average="micro")`.
    """

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add scores and vectors of 0 and 1, both records × classes."""
        if not ((target >= 0) & (target <= 1)).all():
            raise ValueError("target holds other values than 0 and 1; see CheckLabel(…, multi_label=True)")
        found, wanted = preds > 0, target > 0.5
        both = 2 * (found & wanted).sum()
        self.counts += torch.stack([both, found.sum() + wanted.sum()])
