"""Nothing silently wrong in the model: what is best, what is saved, what a run goes on from."""

from __future__ import annotations

import json
import math
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import Batches, Data, batches, no_cluster, start
from rows import Counting
from safetensors.torch import load_file
from scored import Scored
from torch import nn

from stoker.checkpoints import format as checkpoint
from stoker.entry import driver
from stoker.events.summary import Summary
from stoker.storage.checkpoint_store import open_store
from stoker.train import resume as resuming

pytestmark = [pytest.mark.usefixtures("no_cluster"), pytest.mark.long]
__all__ = ["no_cluster"]

TRAIN = {"epochs": 3, "batch_size": 8, "lr": 0.1}
ROWS = [8, 8, 8, 3]


def plain(split: str, epoch: int) -> Batches:
    return Batches(
        split, epoch, batches(ROWS if split == "train" else [8, 5], seed=int(split == "val"))
    )


def spoilt(where: Data, spoil: Any) -> Data:
    def data(split: str, epoch: int) -> Batches:
        feed = where(split, epoch)
        spoil(feed)
        return feed

    return data


def names(folder: Path) -> list[int]:
    return [int(name[5:]) for name in open_store(str(folder)).names()]


def all_finite(folder: Path) -> bool:
    tensors = [t for file in folder.glob("step-*/*.safetensors") for t in load_file(file).values()]
    return all(bool(t.isfinite().all()) for t in tensors)


# ---- a metric that is not finite is no metric ----


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_epoch_whose_metric_is_not_finite_is_never_the_best(
    tmp_path: Path, value: float
) -> None:
    def spoil(feed: Batches) -> None:
        if feed.split == "val" and feed.epoch == 0:
            feed.batches[0]["y"] = torch.full((8,), value)

    run = start(tmp_path, spoilt(plain, spoil), train=TRAIN, checkpoint={"keep": 1})
    assert run.error is None
    losses = [metrics["val/loss"] for metrics in run.metrics]
    assert losses[0] is None and losses[2] < losses[1]
    assert json.loads((tmp_path / "best.json").read_text())["value"] == losses[2]
    assert (
        json.loads((tmp_path / "model/model.json").read_text())["metrics"]["val/loss"] == losses[2]
    )
    summary = Summary()
    newest = checkpoint.newest_valid(open_store(str(tmp_path)))
    assert newest is not None
    resuming.fill_summary(summary, newest)
    assert summary.metrics.best["val/loss"] == losses[2]


def test_a_run_from_another_runs_checkpoint_calls_best_what_its_model_is(tmp_path: Path) -> None:
    def worse(feed: Batches) -> None:
        if feed.split == "val":
            feed.batches[0]["y"] += 9

    start(tmp_path / "a", plain, train=TRAIN)
    before = checkpoint.newest_valid(open_store(str(tmp_path / "a")))
    run = start(
        tmp_path / "b", spoilt(plain, worse), resume=tmp_path / "a", train={**TRAIN, "epochs": 5}
    )
    after = checkpoint.newest_valid(run.keeper.store)
    assert run.error is None and before is not None and after is not None
    live, resumed = Summary(), Summary()
    resuming.fill_summary(live, before, own=False)
    assert (live.epochs, live.metrics.best) == (3, {}) and "val/loss" in live.metrics.last
    for metrics in run.metrics:
        live.metrics.take(metrics)
    resuming.fill_summary(resumed, after)
    about = json.loads((tmp_path / "b/model/model.json").read_text())
    assert len(run.metrics) == 2 and about["metrics"]["val/loss"] > 9
    for summary in (live, resumed):
        assert summary.metrics.best["val/loss"] == about["metrics"]["val/loss"]


