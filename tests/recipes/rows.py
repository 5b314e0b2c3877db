"""Recipes that the tests train: regression on rows, and recipes that go wrong in one place each."""

from __future__ import annotations

import os
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data import (
    BadRecord,
    Record,
    RecordTransform,
    Source,
    cut_indices,
    read_parquet,
    read_torch,
)
from stoker.recipe import Recipe


class Regression(Recipe):
    data: str
    columns: tuple[str, ...] = ("x0", "x1", "y")

    def read(self, split: str) -> Any:
        return read_parquet(self.data, split, columns=list(self.columns))

    def model(self) -> Any:
        from torch import nn

        return nn.Linear(2, 1)

    def training_step(self, model: Any, batch: Any) -> Any:
        import torch
        import torch.nn.functional as F

        x = torch.stack([batch["x0"], batch["x1"]], dim=1).float()
        return F.mse_loss(model(x).squeeze(1), batch["y"].float())


class Numbers(Source):
    """Records 0 … n-1; those in `bad` cannot be read. With `shard`, shards hold so many of them."""

    random = False

    def __init__(self, n: int, bad: tuple[int, ...] = (), shard: int = 0) -> None:
        self.n, self.bad, self.shard = n, bad, shard

    def count(self) -> int:
        return self.n

    def shards(self, records: int, order: Any) -> list[Any]:
        return cut_indices(self.n, self.shard or records, order)

    def read(self, shard: Any, order: Any) -> Any:
        for i in shard.items:
            if i in self.bad:
                yield BadRecord(str(i), "made bad")
            else:
                yield {
                    "key": str(i),
                    "x0": float(i % 7),
                    "x1": float(i % 3),
                    "y": float(i % 7 + i % 3),
                }


class Counting(Regression):
    data: str = ""
    train_records: int = 101
    val_records: int = 37
    bad: tuple[int, ...] = ()
    shard: int = 0

    def read(self, split: str) -> Any:
        if split == "val":
            return Numbers(self.val_records)
        return Numbers(self.train_records, self.bad, self.shard)


class Shift(RecordTransform):
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, record: Record, rng: Any) -> Record:
        return {**record, "x0": record["x0"] + self.by}


class Shifted(Counting):
    def preprocess(self, split: str) -> list[Any]:
        return [Shift(float(os.environ["SHIFT"]))]


class RaisesIn(Counting):
    where: str

    def _maybe(self, place: str) -> None:
        if self.where == place:
            raise RuntimeError(f"broken {place}")

    def read(self, split: str) -> Any:
        self._maybe("read")
        return super().read(split)

    def preprocess(self, split: str) -> list[Any]:
        self._maybe("preprocess")
        if self.where == "record":
            return [Fails()]
        if self.where == "batch":
            return [fails]
        if self.where == "loses":
            return [("halve", lambda batch: {k: v[::2] for k, v in batch.items()})]
        return []

    def model(self) -> Any:
        self._maybe("model")
        return super().model()

    def training_step(self, model: Any, batch: Any) -> Any:
        self._maybe("training_step")
        loss = super().training_step(model, batch)
        return loss * float("nan") if self.where == "nan" else loss


class Fails(RecordTransform):
    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        raise ValueError("cannot be used")


