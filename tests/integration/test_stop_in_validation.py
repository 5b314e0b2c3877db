"""A stop within an epoch or a long validation: the run ends at once, its books say what is left."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running import run_job
from safetensors.torch import load_file

from stoker.checkpoints import format as checkpoint
from stoker.entry import driver
from stoker.storage.checkpoint_store import open_store

RECORDS, VALIDATED = 48, 200


@contextlib.contextmanager
def when(ready: Callable[[], bool], then: Callable[[], None]) -> Iterator[None]:
    over = threading.Event()

    def wait() -> None:
        while not over.wait(0.02):
            if ready():
                then()
                return

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def test_a_stop_in_a_long_validation_costs_no_training(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation of 100 batches goes no further than its second before the stop is on its way."""
    monkeypatch.setattr(driver, "_stop_reason", "")
    run_dir = tmp_path / "run"
    job: dict[str, Any] = {
        "recipe": "rows:SlowValidation",
        "params": {"train_records": RECORDS, "val_records": VALIDATED, "run_dir": str(run_dir)},
        # What was asked for before the stop is still validated.
        "data": {"order": "exact", "prefetch_s": 0.001},
        "train": {"epochs": 1, "batch_size": 1, "workers": 2, "lr": 0.01, "threads": 1},
    }
    began = run_dir / "validating"
    with when(began.exists, lambda: driver.request_stop("SIGTERM")):
        stopped = run_job(tmp_path, run_dir=run_dir, **job)
    assert (stopped.code, stopped.summary.status) == (143, "interrupted"), stopped.summary.error
    batches = len(began.read_text())
    assert batches < VALIDATED // 2, "the rest of the validation was not made"
    saved = checkpoint.newest_valid(open_store(str(run_dir / "checkpoints")))
    assert saved is not None
    assert saved.meta["step"] == RECORDS // 2
    assert saved.pending is not None
    assert saved.pending["epoch"] == 0

    # It goes on by validating; a stop that comes when all is done is no interruption.
    monkeypatch.setattr(driver, "_stop_reason", "")
    events = run_dir / "events.jsonl"
    with when(
        lambda: '"event": "complete"' in events.read_text(), lambda: driver.request_stop("SIGTERM")
    ):
        rest = run_job(tmp_path, run_dir=run_dir, **job)
    assert (rest.code, rest.summary.status) == (0, "succeeded"), rest.summary.error
    assert rest.summary.steps == RECORDS // 2
    assert rest.summary.records.trained == RECORDS
    assert rest.summary.records.validated == VALIDATED
    weights = load_file(run_dir / "checkpoints" / saved.name / "model.safetensors")
    numbers = torch.arange(VALIDATED)
    x = torch.stack([numbers % 7, numbers % 3], 1).float()
    loss = ((x @ weights["weight"].T + weights["bias"]).squeeze(1) - x.sum(1)).square().mean()
    assert rest.summary.metrics.last["val/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert json.loads((run_dir / "model/model.json").read_text())["metrics"][
        "val/loss"
    ] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("workers", [1, 2])