def test_a_run_from_another_runs_checkpoint_stops_early_by_its_own_epochs(tmp_path: Path) -> None:
    train = {**TRAIN, "early_stopping": {"monitor": "val/loss", "stopping_threshold": 1e9}}
    assert len(start(tmp_path / "a", plain, train=train).metrics) == 1
    assert len(start(tmp_path / "a", plain, train=train).metrics) == 0, "it had stopped"
    assert len(start(tmp_path / "b", plain, resume=tmp_path / "a", train=train).metrics) == 1


@pytest.mark.parametrize(
    ("keys", "scores", "losses", "epoch"),
    [
        # A mode that the metric's name does not say.
        ({"monitor": "val/score", "mode": "min"}, {"score": [0.9, 0.2, 0.5]}, [1.0, 1.0, 1.0], 2),
        # Of equal values, the lower loss decides.
        ({}, {"acc1": [0.5, 1.0, 1.0, 1.0]}, [0.1, 0.4, 0.3, 0.3], 3),
    ],
)
def test_the_model_is_that_of_the_best_epoch(
    tmp_path: Path,
    keys: dict[str, Any],
    scores: dict[str, list[float]],
    losses: list[float],
    epoch: int,
) -> None:
    recipe = Scored(train_records=32, val_records=8, steps=4, scores=scores, losses=losses)
    run = start(tmp_path, plain, recipe, train={**TRAIN, "epochs": len(losses)}, checkpoint=keys)
    assert run.error is None
    about = json.loads((tmp_path / "model/model.json").read_text())
    assert (about["epoch"], about["step"]) == (epoch, epoch * 4)
    [(metric, values)] = scores.items()
    assert about["metrics"][f"val/{metric}"] == pytest.approx(values[epoch - 1])
    assert load_file(tmp_path / "model/model.safetensors")["bias"] == pytest.approx(epoch * 4)


def test_a_resume_that_monitors_another_metric_ranks_earlier_epochs_by_it(tmp_path: Path) -> None:
    scores, losses = {"acc1": [0.95, 0.9, 0.9, 0.91]}, [0.2, 0.3, 0.31, 0.33]
    recipe = Scored(train_records=32, val_records=8, steps=4, scores=scores, losses=losses)
    train = {**TRAIN, "early_stopping": {"monitor": "val/loss", "patience": 9}}
    start(tmp_path, plain, recipe, train=train)
    run = start(tmp_path, plain, recipe, train={**TRAIN, "epochs": 4})
    assert run.error is None and run.keeper.shelf.best() == ["step-00000004"]
    assert json.loads((tmp_path / "model/model.json").read_text())["epoch"] == 1


def test_a_best_checkpoint_that_got_damaged_is_said_where_the_model_is_another(
    tmp_path: Path,
) -> None:
    scores = {"acc1": [0.95, 0.9, 0.8, 0.7]}
    recipe = Scored(train_records=32, val_records=8, steps=4, scores=scores, losses=[1.0] * 4)
    file = tmp_path / "step-00000004" / "model.safetensors"

    def damage(feed: Batches) -> None:
        if feed.split == "val" and feed.epoch == 3:
            file.write_bytes(file.read_bytes()[:-1] + b"x")

    run = start(tmp_path, spoilt(plain, damage), recipe, train={**TRAIN, "epochs": 4})
    assert json.loads((tmp_path / "model/model.json").read_text())["epoch"] == 4
    text = "the best checkpoint, step-00000004, cannot be read: the model is that of step-00000016"
    assert text in [event["text"] for event in run.head.of("note")]


