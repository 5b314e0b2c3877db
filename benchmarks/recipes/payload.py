"""A training job whose batches cost only network transfer. Self-contained, because emulated hosts see only
the staged files."""

from __future__ import annotations

from typing import Any, Literal

from stoker.data import read_range
from stoker.recipe import Recipe

SIDE = 224


class Constant:
    """Chain worker: the same image for every record, as uint8 or as float32 normalised on the CPU."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        shape = (SIDE, SIDE, 3) if self.dtype == "uint8" else (3, SIDE, SIDE)
        return {**columns, "image": np.full((len(columns["index"]), *shape), 7, self.dtype)}


class Payload(Recipe):
    """Constant 224² images."""

    dtype: Literal["uint8", "float32"]
    records: int

    def read(self, split: str) -> Any:
        return read_range(self.records) if split == "train" else None

    def preprocess(self, split: str) -> list[Any]:
        return [("constant", Constant(self.dtype))]

    def model(self) -> Any:
        import torch

        return torch.nn.Linear(1, 1)

    def training_step(self, model: Any, batch: Any) -> Any:
        import torch

        image = batch["image"]
        assert tuple(image.shape[1:]) == (3, SIDE, SIDE), image.shape
        assert str(image.dtype) == f"torch.{self.dtype}", image.dtype
        assert float(image[0, 0, 0, 0]) == 7, "the image is another one"
        return model(torch.ones(1, 1)).sum()
