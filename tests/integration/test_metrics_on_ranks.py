"""Train workers together tell metrics of the whole validation, and how long the slowest of them waited."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.events.kinds import PassEnded
from stoker.recipe import Recipe
from stoker.train.device import StepTimes
from stoker.train.evaluation import Evaluation
from stoker.train.loop import log_pass
from stoker.train.state import Worker


class Share:
    """The share of records that are right, of this process alone."""

    def __init__(self) -> None:
        self.counts = torch.zeros(2)

    def to(self, device: Any) -> Share:
        return self

    def update(self, preds: Any, target: Any) -> None:
        self.counts += torch.tensor([(preds.argmax(1) == target).sum(), len(target)])

    def compute(self) -> Any:
        return self.counts[0] / self.counts[1]


class AddedUp(Share):
    def compute(self) -> Any:
        torch.distributed.all_reduce(self.counts)
        return super().compute()


class Holder(Share):
    """Holds a metric of torchmetrics and is none."""

    def __init__(self) -> None:
        from torchmetrics.classification import MulticlassConfusionMatrix

        self.inner = MulticlassConfusionMatrix(2, normalize="true")

    def update(self, preds: Any, target: Any) -> None:
        self.inner.update(preds, target)

    def compute(self) -> Any:
        return {"table": self.inner.compute(), "none": torch.tensor([float("nan")]), "text": "good"}


def derived(state: bool) -> Any:
    from torchmetrics import Metric

    class Derived(Metric):
        counts: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            if state:
                self.add_state("counts", torch.zeros(2), dist_reduce_fx="sum")
            else:
                self.counts = torch.zeros(2)

        update = Share.update  # type: ignore[assignment]
        compute = Share.compute  # type: ignore[assignment]

    return Derived()


def unsynced() -> Any:
    from torchmetrics.classification import MulticlassAccuracy

    return MulticlassAccuracy(2, average="micro", sync_on_compute=False)


METRICS = {
    "unsynced": unsynced,
    "share": Share,
    "added up": AddedUp,
    "holder": Holder,
    "derived": partial(derived, True),
    "without state": partial(derived, False),
}


class Measured(Recipe):
    kind: str = ""

    def metrics(self) -> dict[str, Any]:
        return {"acc1": super().metrics()["acc1"], "own": METRICS[self.kind]()}

    def training_step(self, model: Any, batch: Any) -> Any:
        return {"preds": model(batch["x"]), "target": batch["y"]}


def cases(rank: int, folder: str) -> dict[Any, Any]:
    """Of six records, those of rank 0 are right and those of rank 1 wrong; or only rank 0 has any."""
    del folder
    found: dict[Any, Any] = {}
    for kind in METRICS:
        for rows in ((4, 2), (4, 0)):
            worker = Worker(Config(), Measured(kind=kind), None, 0, rank, 2, torch.device("cpu"))
            worker.model, worker.modules = nn.Identity(), {"val": lambda batch: batch}
            evaluation = Evaluation(worker, 0)
            x = torch.eye(2)[torch.full((rows[rank],), rank)]
            with evaluation.quietly():
                evaluation.take({"x": x, "y": torch.zeros(rows[rank], dtype=torch.long)})
            try:
                found[kind, rows] = evaluation.result()
            except UsageError as error:
                found[kind, rows] = str(error)
            found[kind, rows, "notes"] = evaluation.scores.notes
    told: list[PassEnded] = []
    worker.coordinator = SimpleNamespace(
        log=SimpleNamespace(remote=lambda event, after: told.append(event))
    )
    times = StepTimes()
    times.add([0.0, 0.25 * rank, 0.0, 0.0, 0.25 * (1 - rank)])
    feed: Any = SimpleNamespace(split="train", epoch=0, times=times)
    found["waits"] = (log_pass(worker, feed, 8, 0.25, 1), [event.times for event in told])
    return found


def test_the_input_wait_is_that_of_the_train_worker_for_which_the_others_wait(
    ranks: list[dict[Any, Any]],
) -> None:
    (first, told), (second, silent) = (found["waits"] for found in ranks)
    assert first == second == 0.25 and silent == []
    assert (told[0]["wait_s"], told[0]["wait_transfer_s"], told[0]["compute_s"]) == (
        0.25,
        0.25,
        0.0,
    )


def test_a_metric_of_a_part_of_the_validation_is_refused_on_every_rank(
    ranks: list[dict[Any, Any]],
) -> None:
    refused = "recipe: Measured.metrics: own differs between train workers, so it is of a part"
    for found in ranks:
        for kind in ("share", "without state"):
            assert found[kind, (4, 2)].startswith(refused)
            assert found[kind, (4, 0)]["val/own"] == 1.0, "the one rank with records has all"


def test_a_metric_that_does_not_combine_its_state_is_named(ranks: list[dict[Any, Any]]) -> None:
    for found in ranks:
        for kind, differs in (("unsynced", True), ("added up", False), ("derived", False)):
            notes = [
                text
                for text in found[kind, (4, 2), "notes"]
                if "differs between train workers" in text
            ]
            assert bool(notes) == differs, (kind, notes)


@pytest.mark.parametrize(("rows", "right"), [((4, 2), 4 / 6), ((4, 0), 1.0)])
def test_a_metric_that_combines_the_ranks_is_of_all_records(
    ranks: list[dict[Any, Any]], rows: tuple[int, int], right: float
) -> None:
    for found in ranks:
        for kind in ("added up", "derived"):
            assert found[kind, rows]["val/own"] == pytest.approx(right)
        assert found["added up", rows]["val/acc1"] == pytest.approx(right)
        assert found["holder", rows]["val/own/table/0"] == pytest.approx(right)