def test_all_train_workers_stop_after_the_step_under_way(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Steps are fetched eight at a time, and the stop comes in the fourth."""
    monkeypatch.setattr(driver, "_stop_reason", "")
    run_dir = tmp_path / "run"
    job: dict[str, Any] = {
        "recipe": "rows:LongSteps",
        "params": {"train_records": 20 * workers, "val_records": 4, "run_dir": str(run_dir)},
        "data": {"order": "exact"},
        "train": {"epochs": 1, "batch_size": 1, "workers": workers, "lr": 0.01, "threads": 1},
    }
    begun = [run_dir / f"begun-{rank}" for rank in range(workers)]

    def are_in_the_fourth_step() -> bool:
        return all(file.exists() and file.stat().st_size >= 4 for file in begun)

    with when(are_in_the_fourth_step, lambda: driver.request_stop("SIGTERM")):
        stopped = run_job(tmp_path, run_dir=run_dir, **job)
    assert (stopped.code, stopped.summary.status) == (143, "interrupted"), stopped.summary.error
    steps = {file.stat().st_size for file in begun}
    assert len(steps) == 1 and max(steps) <= 5, "the step under way, and at most one more"
    assert stopped.summary.steps == max(steps)

    monkeypatch.setattr(driver, "_stop_reason", "")
    rest = run_job(tmp_path, run_dir=run_dir, **job)
    assert (rest.code, rest.summary.steps) == (0, 20), rest.summary.error
    assert rest.summary.records.trained == 20 * workers
    assert {file.stat().st_size for file in begun} == {20}, "each step once"


@pytest.mark.parametrize(
    ("killed_after_s", "still_s", "reason"),
    [
        (2.0, 960.0, "training did not end within 2 s of: SIGTERM"),
        (None, 960.0, ""),
        (None, 1.0, "training made no progress for 1 s after: SIGTERM"),
    ],
)
def test_a_stop_may_last_where_nobody_kills(
    ray_cluster: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed_after_s: float | None,
    still_s: float,
    reason: str,
) -> None:
    monkeypatch.setattr(driver, "_stop_reason", "")
    monkeypatch.setattr(driver, "STOP_STILL_S", still_s)
    run_dir = tmp_path / "run"
    job: dict[str, Any] = {
        "recipe": "rows:SlowSteps",
        "params": {
            "train_records": 40,
            "val_records": 4,
            "began": str(tmp_path / "began"),
            "seconds": 60 if reason else 5,
        },
        "data": {"order": "exact", "prefetch_s": 0.001},
        "train": {"epochs": 1, "batch_size": 1, "lr": 0.01, "threads": 1},
    }
    with when((tmp_path / "began").exists, lambda: driver.request_stop("SIGTERM")):
        stopped = run_job(tmp_path, run_dir=run_dir, killed_after_s=killed_after_s, **job)
    assert stopped.summary.error == (reason or "SIGTERM")
    assert (stopped.code, stopped.summary.status) == (
        (1, "failed") if reason else (143, "interrupted")
    )
    saved = checkpoint.newest_valid(open_store(str(run_dir / "checkpoints")))
    assert (saved is None) == bool(reason)


def test_a_stop_while_nobody_trains_does_not_wait_for_progress(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_stop_reason", "SIGTERM")
    monkeypatch.setattr(driver, "NOBODY_S", 2.0)
    stopped = run_job(
        tmp_path, recipe="rows:Counting", train={"epochs": 1}, train_group="not there"
    )
    assert (stopped.code, stopped.summary.error) == (
        1,
        "training did not end within 2 s of: SIGTERM",
    )


def test_a_stop_within_an_epoch_is_booked_also_by_a_start_with_nothing_left(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_stop_reason", "")
    run_dir = tmp_path / "run"
    job: dict[str, Any] = {
        "recipe": "interrupted:Interrupted",
        # All of them would take a minute, so the stop comes before the end of the epoch.
        "params": {
            "train_records": 1203,
            "val_records": 4,
            "trace": str(tmp_path),
            "pause_s": 0.05,
        },
        "train": {"epochs": 1, "batch_size": 1, "lr": 0.01, "threads": 1},
    }
    events = run_dir / "events.jsonl"
    with when(
        lambda: events.exists() and '"event": "step"' in events.read_text(),
        lambda: driver.request_stop("SIGTERM"),
    ):
        stopped = run_job(tmp_path, run_dir=run_dir, **job)
    assert stopped.code == 143, stopped.summary.error
    records, steps = (
        stopped.summary.records,
        checkpoint.newest_valid(open_store(str(run_dir / "checkpoints"))),
    )
    assert steps is not None and 0 < steps.meta["step"] == stopped.summary.steps < 1203
    assert (records.read, records.trained, records.remainder) == (
        1203,
        steps.meta["step"],
        1203 - records.trained,
    )

    monkeypatch.setattr(driver, "_stop_reason", "")
    rest = run_job(tmp_path, f"train.max_steps={steps.meta['step']}", run_dir=run_dir, **job)
    assert rest.code == 0, rest.summary.error
    assert rest.summary.records.model_dump() == records.model_dump()