@pytest.mark.parametrize("epoch", [0, 3])
def test_the_weights_of_another_run_in_the_same_folder_are_not_exported(
    tmp_path: Path, epoch: int
) -> None:
    """The best, and the last, to which this run then adds its outcome."""
    scores = {"acc1": [1.0 - abs(number - epoch) / 9 for number in range(4)]}
    recipe = Scored(train_records=32, val_records=8, steps=4, scores=scores, losses=[1.0] * 4)
    train, best = {**TRAIN, "epochs": 4}, f"step-{4 * epoch + 4:08d}"
    assert start(tmp_path / "other", plain, recipe, train=train).error is None

    def replace(feed: Batches) -> None:
        if feed.split == "val" and feed.epoch == 3:
            writers = [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
            [thread.join() for thread in writers]
            shutil.rmtree(tmp_path / "run" / best)
            shutil.copytree(tmp_path / "other" / best, tmp_path / "run" / best)

    run = start(tmp_path / "run", spoilt(plain, replace), recipe, train=train)
    assert f"{best}: another run has written this checkpoint" in str(run.error)
    assert not (tmp_path / "run/model").exists()


def test_a_run_is_the_same_through_all_its_starts(tmp_path: Path) -> None:
    first = start(tmp_path / "a", plain, train=TRAIN).keeper.run
    assert start(tmp_path / "a", plain, train={**TRAIN, "epochs": 4}).keeper.run == first
    other = start(tmp_path / "b", plain, resume=tmp_path / "a", train={**TRAIN, "epochs": 5})
    assert other.error is None and other.keeper.run != first
    newest = checkpoint.newest_valid(other.keeper.store)
    assert newest is not None and newest.meta["run"] == other.keeper.run


@pytest.mark.parametrize("form", ["model.pt2", "model.onnx", "model.onnx.data", "model.ts"])
def test_a_model_is_not_left_beside_another_starts_export(tmp_path: Path, form: str) -> None:
    start(tmp_path, plain, train=TRAIN)
    (tmp_path / "model" / form).write_text("of the earlier weights")
    start(tmp_path, plain, train={**TRAIN, "epochs": 4})
    left = {path.name for path in (tmp_path / "model").iterdir()}
    assert left == {"model.json", "model.safetensors"}


def test_a_model_stays_until_the_weights_that_replace_it_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = start(tmp_path, plain, train=TRAIN).keeper
    before = (tmp_path / "model/model.safetensors").read_bytes()
    (tmp_path / "model/model.onnx").write_text("of these weights")

    def reset(name: str) -> None:
        raise OSError("connection reset")

    monkeypatch.setattr(keeper.store, "local", reset)
    with pytest.raises(OSError, match="connection reset"):
        keeper.write_model(tmp_path / "model")
    assert (tmp_path / "model/model.safetensors").read_bytes() == before
    assert (tmp_path / "model/model.onnx").exists()


# ---- what a resumed run's optimiser keeps ----


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("before", "after"), [(0.05, 0.0), (0.0, 0.05), (0.05, 0.5)])
def test_another_weight_decay_or_momentum_has_no_effect_on_a_resumed_run(
    tmp_path: Path, optimizer: str, before: float, after: float
) -> None:
    train = {**TRAIN, "optimizer": optimizer, "weight_decay": before}
    whole = start(tmp_path / "whole", plain, train=train)
    for epoch, decay in (
        (0, before),
        (1, after),
        (2, after),
    ):  # a third start knows the first one's

        def stop(feed: Batches, at: int = epoch) -> None:
            if feed.split == "train" and feed.epoch == at:
                feed.stop_after = 2

        job = {**train, "weight_decay": decay, "momentum": 0.5 if epoch else 0.9}
        start(tmp_path / "run", spoilt(plain, stop), train=job)
    rest = start(tmp_path / "run", plain, train={**train, "weight_decay": after, "momentum": 0.5})
    assert rest.error is None
    assert ends(rest, tmp_path / "run")[1:] == ends(whole, tmp_path / "whole")[1:]


class OwnRate(Counting):
    rate: float = 1e-3

    def optimizer(self, model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=self.rate)


def test_a_new_rate_in_a_recipes_optimiser_is_named_where_it_has_no_effect(tmp_path: Path) -> None:
    job = {"train": {**TRAIN, "scheduler": "none"}}
    start(tmp_path, plain, OwnRate(), **job)
    more = {"train": {**job["train"], "epochs": 4}}
    assert start(tmp_path, plain, OwnRate(), **more).head.of("note") == []
    run = start(tmp_path, plain, OwnRate(rate=1e-5), **more)
    [note] = run.head.of("note")
    text = "optimizer(), 1e-05, has no effect; the optimiser keeps 0.001 of step-00000016"
    assert note["text"] == f"the rate of the recipe's {text}"


