"""A recipe, and the same with a `collate` of its own that stacks as batches are stacked without it."""

from __future__ import annotations

from typing import Any

import numpy as np
from rows import Numbers

from stoker.data import Record, RecordTransform
from stoker.recipe import Recipe


class Draw(RecordTransform):
    random = False

    def __init__(self, marks: bool) -> None:
        self.marks = marks

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        number = int(record["key"])
        image = np.arange(number, number + 6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
        marks = (
            {"marks": [np.full((n, 4), number) for n in range(number % 4)]} if self.marks else {}
        )
        return {**record, "image": image, "name": record["key"], **marks}


class Plain(Recipe):
    train_records: int = 101

    def read(self, split: str) -> Any:
        return Numbers(
            self.train_records if split == "train" else 13, (7,) if split == "train" else ()
        )

    def preprocess(self, split: str) -> list[Any]:
        return [Draw(self.collates)]

    def model(self) -> Any:
        from torch import nn

        return nn.Linear(6 * 8 * 3 + 1, 1)

    def training_step(self, model: Any, batch: Any) -> Any:
        import torch
        import torch.nn.functional as F

        assert batch["image"].shape[1:] == (3, 6, 8), "channels first"
        assert batch["name"] == [str(n) for n in self.numbers(batch)]
        pixels = batch["image"].flatten(1).float() / 255
        found = model(torch.cat([pixels, batch["x0"].float()[:, None]], 1))
        return F.mse_loss(found.squeeze(1), batch["y"].float())

    def numbers(self, batch: Any) -> list[int]:
        return [int(name) for name in batch["name"]]


class Collated(Plain):
    fails_at: int = -1

    def collate(self, records: list[Any]) -> Any:
        from torch.utils.data import default_collate

        if any(record["name"] == str(self.fails_at) for record in records):
            raise ValueError("this one does not fit")
        marks = [record.pop("marks") for record in records]
        return {**default_collate(records), "marks": marks}

    def training_step(self, model: Any, batch: Any) -> Any:
        for number, marks in zip(self.numbers(batch), batch["marks"], strict=True):
            assert [each.tolist() for each in marks] == [
                [[number] * 4] * n for n in range(number % 4)
            ]
        return super().training_step(model, batch)


class Padded(Collated):
    pad = {"x0": 0}  # noqa: RUF012 - as recipes declare it


class Wrong(Plain):
    def collate(self, records: list[Any]) -> Any:
        return {"x": [record["nobody"] for record in records]}
