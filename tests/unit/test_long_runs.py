"""What the head keeps of a run and writes about it has a most, and says how much stands behind it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from recorded import record

from stoker.events import runs
from stoker.events.kinds import (
    HostCpu,
    HostLost,
    HostsClosing,
    LoaderProgress,
    PassEnded,
    StepLogged,
    event_of,
    read_events,
)
from stoker.events.recorder import MOST_TIMES, Recorder
from stoker.events.report import write_report
from stoker.events.sinks import Tracking
from stoker.events.summary import MOST_EVENTS, MOST_ROWS, Host, Summary, read_summary

LONG = MOST_ROWS + 500
"""Epochs whose passes are more than the rows of their list."""


def run_of(folder: Path) -> tuple[Recorder, Tracking, Summary]:
    folder.mkdir()
    summary = Summary(name="long", train_workers=1)
    summary.metrics.modes = {"val/acc": "max"}
    recorder = Recorder(folder, summary, 0.0)
    return recorder, Tracking(summary, [recorder]), summary


def books(epoch: int, *, whole: bool = True) -> list[dict[str, Any]]:
    same = {"event": "records", "time": 1.0, "epoch": epoch, "quarantined": epoch % 2}
    same["repeated"] = 0
    left = 0 if whole else 40
    train = {"read": 100, "trained": 100 - epoch % 2 - left, "remainder": left, "whole": whole}
    val = {"read": 50, "validated": 50 - epoch % 2, "remainder": 0}
    done = {"event": "epoch", "time": 1.0, "epoch": epoch, "step": 10 * epoch + 10}
    done["metrics"] = {"val/acc": epoch}
    return [{**same, "split": "train", **train}, {**same, "split": "val", **val}, done]


def trained(tracking: Tracking, epochs: Iterable[int], part: int | None = None) -> None:
    for epoch in epochs:
        tracking.take(books(epoch, whole=epoch != part))


def written(recorder: Recorder) -> dict[str, Any]:
    recorder.refresh()
    found: dict[str, Any] = json.loads((recorder.run_dir / "summary.json").read_text())
    return found


def test_the_books_of_every_epoch_are_in_the_summary_of_a_long_run(tmp_path: Path) -> None:
    recorder, tracking, _ = run_of(tmp_path / "run")
    trained(tracking, range(LONG), part=LONG // 2)
    found = written(recorder)["records"]
    rows = found["epochs"]
    assert len(rows) == MOST_ROWS and len(rows) + found["dropped"] == 2 * LONG
    for row in rows:
        used = row.get("trained", 0) + row.get("validated", 0)
        assert row["read"] == used + row["quarantined"] + row["remainder"]
    assert found["read"] == 100 * LONG and found["trained"] == 100 * LONG - LONG // 2 - 40
    assert rows[-1] == {
        name: value for name, value in books(LONG - 1)[1].items() if name not in ("event", "time")
    }


def resumed(epoch: int) -> dict[str, Any]:
    return {"event": "resumed", "time": 1.0, "path": "c", "epoch": epoch, "step": 10 * epoch}


def test_a_restart_of_a_long_run_takes_back_exactly_what_it_trains_again(tmp_path: Path) -> None:
    (_, once, whole), (_, again, restarted) = run_of(tmp_path / "once"), run_of(tmp_path / "again")
    trained(once, range(LONG))
    trained(again, range(LONG))
    again.take([resumed(LONG - 300)])
    assert restarted.records.read == 100 * (LONG - 300)
    assert restarted.metrics.best == {"val/acc": LONG - 301}
    trained(again, range(LONG - 300, LONG))
    assert restarted.records.model_dump(exclude={"epochs"}) == whole.records.model_dump(
        exclude={"epochs"}
    )
    assert restarted.records.epochs == whole.records.epochs


def test_events_of_a_long_run_are_counted_and_the_last_of_each_kind_is_there(
    tmp_path: Path,
) -> None:
    recorder, tracking, summary = run_of(tmp_path / "run")
    tracking.take([HostsClosing(nodes=["a"]).record(), HostsClosing(nodes=["b"]).record()])
    lost = [HostLost(host="h", node=f"n{n}").record() for n in range(MOST_EVENTS + 3)]
    tracking.take([*lost, HostsClosing(nodes=["c"]).record()])
    events = written(recorder)["events"]
    assert [event["nodes"][0] for event in events if event["event"] == "closing"] == [*"abc"]
    assert [event["node"] for event in events if event["event"] == "host_lost"] == [
        event["node"] for event in lost[3:]
    ]
    assert summary.notable() == {"closing": 3, "host_lost": MOST_EVENTS + 3}
    assert read_summary(tmp_path / "run" / "summary.json").notable() == summary.notable()


def test_the_summary_of_a_long_run_is_no_larger_at_its_end(tmp_path: Path) -> None:
    recorder, tracking, summary = run_of(tmp_path / "run")
    summary.cluster.hosts = [Host(host="h", group="cpu", cpus=4, gpus=0, ip="")]
    sizes = []
    for part in range(2):
        trained(tracking, range(LONG * part, LONG * (part + 1)))
        for n in range(3000):
            recorder.on_event(HostCpu(hosts={"h": float(n % 2)}))
        sizes.append(len(json.dumps(written(recorder))))
    assert sizes[1] < 1.02 * sizes[0]
    assert summary.host_cpu == [{"host": "h", "group": "cpu", "mean_pct": 0.5, "max_pct": 1.0}]


def progress(loader: int, steps: int, wait_s: float) -> LoaderProgress:
    """Of a script's pass so far."""
    waits = {"wait_s": wait_s, "longest_wait_s": wait_s / 2, "elapsed_s": 0.3 * steps}
    return LoaderProgress(loader=loader, rank=0, steps=steps, samples=8 * steps, **waits)


