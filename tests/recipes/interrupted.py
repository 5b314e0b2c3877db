"""A recipe that is interrupted at a given step by itself, so that no test depends on timing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from pydantic import Field
from rows import Counting, Numbers


class Rows(Numbers):
    def read(self, shard: Any, order: Any) -> Any:
        for record in super().read(shard, order):
            yield {**record, "row": float(record["key"])} if isinstance(record, dict) else record


class Interrupted(Counting):
    """Regression with dropout. Every start notes the rows of each step; some starts end with a signal."""

    trace: Path
    """Folder for the notes, one file per start and rank."""
    ends: tuple[str, ...] = ()
    """How the first, second, … start ends, after how many of its own steps: `worker@17`, `term@5`, …"""
    process: str = ""
    """File that holds the number of the job's process, for kill and, for its parent, the launcher, term."""
    pause_s: float = 0.02
    width: int = 16
    environment: dict[str, str] = Field(default_factory=dict)
    """Set in every process that makes the recipe."""

    def model_post_init(self, context: Any) -> None:
        os.environ.update(self.environment)

    def read(self, split: str) -> Any:
        return Rows(self.train_records, self.bad) if split == "train" else Rows(self.val_records)

    def model(self) -> Any:
        from torch import nn

        return nn.Sequential(
            nn.Linear(2, self.width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(self.width, 1)
        )

    def export_inputs(self) -> list[str]:
        return ["x0", "x1"]

    def predict(self, model: Any, batch: Any) -> Any:
        import torch

        return model(torch.stack([batch["x0"], batch["x1"]], dim=1).float())

    def training_step(self, model: Any, batch: Any) -> Any:
        loss = super().training_step(model, batch)
        if model.training:
            self._note(batch, loss)
        return loss

    def _note(self, batch: Any, loss: Any) -> None:
        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_initialized() else 0
        notes = _notes_of_this_process(self.trace, rank)
        rows = " ".join(str(int(row)) for row in batch["row"])
        with notes.open("a") as file:
            file.write(f"{float(loss):.17g} {rows}\n")
        start = int(notes.name.split("-")[1])
        done = len(notes.read_text().splitlines())
        time.sleep(self.pause_s)
        if rank == 0 and start < len(self.ends):
            how, _, step = self.ends[start].partition("@")
            if done == int(step):
                _wait_for_a_checkpoint(Path(self.process).parent)
                lost = sum(end.startswith("worker") for end in self.ends[:start])
                _wait_for_the_log(Path(self.process).parent, start, lost)
                _end(how, self.process)


def _notes_of_this_process(folder: Path, rank: int) -> Path:
    """`rank0-2-4711.txt`: rank, number of the start, process."""
    found = list(folder.glob(f"rank{rank}-*-{os.getpid()}.txt"))
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    start = len(list(folder.glob(f"rank{rank}-*")))
    return folder / f"rank{rank}-{start}-{os.getpid()}.txt"


def _wait_for_a_checkpoint(run_dir: Path) -> None:
    """Else there may be nothing to resume from, on a machine where the writer is slow."""
    deadline = time.monotonic() + 300
    while (
        not list(run_dir.glob("checkpoints/step-*/manifest.json")) and time.monotonic() < deadline
    ):
        time.sleep(0.05)


def _wait_for_the_log(run_dir: Path, starts: int, lost: int) -> None:
    """Else nobody may know that this start went on where an earlier one ended."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        log = (run_dir / "events.jsonl").read_text()
        if log.count('"event": "resumed"') >= starts and log.count('"event": "recovered"') >= lost:
            return
        time.sleep(0.05)


def _end(how: str, process: str) -> None:
    if how == "worker":
        os.kill(os.getpid(), signal.SIGKILL)
    import psutil

    job = psutil.Process(int(Path(process).read_text().split()[0]))
    if how == "term":
        job.parent().terminate()
    else:
        everything = [job, *job.children(recursive=True)]
        for other in everything:
            if other.pid != os.getpid():
                other.kill()
        os.kill(os.getpid(), signal.SIGKILL)