# ---- nothing that is not finite is saved or resumed from ----


class BadGradient(Counting):
    """A batch that begins with x0 = 7 has a finite loss and a gradient of NaN."""

    def training_step(self, model: Any, batch: Any) -> Any:
        loss = super().training_step(model, batch)
        return loss + (model.weight * 0).sqrt().sum() if batch["x0"][0] == 7 else loss


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9, "optimizer": "adamw"}])
def test_no_checkpoint_of_a_broken_model_is_published(
    tmp_path: Path, what: str, options: dict[str, Any]
) -> None:
    """In the sixth step; losses are logged every 1,000 steps, checkpoints are taken after each."""

    def spoil(feed: Batches) -> None:
        if feed.split == "train" and feed.epoch == 1:
            feed.batches[1]["y" if what == "loss" else "x0"][0] = math.nan if what == "loss" else 7

    run = start(
        tmp_path,
        spoilt(plain, spoil),
        BadGradient(),
        train={**TRAIN, **options},
        checkpoint={"every_steps": 1, "keep": 2},
        tracking={"log_every_steps": 1000},
    )
    assert isinstance(run.error, FloatingPointError)
    named = {"loss": "the sum of the epoch's losses is nan", "gradient": "weight weight holds NaN"}[
        what
    ]
    assert str(run.error).startswith(named)
    assert "by step 6 (epoch 2)" in str(run.error)
    assert str(run.error).endswith("; the checkpoint step-00000005 is kept")
    assert names(tmp_path)[:2] == [5, 4], "and they are kept"
    assert all_finite(tmp_path)
    again = start(tmp_path, plain, BadGradient(), train={**TRAIN, **options})
    assert again.error is None
    assert again.head.of("resumed")[0]["step"] == 5


def test_without_a_checkpoint_the_message_does_not_promise_one(tmp_path: Path) -> None:
    def spoil(feed: Batches) -> None:
        feed.batches[0]["y"][0] = math.nan

    run = start(tmp_path, spoilt(plain, spoil), train=TRAIN)
    assert str(run.error).endswith("; no checkpoint was taken before")


class Masked(Counting):
    """Holds an attention mask, whose -inf is as it should be."""

    def model(self) -> Any:
        model = nn.Linear(2, 1)
        model.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        return model


def test_a_mask_of_minus_infinity_is_a_sound_model(tmp_path: Path) -> None:
    assert start(tmp_path, plain, Masked(), train=TRAIN).error is None


def test_steps_that_fp16_skips_are_no_error_until_all_are(tmp_path: Path) -> None:
    train = {**TRAIN, "precision": "fp16", "lr": 0.01}
    run = start(tmp_path, plain, train=train, checkpoint={"every_steps": 1})
    assert run.error is None
    assert run.worker.scaler.get_scale() < 2.0**16, "some were skipped"
    assert all_finite(tmp_path)
    run.worker.scaler.update(2.0**-30)
    from stoker.train.state import Progress

    with pytest.raises(
        FloatingPointError, match=r"fp16: the gradient of every step.*train.precision=bf16"
    ):
        run.keeper.take(Progress(9), {})


# ---- checkpoints come before validation, and a stop is seen in it ----


class Drawing(Counting):
    def model(self) -> Any:
        return nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.4), nn.Linear(16, 1))

    def validation_step(self, model: Any, batch: Any) -> Any:
        loss = self.training_step(model, batch)
        return {"loss": loss * (1 + 0 * torch.rand(()))}


JOB: dict[str, Any] = {
    "train": {
        **TRAIN,
        "scheduler": "cosine",
        "early_stopping": {"monitor": "val/loss", "patience": 9},
    },
    "checkpoint": {"keep": 9, "save_top_k": 2},
}


