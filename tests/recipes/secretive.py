"""A recipe that needs secrets, and that tells them wherever user code can."""

from __future__ import annotations

from typing import Any

import numpy as np
from rows import Counting, Regression

from stoker.data import Record, RecordTransform


class Connects(Counting):
    """Refuses to train without the right values, prints them, and fails for one record with them."""

    hf_token: str
    database: dict[str, str]

    def preprocess(self, split: str) -> list[Any]:
        return [FailsOnce(self.hf_token)]

    def model(self) -> Any:
        print(f"connecting with {self.hf_token} as {self.database}")
        return super().model()

    def training_step(self, model: Any, batch: Any) -> Any:
        if (self.hf_token, self.database["password"]) != ("tok-4f9a1c77", "Corr3ct horse"):
            raise PermissionError("wrong secrets")
        return Regression.training_step(self, model, batch)


class FailsOnce(RecordTransform):
    def __init__(self, token: str) -> None:
        self.token = token

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        if record["key"] == "5":
            raise ValueError(f"401 for https://host/x?token={self.token}")
        return record
