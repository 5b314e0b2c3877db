"""A recipe that needs secrets, and that tells them wherever user code can."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from rows import Counting, Regression

from stoker.data import Record, RecordTransform
from stoker.events.sinks import Sink


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


class Tells(Connects):
    """Fails in training with whatever secrets its process holds, as libraries quote them."""

    def model(self) -> Any:
        self._steps = 0
        return super().model()

    def training_step(self, model: Any, batch: Any) -> Any:
        self._steps += 1
        if self._steps > 4:
            told = [os.environ[name] for name in os.environ["TOLD"].split()]
            raise PermissionError(
                f"401: {self.hf_token} {self.database['password']} {' '.join(told)}"
            )
        return Regression.training_step(self, model, batch)


class Notebook(Sink):
    def __init__(self, run_dir: Path, config: Any) -> None:
        self.file = run_dir / "notebook.txt"

    def take(self, event: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(f"{event}\n")

    def close(self, summary: Any) -> None:
        self.take(summary.model_dump())
