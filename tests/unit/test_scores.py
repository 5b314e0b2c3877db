"""Metrics of a recipe: trial, scalars, tables; the default one is torchmetrics'."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inprocess import Batches, Run, no_cluster, start
from recorded import record
from shaped import Shaped, Strange
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stoker.accuracy import F1, Accuracy
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.events.console import Console
from stoker.events.kinds import event_of
from stoker.events.report import write_report
from stoker.events.sinks import Board, Scalars
from stoker.events.summary import Summary
from stoker.recipe import Recipe
from stoker.train.evaluation import Evaluation, try_validation
from stoker.train.state import Worker, rng_state

pytestmark = pytest.mark.usefixtures("no_cluster")
__all__ = ["no_cluster"]
TRAIN = {"epochs": 1, "batch_size": 8, "lr": 0.001}


def of(records: list[int]) -> dict[str, Any]:
    x0 = torch.tensor([float(n % 7) for n in records])
    x1 = torch.tensor([float(n % 3) for n in records])
    return {"x0": x0, "x1": x1, "y": x0 + x1}


def data(split: str, epoch: int) -> Batches:
    """13 validation records, in two batches."""
    return Batches(split, epoch, [of([*range(8)]), of([*range(8, 13)])])


def run(folder: Path, *kinds: str, epochs: int = 1, monitor: str = "auto", **recipe: Any) -> Run:
    checkpoint = {"monitor": monitor}
    train = {**TRAIN, "epochs": epochs}
    return start(folder, data, Shaped(kinds=kinds, **recipe), train=train, checkpoint=checkpoint)


def expected() -> torch.Tensor:
    found = torch.zeros(3, 3)
    for n in range(13):
        found[n % 3, n % 7 % 3] += 1
    return found


def by_class() -> dict[str, float]:
    counts = expected()
    shares = counts.diagonal() / counts.sum(1)
    return dict(zip(("cat", "dog", "sea_horse"), shares.tolist(), strict=True))


def last(made: Run) -> dict[str, float]:
    assert made.error is None, made.error
    return {k: v for k, v in made.metrics[-1].items() if k.startswith("val/") and k != "val/loss"}


@pytest.mark.long
def test_on_device_of_val_is_in_evaluation_mode_and_what_training_shares_with_it_is_not() -> None:
    shared = torch.nn.BatchNorm1d(2)

    class OnDevice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = shared

        def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {**batch, "x": self.norm(batch["x"])}

    class Own(Recipe):
        def validation_step(self, model: Any, batch: Any) -> Any:
            return {"loss": model(batch["x"]).mean()}

    worker = Worker(Config(), Own(), None, 0, 0, 1, torch.device("cpu"))
    worker.model, worker.modules = torch.nn.Identity(), {"val": OnDevice()}
    evaluation = Evaluation(worker, 0)
    with evaluation.quietly():
        evaluation.take({"x": torch.full((4, 2), 3.0)})
    assert evaluation.result()["val/loss"] == pytest.approx(3.0, rel=1e-3), (
        "not normalised by its own batch"
    )
    assert shared.training and not shared.num_batches_tracked


CLASSES = ["cat", "dog", "sea/horse"]
NUMBERS = ["0", "1", "2"]


@pytest.mark.parametrize(
    ("kind", "values", "tables"),
    [
        ("accuracy", {f"/{name}": value for name, value in by_class().items()}, []),
        ("half", {"/cat": 0.5, "/dog": 0.25, "/sea_horse": 0.125}, []),
        ("flag", {"": 1.0}, []),
        ("one", {"": 0.25}, []),
        ("boxes", {"/iou": 0.5, "/iou_cl_1": 0.25, "/iou_cl_7": 0.125, "/iou_50": 1.0}, []),
        ("same", {"/0-a_b": 1.0, "/1-a_b": 2.0}, []),
        (
            "numbered",
            {f"/multiclassaccuracy_{n}": value for n, value in enumerate(by_class().values())},
            [],
        ),
        (
            "collection",
            {"/acc": float(expected().diagonal().sum() / 13)}
            | {f"/recall/{name}": value for name, value in by_class().items()},
            [],
        ),
        (
            "found",
            {"/map": 0.5, "/mar_100_per_class": -1.0},
            [
                ("/map_per_class", NUMBERS[:2], ["value"], [[0.75], [0.25]]),
                ("/classes", NUMBERS[:2], ["value"], [[0], [2]]),
            ],
        ),
        ("confusion", {}, [("", CLASSES, CLASSES, expected().tolist())]),
        ("rates", {}, [("", NUMBERS, NUMBERS[:2], [[0, 1], [2, 3], [4, 5]])]),
        (
            "labels",
            {},
            [
                (
                    "",
                    [f"{n} / {m}" for n in range(3) for m in range(2)],
                    NUMBERS[:2],
                    [[2 * n, 2 * n + 1] for n in range(6)],
                )
            ],
        ),
        ("long", {}, [("", [*map(str, range(150))], ["value"], [[n] for n in range(150)])]),
    ],
)
def test_a_metric_is_a_number_a_vector_by_class_or_a_table(
    tmp_path: Path, kind: str, values: dict[str, float], tables: list[Any]
) -> None:
    made = run(tmp_path, kind)
    assert last(made) == pytest.approx({f"val/{kind}{n}": v for n, v in values.items()})
    parts = ("name", "rows", "columns", "values")
    shown = [tuple(table[part] for part in parts) for table in made.head.of("table")]
    assert shown == [(f"val/{kind}{name}", *rest) for name, *rest in tables]


def test_what_cannot_be_shown_is_named_once_and_the_run_continues(tmp_path: Path) -> None:
    kinds = ("text", "nothing", "empty", "complex", "huge", "pairs", "series")
    made = run(tmp_path, *kinds, "accuracy", epochs=2)
    assert len(last(made)) == 3
    notes = [event["text"] for event in made.head.of("note")]
    for kind in kinds:
        assert sum(f"val/{kind} is not shown" in note for note in notes) == 1, notes


@pytest.mark.parametrize("kind", ["broken", "update", "missing", "few"])
def test_a_metric_that_fails_is_named(tmp_path: Path, kind: str) -> None:
    error = run(tmp_path, "accuracy", kind).error
    assert isinstance(error, UsageError) and "Shaped.metrics: " in str(error)
    assert {"missing": "pycocotools"}.get(kind, f"{kind} (Strange)") in str(error)


def test_without_a_loss_there_is_no_loss(tmp_path: Path) -> None:
    made = run(tmp_path, "accuracy", loss="never")
    assert made.error is None and "val/loss" not in made.metrics[-1]
    error = run(tmp_path / "mixed", "accuracy", loss="sometimes").error
    assert isinstance(error, UsageError) and "a loss for some records only (5 of 13)" in str(error)
    error = run(tmp_path / "scored", "accuracy", preds="sometimes").error
    assert isinstance(
        error, UsageError
    ) and "preds and target for some records only (5 of 13)" in str(error)


def test_a_class_without_a_value_is_null_and_never_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run(tmp_path / "run", "holes", monitor="val/holes/dog")
    found = last(made)
    assert found == {"val/holes/cat": 0.5, "val/holes/dog": None, "val/holes/sea_horse": None}
    events = tuple({"time": 99.0, **event} for event in made.head.of("epoch"))
    folder = record(tmp_path / "recorded", 4, extra=events)

    def refuse(token: str) -> None:
        raise AssertionError(token)

    lines = (folder / "events.jsonl").read_text().splitlines()
    epoch = [json.loads(line, parse_constant=refuse) for line in lines if '"val/holes/dog"' in line]
    assert len(epoch) == 1
    assert Scalars().of(event_of(epoch[0])).keys() & {*found} == {"val/holes/cat"}
    Console(epochs=1).on_event(event_of(epoch[0]))
    assert "val/holes/dog not finite" in capsys.readouterr().out
    best = json.loads((folder / "summary.json").read_text())["metrics"]["best"]
    assert "val/holes/cat" in best and "val/holes/dog" not in best


def test_one_class_selects_the_best_model(tmp_path: Path) -> None:
    made = run(tmp_path, "accuracy", monitor="val/accuracy/dog")
    assert made.error is None
    best = json.loads((tmp_path / "best.json").read_text())
    assert best and "val/accuracy/dog" in json.dumps(best)


def test_scalars_and_tables_reach_report_and_tensorboard(tmp_path: Path) -> None:
    made = run(tmp_path / "run", "accuracy", "confusion", "rates")
    events = [
        {"time": 99.0, **event}
        for event in made.head.events
        if event["event"] in ("epoch", "table", "note")
    ]
    folder = record(tmp_path / "recorded", 40, extra=tuple(events))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["metrics"]["last"]["val/accuracy/dog"] == pytest.approx(by_class()["dog"])
    write_report([folder], folder / "report.html")
    page = (folder / "report.html").read_text()
    shown = page[page.index("<h3>val/confusion</h3>") :]
    assert f"<td>dog</td><td>{expected()[1, 0]:.0f}</td><td>{expected()[1, 1]:.0f}</td>" in shown
    assert "<h3>val/accuracy</h3>" in page and "<h3>val/rates</h3>" in page
    board = Board(folder)
    for event in events:
        board.on_event(event_of(event))
    board.close(Summary(status="succeeded"))
    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    assert read.Scalars("val/accuracy/dog")[0].value == pytest.approx(by_class()["dog"])


# ---- the trial before the first epoch ----


def tried(
    folder: Path, *kinds: str, monitor: str = "auto", **recipe: Any
) -> tuple[dict[str, float], list[str]]:
    run_ = start(
        folder,
        data,
        Shaped(kinds=(), **recipe),
        has_val=False,
        train=TRAIN,
        checkpoint={"monitor": "train/loss"},
    )
    worker = run_.worker
    worker.recipe = Shaped(kinds=kinds, **recipe)
    worker.config = worker.config.model_validate(
        {"train": TRAIN, "checkpoint": {"monitor": monitor}}
    )
    return try_validation(worker, of([*range(4)]))


def test_a_trial_names_what_would_end_the_first_epoch(tmp_path: Path) -> None:
    for kind in ("broken", "update", "missing"):
        with pytest.raises(UsageError, match=kind if kind != "missing" else "pycocotools"):
            tried(tmp_path / kind, kind)
    for number, monitor in enumerate(("val/accuracy", "val/accuracy/dgo")):
        with pytest.raises(UsageError, match="val/accuracy/dog"):
            tried(tmp_path / str(number), "accuracy", monitor=monitor)
    with pytest.raises(UsageError, match="val/loss"):
        tried(tmp_path / "loss", "accuracy", monitor="val/loss", loss="never")


def test_what_the_first_records_are_too_few_for_is_a_note(tmp_path: Path) -> None:
    values, notes = tried(tmp_path, "few", "found", monitor="val/few")
    assert any("metric few: cannot be computed from the first records" in note for note in notes), (
        notes
    )
    values, notes = tried(tmp_path / "map", "found", monitor="val/found/map_per_class/dog")
    assert notes == [] and "val/found/map" in values, "no dog among the first records"


def draw() -> None:
    random.random(), np.random.rand(), torch.rand(1)


class Draws(Strange):
    """Creating it, and what it computes, draws, as of bootstrapped metrics and distances of features."""

    def __init__(self) -> None:
        draw()
        super().__init__(1.0)

    def compute(self) -> Any:
        draw()
        return super().compute()


class Drawing(Shaped):
    metric_draws: bool = True

    def metrics(self) -> dict[str, Any]:
        return {"draws": Draws()} if self.metric_draws else {}

    def model(self) -> Any:
        from torch import nn

        return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def validation_step(self, model: Any, batch: Any) -> Any:
        if self.metric_draws:
            draw()
        return super().validation_step(model, batch)


def test_a_trial_leaves_no_trace(tmp_path: Path) -> None:
    made = start(tmp_path, data, Drawing(), train={**TRAIN, "optimizer": "adamw"})
    assert made.error is None
    worker = made.worker

    def state() -> Any:
        parts = [worker.model.state_dict(), worker.optimizer.state_dict(), rng_state(worker.device)]
        parts += [
            [p.grad for p in worker.model.parameters()],
            worker.step,
            worker.feed_step,
            worker.samples,
        ]
        return copy.deepcopy([*parts, worker.example and worker.example.batch])

    before, told = state(), len(made.head.events)
    try_validation(worker, of([*range(4)]))
    after = state()
    flat, other = (torch.utils._pytree.tree_leaves(tree) for tree in (before, after))
    assert len(flat) == len(other) > 20
    assert all(
        torch.equal(a, b) if torch.is_tensor(a) else a == b
        for a, b in zip(flat, other, strict=True)
    )
    assert len(made.head.events) == told


def test_draws_of_a_validation_do_not_reach_training(tmp_path: Path) -> None:
    losses = []
    for number, metric_draws in enumerate((True, False)):
        recipe = Drawing(metric_draws=metric_draws)
        made = start(tmp_path / str(number), data, recipe, train={**TRAIN, "epochs": 3})
        assert made.error is None
        losses.append([epoch["train/loss"] for epoch in made.metrics])
    assert losses[0] == losses[1]


def test_metrics_that_get_nothing_are_named(tmp_path: Path) -> None:
    values, notes = tried(tmp_path, "accuracy", "confusion", preds=False)
    assert [*values] == ["val/loss"]
    assert notes == [
        "2 metrics (accuracy, confusion) not computed: validation_step returns no preds and target"
    ]


@pytest.mark.long
@pytest.mark.parametrize("more", [(), (4, 5)])
def test_scores_and_classes_count_as_in_torchmetrics(more: tuple[int, ...]) -> None:
    from torchmetrics.classification import MulticlassAccuracy  # takes seconds to import

    ours, theirs = Accuracy(), MulticlassAccuracy(num_classes=None, average="micro")
    for records in (7, 1, 12):
        scores, target = torch.randn(records, 3, *more), torch.randint(0, 3, (records, *more))
        for preds in (scores, torch.randint(0, 3, (records, *more))):
            ours.update(preds, target)
            theirs.update(preds, target)
    assert ours.compute() == pytest.approx(float(theirs.compute()))


def test_an_accuracy_is_the_number_that_earlier_checkpoints_hold() -> None:
    """Else a resumed run takes an equal model for a better one."""
    accuracy = Accuracy()
    accuracy.update(torch.tensor([1, 0, 0]), torch.tensor([1, 1, 1]))
    assert accuracy.compute() == float(np.float32(1) / np.float32(3))


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"preds of shape \(4, 1\) do not fit target of shape \(4, 4\)"
    ):
        Accuracy().update(torch.zeros(4, 1), torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("preds", "target"),
    [
        ([3.5, -2.0, 4.0], [1, 0, 1]),
        ([[3.5], [-2.0], [4.0]], [1, 0, 1]),
        ([[3.5], [-2.0], [4.0]], [[1.0], [0.0], [1.0]]),
        ([[0.5, 0.1], [0.2, 0.3]], [0.3, 1.0]),
        ([[0.5, 0.1], [0.2, 0.3]], [[0.9, 0.1], [0.0, 1.0]]),
    ],
)
def test_outputs_that_are_no_classes_have_no_accuracy(preds: list[Any], target: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"define metrics\(\)"):
        Accuracy().update(torch.tensor(preds), torch.tensor(target))


def test_classes_written_as_floats_have_an_accuracy() -> None:
    accuracy = Accuracy()
    accuracy.update((torch.tensor([3.5, -2.0, 4.0, 1.0]) > 0).float(), torch.tensor([1, 0, 0, 1]))
    assert accuracy.compute() == 0.75


@pytest.mark.parametrize(
    "preds", [torch.tensor([[2.0, 1], [0, 1], [1, 3]]), torch.tensor([0, 1, 1])]
)
@pytest.mark.parametrize("ignored", [-100, -1, 255])
def test_ignored_targets_do_not_count_as_wrong(preds: Any, ignored: int) -> None:
    scores = Accuracy()
    scores.update(preds, torch.tensor([0, 1, 1]))
    assert scores.compute() == 1
    if ignored < 0 or preds.ndim > 1:
        with pytest.raises(
            ValueError, match=rf"target holds .*{ignored}.*define metrics\(\), with ignore_index"
        ):
            scores.update(preds, torch.tensor([0, ignored, 1]))


@pytest.mark.parametrize("metric", [Accuracy, F1])
def test_scores_that_are_not_a_number_have_no_finite_metric(metric: type[Accuracy]) -> None:
    """Their highest would be class 0, so a model that is lost could become the best."""
    scores, preds = metric(), torch.tensor([[2.0, -1], [-1, 2]])
    target = torch.tensor([0, 1]) if metric is Accuracy else torch.eye(2)
    scores.update(preds, target)
    assert scores.compute() == 1
    scores.update(torch.tensor([[2.0, -math.inf], [-1, 2]]), target)
    assert scores.compute() == 1  # such as those of classes that a model excludes
    scores.update(torch.tensor([[2.0, -1], [math.nan, math.nan]]), target)
    assert math.isnan(scores.compute())


def test_f1_refuses_soft_labels() -> None:
    with pytest.raises(ValueError, match="other values than 0 and 1"):
        F1().update(torch.rand(4, 3), torch.full((4, 3), 0.7))


@pytest.mark.long
def test_f1_counts_as_in_torchmetrics() -> None:
    from torchmetrics.classification import MultilabelF1Score  # takes seconds to import

    ours, theirs = F1(), MultilabelF1Score(num_labels=5, average="micro")
    for records in (7, 1, 12):
        scores, target = 3 * torch.randn(records, 5), torch.randint(0, 2, (records, 5))
        ours.update(scores, target)
        theirs.update(scores.sigmoid(), target)
    assert ours.compute() == pytest.approx(float(theirs.compute()))
