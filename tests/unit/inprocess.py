"""Runs the real training loop, its checkpoints and its model in this process.

What stands in for other processes: the coordinator (`Head`), which gives places and takes events, and the
feed (`Batches`), which gives ready tensors.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rows import Counting

from stoker.checkpoints import format as checkpoint
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.events.kinds import Note
from stoker.recipe import class_names_of
from stoker.storage.checkpoint_store import open_store
from stoker.train import loop
from stoker.train.build import build
from stoker.train.device import StepTimes
from stoker.train.manager import CheckpointManager, nothing_left
from stoker.train.state import Worker
from stoker.train.stopping import with_modes

Tensors = dict[str, Any]


class Head:
    """The coordinator's handle: calls answer at once."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.log = SimpleNamespace(
            remote=lambda event, after=None: self.events.append(
                {"event": event.event, **event.values()}
            )
        )
        self.position = SimpleNamespace(remote=self._position)
        self.saved = SimpleNamespace(remote=lambda epoch, position: None)

    def _position(self, attempt: int, epoch: int, steps: int, ids: int) -> dict[str, Any]:
        return {"epoch": epoch, "steps": steps}

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


@dataclass
class Batches:
    split: str
    epoch: int
    batches: list[Tensors]
    stop_after: int | None = None
    rows: int = 0
    padded: int = 0
    id_sum: int = 0
    rank: int = 0
    stop: str = ""
    checkpoint: bool = False
    keep_keys: bool = False
    keys: list[str] = field(default_factory=list)
    times: StepTimes = field(default_factory=StepTimes)

    def __iter__(self) -> Iterator[Tensors]:
        for number, batch in enumerate(self.batches, start=1):
            self.rows += len(batch["y"])
            self.stop = "SIGTERM" if number == self.stop_after else ""
            yield dict(batch)
            if self.stop:
                return


Data = Callable[[str, int], Batches]


@dataclass
class Run:
    worker: Worker
    keeper: CheckpointManager
    head: Head
    asked: bool = False
    error: BaseException | None = None

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Of each epoch, without the clock's."""
        told = [event["metrics"] for event in self.head.of("epoch")]
        return [{k: v for k, v in m.items() if not k.startswith("perf/")} for m in told]


def start(
    folder: Path,
    data: Data,
    recipe: Any = None,
    has_val: bool = True,
    resume: Path | None = None,
    **sections: Any,
) -> Run:
    """Train from the newest checkpoint in `folder`, or in `resume`, or from nothing, to the end or an error.

    Only for use with the fixture `no_cluster`.
    """
    recipe = recipe or Counting()
    config = Config.model_validate(sections)
    with contextlib.suppress(UsageError):  # of a metric, which training reports
        config = with_modes(config, recipe)
    head = Head()
    worker = Worker(config, recipe, head, 0, 0, 1, torch.device("cpu"))
    worker.classes = class_names_of(worker.recipe, None)
    keeper = CheckpointManager(worker, open_store(str(folder)))
    run = Run(worker, keeper, head)
    found = checkpoint.newest_valid(keeper.store, lambda text: head.log.remote(Note(text=text)))
    if found is None and resume is not None:
        found = checkpoint.newest_valid(open_store(str(resume)))
    if found is not None:
        found = checkpoint.awaiting(found, config.train.max_steps)
    build(worker, sum(len(batch["y"]) for batch in data("train", 0).batches), found)
    carried = keeper.restore(found) if found else None
    first = found.meta["next_epoch"] if found else 0

    def open_pass(_: Worker, split: str, epoch: int) -> Batches:
        feed = data(split, epoch)
        if carried is not None and split == "train" and epoch == carried.epoch:
            feed.batches = feed.batches[carried.carried_steps * config.train.accumulate_steps :]
        return feed

    def reconcile(_: Worker, feed: Batches) -> dict[str, Any]:
        records = sum(len(batch["y"]) for batch in data(feed.split, feed.epoch).batches)
        used = {"train": "trained", "val": "validated"}[feed.split]
        whole = feed.rows == sum(len(batch["y"]) for batch in feed.batches)
        return {
            "split": feed.split,
            "epoch": feed.epoch,
            "read": records,
            used: records,
            "remainder": 0,
            "whole": whole,
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "open_pass", open_pass)
        patch.setattr(loop, "reconcile", reconcile)
        try:
            run.asked = loop.run_epochs(worker, keeper, first, carried, has_val)
            keeper.write_model(folder / "model")
        except Exception as error:
            run.error = error
        finally:
            keeper.close()
    return run


def left(run: Run) -> str:
    return nothing_left(run.worker, run.keeper, run.worker.config.train.epochs)


def batches(rows: list[int], seed: int = 0) -> list[Tensors]:
    source = torch.Generator().manual_seed(seed)
    made = []
    for count in rows:
        x0, x1 = torch.rand(count, generator=source), torch.rand(count, generator=source)
        made.append({"x0": x0, "x1": x1, "y": 3 * x0 - x1})
    return made


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray, where the loop calls it: answers are there already, and nobody takes reports."""
    train = ModuleType("ray.train")
    train.report = lambda metrics: None  # type: ignore[attr-defined]
    ray = ModuleType("ray")
    ray.get = lambda answer, timeout=None: answer  # type: ignore[attr-defined]
    ray.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    monkeypatch.setattr("stoker.train.manager.ray", ray)


@pytest.fixture(autouse=True)
def no_ray_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is imported: Ray Data that an earlier test imported is not taken for the recipe's."""
    monkeypatch.delitem(sys.modules, "ray.data", raising=False)
