"""What the head takes down of a run: its events, and summary.json over several starts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from recorded import record

from stoker.config.schema import Config
from stoker.data import read_range
from stoker.events import kinds
from stoker.events.bottleneck import verdict
from stoker.events.console import Console, report
from stoker.events.kinds import EpochEnded, HostCpu, PassEnded, Resumed, event_of
from stoker.events.prices import price_list
from stoker.events.recorder import Recorder
from stoker.events.summary import MEASURED, Cluster, Host, Summary, read_summary
from stoker.serve.actor import Coordinator
from stoker.serve.passes import Passes

STEP = {"event": "step", "time": 9.0, "epoch": 2, "step": 201, "epoch_samples": 64}
STEP |= {"wait_s": 0.0, "loss": 1.0, "lr": 0.1}
EXPORT = {"event": "export", "time": 9.0, "path": "model.pt2", "error": None}


def start(run: Path, steps: int = 200) -> tuple[Recorder, Summary]:
    summary = Summary(name="flowers", train_workers=1, steps=steps, status="succeeded")
    summary.metrics.modes = {"val/acc1": "max"}
    summary.cluster = Cluster(hosts=[Host(host="here", group="gpu", cpus=2, gpus=0, ip="10.0.0.1")])
    return Recorder(run, summary, 0.0, price_list()), summary


def test_a_start_that_only_exports_keeps_the_figures_of_the_training(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 200)
    before = read_summary(run / "summary.json")
    before.exports = [
        {"format": "onnx", "error": None},
        {"format": "torchscript", "error": "refused"},
    ]
    before.write(run)
    recorder, summary = start(run)
    recorder.refresh()
    recorder.on_event(event_of({**EXPORT, "format": "torch_export"}))
    assert read_summary(run / "summary.json").speed == before.speed, "also while it runs"
    recorder.close(summary)
    after = read_summary(run / "summary.json")
    assert {name: getattr(after, name) for name in MEASURED} == {
        name: getattr(before, name) for name in MEASURED
    }
    assert [done["format"] for done in after.exports] == ["onnx", "torch_export"]
    assert verdict(summary).headline == verdict(before).headline
    assert summary.steps == 200, "of the checkpoint"


def test_a_start_that_fails_early_loses_nothing(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 200)
    before = read_summary(run / "summary.json")
    recorder, summary = start(run, steps=0)
    summary.status, summary.error = "failed", "no such folder"
    recorder.close(summary)
    after = read_summary(run / "summary.json")
    assert (after.status, after.steps, after.metrics) == ("failed", 200, before.metrics)


def of_a_script(run: Path, *events: dict[str, Any]) -> Summary:
    """One start of a script; `time` orders its events."""
    summary = Summary(name="flowers", script="train.py", train_workers=1)
    summary.metrics.modes = {"val/f": "min", "val/accuracy": "max"}
    recorder = Recorder(run, summary, 0.0)
    for at, event in enumerate(events):
        recorder.on_event(event_of({"time": float(at), **event}))
    recorder.close(summary)
    return read_summary(run / "summary.json")


def logged(step: int, accuracy: float) -> dict[str, Any]:
    metrics = {"val/accuracy": accuracy, "val/f": accuracy}
    return {"event": "metrics", "step": step, "metrics": metrics}


TAKEN = {"event": "loader", "loader": 0, "rank": 0, "samples": 800, "elapsed_s": 9.0, "wait_s": 1.0}


def test_a_scripts_summary_covers_all_of_its_starts(tmp_path: Path) -> None:
    lost = {"event": "host_lost", "host": "c", "node": "n"}
    first = of_a_script(tmp_path, {**TAKEN, "steps": 100}, logged(100, 0.91), lost)
    assert first.metrics.best == {"val/accuracy": 0.91, "val/f": 0.91}
    early = of_a_script(tmp_path, {"event": "note", "text": "1 file from before"})
    for name in ("steps", "metrics", "speed"):
        assert getattr(early, name) == getattr(first, name), "it trained nothing"
    last = of_a_script(tmp_path, {**TAKEN, "steps": 10}, logged(110, 0.90))
    assert last.steps == 110 and last.speed.steps == 9
    assert last.metrics.last == {"val/accuracy": 0.90, "val/f": 0.90}
    assert last.metrics.best == {"val/accuracy": 0.91, "val/f": 0.90}
    assert [event["event"] for event in last.events] == ["host_lost", "note"]


def test_a_start_that_trains_nothing_takes_time_and_costs(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 200)
    before = read_summary(run / "summary.json")
    before.seconds, before.cost = (
        3600.0,
        {"usd": 5.0, "usd_per_million_samples": 2.0, "usd_per_hour": 5.0},
    )
    before.write(run)
    recorder, summary = start(run)
    summary.cluster.hosts[0].type = "ml.g5.xlarge"
    recorder.started -= 1800
    recorder.close(summary)
    after = read_summary(run / "summary.json")
    assert after.seconds == pytest.approx(5400, abs=60) and after.cost is not None
    assert after.cost["usd"] == pytest.approx(5 + 1.408 / 2, rel=0.02)
    assert after.cost["usd_per_million_samples"] == 2.0 and after.speed == before.speed


def test_time_start_and_cost_are_those_of_all_starts(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 200)
    before = read_summary(run / "summary.json")
    before.started, before.cost = "2026-11-01T08:00:00+00:00", {"usd": 2.5}
    before.seconds = 30.0
    before.write(run)
    recorder, summary = start(run)
    summary.cluster.hosts[0].type = "ml.g5.xlarge"
    recorder.on_event(event_of({**STEP, "elapsed_s": 4.0}))
    for _ in range(2):
        recorder.refresh()
    recorder.close(summary)
    after = read_summary(run / "summary.json")
    assert after.started == before.started
    assert before.seconds <= after.seconds < before.seconds + 60
    assert after.cost is not None and after.cost["usd"] == pytest.approx(2.5, abs=0.01)
    assert after.speed.samples_per_s == 16.0, "a start that trains has figures of its own"
    assert [host.host for host in after.cluster.hosts] == ["here"]
    shown: list[str] = []
    console = Console(1)
    console.line = shown.append  # type: ignore[method-assign]
    report(after, console, tmp_path, 0, recorder.took_s)
    assert f"; with earlier starts {after.seconds:.0f} s" in shown[0]


@pytest.mark.parametrize("steps", [0, 200])
def test_cpu_use_counts_from_the_first_step_of_this_start_on(tmp_path: Path, steps: int) -> None:
    recorder, summary = start(tmp_path, steps)
    cpu = Host(host="c", group="cpu", cpus=8, gpus=0, ip="")
    summary.cluster.hosts = [cpu.model_copy(update={"host": "here", "group": "gpu"}), cpu]
    step = event_of({**STEP, "elapsed_s": 4.0})
    for event in ({"here": 100}, step, {"here": 10, "c": 50}, {"here": 30}):
        recorder.on_event(HostCpu(hosts=event) if isinstance(event, dict) else event)
    recorder.close(summary)
    assert summary.host_cpu == [
        {"host": "here", "group": "gpu", "mean_pct": 20.0, "max_pct": 30},
        {"host": "c", "group": "cpu", "mean_pct": 50.0, "max_pct": 50},
    ]


def resumed(epoch: int, step: int, validate: int | None = None) -> Resumed:
    return Resumed(path="c", epoch=epoch, step=step, validate=validate)


@pytest.mark.parametrize(
    ("checkpoint", "kept"),
    [
        (resumed(1, 10), 1),
        (resumed(1, 15), 1),
        (resumed(1, 20), 1),  # of the last step of epoch 2, from before its end
        (resumed(2, 20, validate=1), 1),
        (resumed(2, 20), 2),
        (resumed(0, 5), 0),
    ],
)
def test_best_and_last_are_of_epochs_that_the_checkpoint_of_a_restart_contains(
    tmp_path: Path, checkpoint: Resumed, kept: int
) -> None:
    recorder, summary = start(tmp_path)
    summary.metrics.take({"val/acc1": 0.8})  # of an earlier start
    values = [0.9, 0.95]
    for epoch, value in enumerate(values):
        step = 10 * (epoch + 1)
        recorder.on_event(EpochEnded(epoch=epoch, step=step, metrics={"val/acc1": value}))
    recorder.on_event(checkpoint)
    assert summary.metrics.best == summary.metrics.last == {"val/acc1": [0.8, *values][kept]}
    recorder.on_event(EpochEnded(epoch=kept, step=30, metrics={"val/acc1": 0.7}))
    assert summary.metrics.best == {"val/acc1": [0.8, *values][kept]}
    recorder.close(summary)


def test_a_part_of_an_epoch_that_its_checkpoint_contains_stays_with_it(tmp_path: Path) -> None:
    recorder, summary = start(tmp_path)
    recorder.on_event(EpochEnded(epoch=0, step=8, metrics={"val/acc1": 0.9}, whole=False))
    recorder.on_event(resumed(0, 8))
    recorder.close(summary)
    assert summary.metrics.best == {"val/acc1": 0.9}


def bad(epoch: int, key: str, reason: str, split: str = "train") -> kinds.RecordQuarantined:
    return kinds.RecordQuarantined(split=split, epoch=epoch, key=key, reason=reason)


def listed(run: Path) -> list[tuple[str, int, str, str]]:
    rows = kinds.json_lines(run / "quarantine.jsonl")
    return [(row["split"], row["epoch"], row["key"], row["reason"]) for row in rows]


def test_a_bad_record_is_listed_once_for_each_reason_over_all_epochs_and_starts(
    tmp_path: Path,
) -> None:
    for first_epoch in (0, 3):
        recorder, summary = start(tmp_path)
        for epoch in range(first_epoch, first_epoch + 3):
            recorder.on_event(bad(epoch, "a.jpg", "cut"))
            recorder.on_event(bad(epoch, "a.jpg", "cut", split="val"))
            recorder.on_event(bad(epoch, "b.jpg", "no file" if epoch == 4 else "cut"))
        recorder.close(summary)
    assert listed(tmp_path) == [
        ("train", 0, "a.jpg", "cut"),
        ("val", 0, "a.jpg", "cut"),
        ("train", 0, "b.jpg", "cut"),
        ("train", 4, "b.jpg", "no file"),
    ]
    met = [event.epoch for event in kinds.read_events(tmp_path / "events.jsonl")]
    assert sorted(met) == sorted([*range(6)] * 3), "`peek` needs those of each epoch"


def passed(epoch: int, steps: int, wait_s: float, batches: int) -> PassEnded:
    """Of 0.1 s per step, and a wait."""
    times = {"wait_production_s": wait_s, "compute_s": 0.1 * steps, "wait_s": wait_s}
    times["batches"] = batches
    figures = {"samples": 32 * steps, "elapsed_s": 0.1 * steps + wait_s, "step_ms": [100.0] * steps}
    return PassEnded(split="train", epoch=epoch, steps=steps, times=times, **figures)


@pytest.mark.parametrize(("later", "counted"), [(9, 1009), (10, 10)])
def test_the_steady_figures_need_as_many_steps_as_a_verdict(
    tmp_path: Path, later: int, counted: int
) -> None:
    recorder, summary = start(tmp_path)
    recorder.on_event(passed(0, 1000, 0.0, 1000))
    recorder.on_event(passed(1, later, 2.0, later))
    recorder.close(summary)
    speed, seconds = summary.speed, 0.1 * counted + 2
    assert speed.steps == counted
    assert speed.steady_samples_per_s == pytest.approx(32 * counted / seconds, abs=0.01)
    assert speed.input_wait_pct == pytest.approx(200 / seconds, abs=0.01)


def test_the_first_pass_of_each_start_and_restart_warms_up(tmp_path: Path) -> None:
    """A run resumed in its fourth epoch, whose train workers are started again in its sixth."""
    recorder, summary = start(tmp_path)
    for epoch, wait_s, steps in ((3, 50.0, 20), (4, 1.0, 30), (5, 70.0, 20), (6, 2.0, 30)):
        if epoch in (3, 5):
            attempt = {"event": "attempt", "time": 9.0, "workers": 1, "start": {}}
            recorder.on_event(event_of(attempt))
        recorder.on_event(passed(epoch, steps, wait_s, steps))
    recorder.close(summary)
    assert summary.speed.steps == 60
    assert summary.speed.input_wait_pct == pytest.approx(100 * 3 / (6 + 3), abs=0.01)


def test_the_parts_of_a_steps_time_are_per_batch_and_explain_the_same_waits(tmp_path: Path) -> None:
    recorder, summary = start(tmp_path)
    long = passed(0, 20, 2.0, 80)  # four batches make a step
    recorder.on_event(long.model_copy(update={"times": long.times | {"first_wait_s": 1.95}}))
    recorder.close(summary)
    terms = summary.speed.step_terms_ms
    assert (summary.speed.steps, terms["compute"], terms["wait_production"]) == (20, 25.0, 25.0)
    assert summary.bottleneck == "one_wait"
    assert "without it, 2 % of each step waits" in verdict(summary).headline


def test_events_of_train_workers_have_the_time_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.serve.service.Agents", lambda *_, **__: None)  # actors on hosts
    config = Config.model_validate({"recipe": "r"})
    passes = Passes(config, {"train": read_range(8)}, {})
    service = {"config": config, "node": "head", "budget_bytes": 0, "most_waiting": 1}
    coordinator = Coordinator(passes, {"train": 8}, passes.identity("f"), **service)
    began = round(time.time(), 3)
    coordinator.log(kinds.CheckpointWritten(path="c", epoch=2, step=4, time=1.0))
    (event,) = coordinator.drain()
    assert event["time"] >= began and event["step"] == 4
    assert coordinator.drain() == []
