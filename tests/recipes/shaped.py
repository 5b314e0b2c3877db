"""Recipes whose metrics are no single numbers."""

from __future__ import annotations

from typing import Any

from rows import Counting


class Strange:
    def __init__(self, value: Any) -> None:
        self.value = value

    def to(self, device: Any) -> Strange:
        return self

    def update(self, preds: Any, target: Any) -> None:
        if self.value == "update":
            raise ValueError("wrong shape")

    def compute(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Shaped(Counting):
    """Three classes; what is predicted depends on the record alone: class x1 % 3, predicted as x0 % 3."""

    kinds: tuple[str, ...] = ()
    loss: str = "always"
    preds: bool | str = True

    @property
    def class_names(self) -> list[str]:  # type: ignore[override]
        return ["cat", "dog", "sea/horse"]

    def validation_step(self, model: Any, batch: Any) -> Any:
        import torch.nn.functional as F

        loss = self.training_step(model, batch)
        found: dict[str, Any] = {}
        some = float(batch["x0"][0]) > 0.5
        if self.loss == "always" or (self.loss == "sometimes" and some):
            found["loss"] = loss
        if self.preds is True or (self.preds == "sometimes" and some):
            found["preds"] = F.one_hot((batch["x0"] % 3).long(), 3).float()
            found["target"] = batch["x1"].long()
        return found

    def metrics(self) -> dict[str, Any]:
        return {name: make(name) for name in self.kinds}


def make(name: str) -> Any:
    import torch
    from torchmetrics import MetricCollection
    from torchmetrics import classification as many
    from torchmetrics.wrappers import ClasswiseWrapper

    if name == "accuracy":
        return many.MulticlassAccuracy(3, average=None)
    if name == "confusion":
        return many.MulticlassConfusionMatrix(3)
    if name == "numbered":
        return ClasswiseWrapper(many.MulticlassAccuracy(3, average=None))
    if name == "collection":
        one, other = (
            many.MulticlassAccuracy(3, average="micro"),
            many.MulticlassRecall(3, average=None),
        )
        return MetricCollection({"acc": one, "recall": other})
    if name == "auroc":  # keeps lists of predictions
        return many.MulticlassAUROC(3, average=None)
    if name == "missing":
        raise ModuleNotFoundError("No module named 'pycocotools'")
    strange = {
        "text": "good",
        "nothing": None,
        "empty": torch.zeros(0),
        "complex": torch.zeros(2, dtype=torch.complex64),
        "huge": torch.zeros(200, 200),
        "long": torch.arange(150.0),
        "flag": torch.tensor(True),
        "one": torch.tensor([[0.25]]),
        "few": RuntimeError("needs 1,000 records"),
        "broken": TypeError("unhashable"),
        "update": "update",
        "half": torch.tensor([0.5, 0.25, 0.125], dtype=torch.bfloat16),
        "labels": torch.arange(12.0).reshape(3, 2, 2),
        "boxes": {"iou": 0.5, "iou/cl_1": 0.25, "iou/cl_7": 0.125, "iou_50": 1.0},
        "pairs": {(image, 0): torch.tensor(0.5) for image in range(101)},
        "holes": torch.tensor([0.5, float("nan"), float("inf")]),
        "rates": torch.arange(6.0).reshape(3, 2),
        "found": {
            "map": 0.5,
            "map_per_class": torch.tensor([0.75, 0.25]),
            "classes": torch.tensor([0, 2]),
            "mar_100_per_class": torch.tensor(-1.0),
        },
        "series": (torch.arange(3.0),),
        "same": {"a/b": 1.0, "a_b": 2.0},
    }
    return Strange(strange[name])