def ends(run: Any, folder: Path) -> tuple[Any, ...]:
    newest = checkpoint.newest_valid(run.keeper.store)
    assert newest is not None
    meta = newest.meta
    history = [
        {
            **entry,
            "metrics": {k: v for k, v in entry["metrics"].items() if not k.startswith("perf/")},
        }
        for entry in meta["history"]
    ]
    weights = {
        k: v.tolist() for k, v in load_file(folder / newest.name / "model.safetensors").items()
    }
    best = json.loads((folder / "best.json").read_text())
    model = json.loads((folder / "model/model.json").read_text())["checkpoint"]
    return run.metrics[-1], history, meta["early_stopping"], meta["pending"], weights, best, model


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize(("epoch", "every_steps"), [(1, None), (2, None), (1, 4), (2, 2)])
def test_an_end_within_validation_costs_no_training_and_the_epoch_is_validated_first(
    tmp_path: Path, how: str, epoch: int, every_steps: int | None
) -> None:
    """The checkpoint of `every_steps` at an epoch's last step is that of the epoch, and written once."""
    whole = start(tmp_path / "whole", plain, Drawing(), **JOB)
    job = {**JOB, "checkpoint": {**JOB["checkpoint"], "every_steps": every_steps}}

    def interrupt(feed: Batches) -> None:
        if feed.split == "val" and feed.epoch == epoch:
            if how == "stop":
                feed.stop_after = 1
            else:
                del feed.batches[1]["y"]  # whatever is raised here ends it

    first = start(tmp_path / "run", spoilt(plain, interrupt), Drawing(), **job)
    assert first.asked == (how == "stop")
    assert (first.error is None) == (how == "stop")
    saved = checkpoint.newest_valid(first.keeper.store)
    assert saved is not None
    assert saved.meta["step"] == 4 * (epoch + 1), "taken before the validation"
    assert saved.pending is not None
    assert saved.position["unvalidated"] == epoch
    summary = Summary()
    resuming.fill_summary(summary, saved)
    assert [(b["split"], b["epoch"]) for b in summary.records.epochs][-1] == ("train", epoch)

    passes: list[tuple[str, int]] = []
    rest = start(
        tmp_path / "run",
        spoilt(plain, lambda feed: passes.append((feed.split, feed.epoch))),
        Drawing(),
        **job,
    )
    assert rest.error is None and not rest.asked
    written = [event["step"] for run in (first, rest) for event in run.head.of("checkpoint")]
    assert written == list(range(every_steps or 4, 13, every_steps or 4))
    opened = [at for at in passes if at != ("train", 0)]
    assert opened[0] == ("val", epoch), "what is missing comes first"
    assert ends(rest, tmp_path / "run") == ends(whole, tmp_path / "whole")


def test_an_epoch_without_validation_ends_in_the_checkpoint_of_its_last_step(
    tmp_path: Path,
) -> None:
    whole = start(tmp_path / "whole", plain, train=TRAIN, has_val=False)
    run = start(
        tmp_path / "run",
        plain,
        train=TRAIN,
        has_val=False,
        checkpoint={"every_steps": 4, "keep": 1},
    )
    assert [event["step"] for event in run.head.of("checkpoint")] == [4, 8, 12]
    assert ends(run, tmp_path / "run") == ends(whole, tmp_path / "whole")
    newest = checkpoint.newest_valid(run.keeper.store)
    assert newest is not None and (newest.meta["next_epoch"], newest.meta["epoch_steps"]) == (3, 0)
    assert newest.position["epoch"] == 2 and newest.position["steps"] == 0


