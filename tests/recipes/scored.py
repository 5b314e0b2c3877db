"""A recipe whose validation gives the figures that a test wants, epoch by epoch."""

from __future__ import annotations

from typing import Any, ClassVar

from rows import Counting


class Given:
    """A metric as torchmetrics has them; the predictions are the number of the epoch."""

    def __init__(self, values: list[float]) -> None:
        self.values, self.epoch = values, 0

    def to(self, device: Any) -> Given:
        return self

    def update(self, preds: Any, target: Any) -> None:
        self.epoch = int(preds[0])

    def reset(self) -> None:
        pass

    def compute(self) -> Any:
        import torch

        return torch.tensor(self.values[self.epoch])


class Scored(Counting):
    scores: dict[str, list[float]]
    """Metric → its value in each epoch."""
    losses: list[float]
    """`val/loss` in each epoch."""
    steps: int
    """Of an epoch."""
    class_names: ClassVar[tuple[str, ...]] = ("cat", "dog")

    def model(self) -> Any:
        import torch

        model = super().model()
        torch.nn.init.zeros_(model.bias)
        return model

    def training_step(self, model: Any, batch: Any) -> Any:
        import torch

        return -model(torch.zeros(1, 2)).sum()

    def optimizer(self, model: Any) -> Any:
        import torch

        return torch.optim.SGD(model.parameters(), lr=1.0)

    def metrics(self) -> dict[str, Any]:
        return {name: Given(values) for name, values in self.scores.items()}

    def validation_step(self, model: Any, batch: Any) -> Any:
        epoch = max(round(float(model.bias[0])) // self.steps - 1, 0)
        preds = (batch["x0"] * 0 + epoch).detach()
        return {"loss": preds.mean() * 0 + self.losses[epoch], "preds": preds, "target": preds}