def test_the_passes_of_a_script_count_by_what_each_of_them_told_last(tmp_path: Path) -> None:
    found = []
    last = [progress(loader, 20 + loader % 3, 0.7) for loader in range(1, 300)]
    early = [progress(event.loader, 10, 0.2) for event in last]
    mixed = [event for pair in zip(early, last, strict=True) for event in pair]
    for number, events in enumerate((last, mixed)):
        recorder, _, summary = run_of(tmp_path / f"run-{number}")
        for event in events:
            recorder.on_event(event)
        recorder.refresh()
        found.append((summary.steps, summary.speed))
    assert found[0] == found[1]
    assert found[0][0] == sum(event.steps for event in last)


def test_the_median_step_of_a_long_run_is_that_of_its_last_steps(tmp_path: Path) -> None:
    recorder, _, summary = run_of(tmp_path / "run")
    for ms in (300.0, 100.0):
        times = {"elapsed_s": 1.0, "step_ms": [ms] * MOST_TIMES, "times": {}}
        recorder.on_event(PassEnded(split="train", epoch=0, samples=1, steps=MOST_TIMES, **times))
        recorder.refresh()
        assert summary.speed.step_ms_p50 == ms


def test_the_report_of_many_steps_says_how_many_of_them_it_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record(tmp_path / "run", 700)
    whole = runs.read_run(run)
    monkeypatch.setattr(runs, "MOST_STEPS", 300)
    thin = runs.read_run(run)
    assert (whole.steps_per_point, thin.steps_per_point) == (1, 3)
    assert set(thin.loss) <= set(whole.loss) and len(thin.loss) == pytest.approx(
        len(whole.loss) / 3, abs=2
    )
    rates = [rate for _, rate in thin.samples_per_s]
    assert rates == pytest.approx([640.0] * len(rates)), (
        "rates are those of the steps between two points"
    )
    assert (thin.metrics, thin.marks) == (whole.metrics, whole.marks)
    write_report([run], run / "report.html")
    assert f"{len(thin.loss)} logged steps: one in 3 of all" in (run / "report.html").read_text()


def test_a_line_whose_kind_is_not_seen_at_a_glance_is_read(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    loss = {"event": "step", "epoch": 0, "step": 1, "loss": 1.0, "lr": 0.1, "epoch_samples": 1}
    step = event_of({**loss, "elapsed_s": 1.0, "wait_s": 0.0, "time": 5.0}).record()
    turned = dict(reversed(HostLost(host="h", time=6.0).record().items()))
    cut = json.dumps(step)[:60]
    file.write_text(
        "\n".join(map(json.dumps, [step, turned, {"time": 7.0, "event": "later"}])) + f"\n{cut}\n"
    )
    assert [event.time for event in read_events(file)] == [5.0, 6.0, 7.0]
    assert [event.time for event in read_events(file, HostLost)] == [6.0]
    assert [event.time for event in read_events(file, StepLogged)] == [5.0]
