"""Train workers together tell metrics of the whole validation, and how long the slowest of them waited."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stoker.config.schema import Config
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


def derived() -> Any:
    from torchmetrics import Metric

    class Derived(Metric):
        counts: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.add_state("counts", torch.zeros(2), dist_reduce_fx="sum")

        update = Share.update  # type: ignore[assignment]
        compute = Share.compute  # type: ignore[assignment]

    return Derived()


METRICS = {"share": Share, "added up": AddedUp, "derived": derived}


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
            found[kind, rows] = evaluation.result()
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


def test_a_metric_without_a_state_is_that_of_one_ranks_records(
    ranks: list[dict[Any, Any]],
) -> None:
    assert [found["share", (4, 2)]["val/own"] for found in ranks] == [1.0, 0.0]
    assert [found["share", (4, 0)]["val/own"] for found in ranks] == [1.0, 1.0]


@pytest.mark.parametrize(("rows", "right"), [((4, 2), 4 / 6), ((4, 0), 1.0)])
def test_a_metric_that_combines_the_ranks_is_of_all_records(
    ranks: list[dict[Any, Any]], rows: tuple[int, int], right: float
) -> None:
    for found in ranks:
        for kind in ("added up", "derived"):
            assert found[kind, rows]["val/own"] == pytest.approx(right)
        assert found["added up", rows]["val/acc1"] == pytest.approx(right)
