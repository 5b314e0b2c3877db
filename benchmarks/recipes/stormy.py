"""The recipe of `benchmarks.storm`: each step notes its loss and records in a folder that all hosts see."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data import Record, RecordTransform, read_parquet
from stoker.recipe import Recipe

HURRY = "hurry"
"""This file in the trace's folder ends all pauses."""
_notes: list[Path] = []
"""The file of this process; process ids repeat from host to host."""


class Widen(RecordTransform):
    """Chain worker: takes its time, and gives the record a weight that shows any exchange of bytes."""

    random = False

    def __init__(self, trace: str, pause_s: float, ballast: int) -> None:
        self.hurry, self.pause_s, self.ballast = Path(trace, HURRY), pause_s, ballast

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        if not self.hurry.exists():
            time.sleep(self.pause_s)
        return {**record, "ballast": np.full(self.ballast, int(record["id"]) % 251, dtype=np.uint8)}


class Stormy(Recipe):
    """Linear regression on Parquet rows id, x0, x1, y."""

    data: str
    trace: str
    step_pause_s: float
    record_pause_s: float
    ballast: int

    def read(self, split: str) -> Any:
        return read_parquet(self.data, split) if split == "train" else None

    def preprocess(self, split: str) -> list[Any]:
        return [Widen(self.trace, self.record_pause_s, self.ballast)]

    def model(self) -> Any:
        from torch import nn

        return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def export_inputs(self) -> list[str]:
        return ["x0", "x1"]

    def predict(self, model: Any, batch: Any) -> Any:
        import torch

        return model(torch.stack([batch["x0"], batch["x1"]], dim=1).float()).squeeze(1)

    def training_step(self, model: Any, batch: Any) -> Any:
        import torch
        import torch.nn.functional as F

        # As bytes: integers would take 16 MB per step, which the C library keeps in pieces.
        if not bool((batch["ballast"] == (batch["id"] % 251).to(torch.uint8)[:, None]).all()):
            raise RuntimeError(f"records {batch['id'].tolist()}: not the bytes that the chain made")
        loss = F.mse_loss(self.predict(model, batch), batch["y"].float())
        self._note(f"{float(loss.detach()):.17g} {' '.join(str(int(i)) for i in batch['id'])}")
        if not Path(self.trace, HURRY).exists():
            time.sleep(self.step_pause_s)
        return loss

    def _note(self, line: str) -> None:
        if not _notes:
            # This clock is the machine's, whatever happens to a host's date.
            _notes.append(Path(self.trace) / f"start-{time.monotonic_ns():020d}")
        with _notes[0].open("a") as file:
            file.write(line + "\n")