def test_max_steps_within_an_epoch_is_validated_too_after_an_interruption(tmp_path: Path) -> None:
    job = {**JOB, "train": {**JOB["train"], "max_steps": 6}}
    whole = start(tmp_path / "whole", plain, Drawing(), **job)

    def interrupt(feed: Batches) -> None:
        if feed.split == "val" and feed.epoch == 1:
            feed.stop_after = 1

    assert start(tmp_path / "run", spoilt(plain, interrupt), Drawing(), **job).asked
    rest = start(tmp_path / "run", plain, Drawing(), **job)
    assert not rest.asked and rest.error is None
    assert ends(rest, tmp_path / "run") == ends(whole, tmp_path / "whole")
    # With more steps the epoch goes on instead, and is validated at its end.
    more = start(tmp_path / "run", plain, Drawing(), **JOB)
    assert [event["epoch"] for event in more.head.of("epoch")] == [1, 2]
    assert names(tmp_path / "run")[0] == 12


def test_the_last_step_of_all_and_a_stop_with_it_is_a_finished_training(tmp_path: Path) -> None:
    def stop(feed: Batches) -> None:
        if feed.split == "train" and feed.epoch == 1:
            feed.stop_after = 2

    job = {"train": {**TRAIN, "max_steps": 6}}
    run = start(tmp_path, spoilt(plain, stop), has_val=False, **job)
    assert not run.asked
    assert run.head.of("stopped")[0]["reason"] == "train.max_steps reached at step 6"


@pytest.mark.parametrize(("complete", "code"), [(True, 0), (False, 143)])
def test_the_exit_code_of_a_stop_says_whether_training_had_finished(
    monkeypatch: pytest.MonkeyPatch, complete: bool, code: int
) -> None:
    monkeypatch.setattr(driver, "_stop_reason", "SIGTERM")
    fit: Any = object.__new__(driver.Fit)
    fit.failure, fit.reason, fit.complete = None, "", complete
    summary = Summary()
    assert driver.conclude(fit, summary) == code
    assert summary.status == ("succeeded" if complete else "interrupted")


@pytest.mark.parametrize(
    ("error", "reason", "exported", "said"),
    [
        ("the loss is nan", "", "", "the loss is nan"),
        ("", "training did not end", "", "training did not end"),
        ("", "", "no operator aten::x", "export failed; no operator aten::x"),
    ],
)
def test_what_failed_never_ends_with_exit_code_0(
    error: str, reason: str, exported: str, said: str
) -> None:
    fit: Any = object.__new__(driver.Fit)
    fit.failure, fit.reason, fit.complete = error, reason, True
    summary = Summary(
        exports=[{"format": "safetensors", "error": ""}, {"format": "onnx", "error": exported}]
    )
    assert driver.conclude(fit, summary) == 1
    assert (summary.status, summary.error) == ("failed", said)


# ---- means over records ----


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_training_loss_is_the_mean_over_records_although_the_last_batch_is_short(
    tmp_path: Path, accumulate: int
) -> None:
    train = {"epochs": 1, "batch_size": 8, "lr": 1e-12, "accumulate_steps": accumulate}

    def uneven(split: str, epoch: int) -> Batches:
        feed = plain(split, epoch)
        feed.batches[-1]["y"] += 100  # three records that are wrong by far
        return feed

    run = start(tmp_path, uneven, train=train, has_val=False)
    model = run.worker.model
    errors = [
        (model(torch.stack([b["x0"], b["x1"]], 1)).squeeze(1) - b["y"]) ** 2
        for b in uneven("train", 0).batches
    ]
    assert run.metrics[0]["train/loss"] == pytest.approx(torch.cat(errors).mean().item(), rel=1e-4)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_tell_how_many_batches_of_their_pass_were_trained(
    tmp_path: Path, accumulate: int
) -> None:
    train = {"epochs": 2, "batch_size": 8, "accumulate_steps": accumulate}
    run = start(tmp_path, plain, train=train, has_val=False, tracking={"log_every_steps": 1})
    count = len(plain("train", 0).batches)
    counts = [*range(accumulate, count, accumulate), count]
    assert [event["batches"] for event in run.head.of("step")] == counts * 2
