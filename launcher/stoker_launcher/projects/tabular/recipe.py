"""Tabular data: columns from Parquet, a derived column on the CPU hosts, a small network on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from stoker.data import Record, RecordTransform, read_parquet
from stoker.recipe import Batch, Recipe, Split

if TYPE_CHECKING:
    from torch import Tensor, nn

FOLDER = Path(".data/homes")


def write(folder: Path = FOLDER, records: int = 6000) -> None:
    """Laptop: write train.parquet and then val.parquet, unless val.parquet exists."""
    import pyarrow as pa
    from pyarrow import parquet

    if (folder / "val.parquet").exists():
        return
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", records), ("val", records // 4)):
        rooms = rng.integers(1, 7, count)
        size = rooms * rng.uniform(15, 35, count)
        price = 3 * size + 40 * rooms + rng.normal(0, 20, count)
        table = pa.table({"size": size, "rooms": rooms, "price": price})
        parquet.write_table(table, folder / f"{split}.parquet", row_group_size=1000)


class Features(RecordTransform):
    """Chain worker: the columns of a row → one array of numbers near 1, and the target."""

    random = False

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        size, rooms = record["size"], record["rooms"]
        if size <= 0 or rooms < 1:
            raise ValueError(
                f"no home has {rooms} rooms on {size} m²"
            )  # which quarantines the record
        features = np.array([size / 100, rooms / 5, size / rooms / 20], np.float32)
        return {
            "key": record["key"],
            "features": features,
            "price": np.float32(record["price"] / 1000),
        }


class Table(Recipe):
    """Every host: size and rooms → price. Fields are the job's `params`."""

    data: str
    hidden: int = Field(32, ge=1, description="width of the hidden layer")

    def read(self, split: Split) -> Any:
        return read_parquet(self.data, split, columns=["size", "rooms", "price"])

    def preprocess(self, split: Split) -> list[Any]:
        return [Features()]

    def model(self) -> nn.Module:
        from torch import nn

        return nn.Sequential(nn.Linear(3, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 1))

    def training_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        import torch.nn.functional as F

        preds = model(batch["features"]).squeeze(1)
        return {"loss": F.mse_loss(preds, batch["price"]), "preds": preds, "target": batch["price"]}

    def metrics(self) -> dict[str, Any]:
        from torchmetrics.regression import MeanAbsoluteError

        return {"mae": MeanAbsoluteError()}