def fails(batch: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("no such batch")


class Nothing(Counting):
    empty: bool = False

    def read(self, split: str) -> Any:
        return read_torch([]) if self.empty else None


class NoModel(Recipe):
    def read(self, split: str) -> Any:
        return Numbers(64) if split == "train" else None


class FromRay(Regression):
    data: str = ""
    slow_s: float = 0.0
    """How long the last block takes; below 0: it fails."""

    def read(self, split: str) -> Any:
        import ray

        if split == "val":
            return None
        rows = [{"x0": float(i % 7), "x1": float(i % 3), "y": float(i)} for i in range(103)]
        dataset = ray.data.from_items(rows, override_num_blocks=4)
        return dataset.map_batches(partial(late, self.slow_s)) if self.slow_s else dataset


def late(seconds: float, rows: Any) -> Any:
    if seconds < 0 and 102 in rows["y"]:
        raise ValueError("this row cannot be read")
    time.sleep(seconds if 102 in rows["y"] else 0.0)
    return rows


NOT_A_RECIPE = 3


class DiesOnce(Counting):
    marker: str

    def training_step(self, model: Any, batch: Any) -> Any:
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_rank():
            return super().training_step(model, batch)
        marker = Path(self.marker)
        calls = len(marker.read_text()) if marker.exists() else 0
        if calls <= 9:
            marker.write_text("x" * (calls + 1))
        if calls == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(model, batch)


class LosesItsDisk(DiesOnce):
    """As if Ray started it again on another host: in its second epoch its checkpoints are gone."""

    run_dir: str

    def training_step(self, model: Any, batch: Any) -> Any:
        marker, run_dir = Path(self.marker), Path(self.run_dir)
        if marker.exists() and len(marker.read_text()) == 9:
            deadline = time.monotonic() + 300
            while '"checkpoint"' not in (run_dir / "events.jsonl").read_text():
                assert time.monotonic() < deadline, "no checkpoint of the first epoch"
                time.sleep(0.1)
            (run_dir / "checkpoints").rename(run_dir / "elsewhere")
        return super().training_step(model, batch)


class SlowValidation(Counting):
    run_dir: str
    """Where the driver notes events."""

    def validation_step(self, model: Any, batch: Any) -> Any:
        folder = Path(self.run_dir)
        if len(batch["y"]) > 1:  # the trial before the first step; the job has batches of one
            return super().validation_step(model, batch)
        with (folder / "validating").open("a") as file:
            batches = file.tell()
            file.write(".")
        until = time.monotonic() + 300
        while batches and not self._asked(folder):
            assert time.monotonic() < until, "nobody asked the run to stop"
            time.sleep(0.02)
        return super().validation_step(model, batch)

    @staticmethod
    def _asked(folder: Path) -> bool:
        return '"event": "stop"' in (folder / "events.jsonl").read_text()


class SlowSteps(Counting):
    began: str
    """A file that the first step makes."""
    seconds: float

    def training_step(self, model: Any, batch: Any) -> Any:
        if len(batch["y"]) == 1:
            Path(self.began).touch()
            time.sleep(self.seconds)
        return super().training_step(model, batch)


class LongSteps(Counting):
    """Each rank notes the steps that it begins; those after the third last as long as no stop is noted."""

    run_dir: str

    def training_step(self, model: Any, batch: Any) -> Any:
        if len(batch["y"]) > 1 or not model.training:  # the trial, and validation
            return super().training_step(model, batch)
        rank = os.environ.get("RANK", "0")
        with Path(self.run_dir, f"begun-{rank}").open("a") as file:
            steps = file.tell()
            file.write(".")
        until = time.monotonic() + 300
        while steps >= 3 and not SlowValidation._asked(Path(self.run_dir)):
            assert time.monotonic() < until, "nobody asked the run to stop"
            time.sleep(0.02)
        time.sleep(2.0 if steps >= 3 else 0.0)  # for the request to arrive
        return super().training_step(model, batch)


class SlowFirstRank(Counting):
    seconds: float

    def validation_step(self, model: Any, batch: Any) -> Any:
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_rank() == 0:
            time.sleep(self.seconds)
        return super().validation_step(model, batch)


class Listening(Counting):
    def training_step(self, model: Any, batch: Any) -> Any:
        import psutil
        import torch.distributed as dist

        assert dist.is_initialized()
        listening = [
            c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"
        ]
        everywhere = [each for each in listening if not each.ip.strip("0.:")]
        assert len(everywhere) <= 1, f"besides Ray's own: {everywhere}"
        if dist.get_world_size() == 1:
            assert "MASTER_PORT" not in os.environ
        else:
            address = next(a for a in ("127.0.0.1", "127.0.0.2") if a != os.environ["MASTER_ADDR"])
            try:
                socket.create_connection((address, int(os.environ["MASTER_PORT"])), 5).close()
            except ConnectionRefusedError:
                pass
            else:
                raise AssertionError("the store listens on every address")
        return super().training_step(model, batch)
