"""What a script tells its run: `stoker.log` and `stoker.checkpoint_dir`, in a job and outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker import session
from stoker.config.loading import load, resolved_yaml
from stoker.events.bottleneck import verdict
from stoker.events.console import Console, closing_rows
from stoker.events.kinds import event_of
from stoker.events.recorder import Recorder
from stoker.events.report import write_report
from stoker.events.sinks import Scalars
from stoker.events.summary import Summary, read_summary
from stoker_launcher.commands import standing
from stoker_launcher.run_directory import PastRun


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", session.EVENTS_VARIABLE, session.CHECKPOINTS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(session, "_last_step", 0)
    monkeypatch.chdir(tmp_path)


def in_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int = 0) -> Path:
    events = tmp_path / "events"
    monkeypatch.setenv(session.EVENTS_VARIABLE, str(events))
    monkeypatch.setenv("RANK", str(rank))
    return events


def test_a_name_that_stoker_lacks_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lgo'"):
        _ = stoker.lgo


def test_outside_a_job_log_prints_a_line_and_checkpoints_lie_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stoker.log({"loss": torch.tensor(0.5), "lr": np.float32(0.25)})
    stoker.log({"loss": float("nan")}, step=7)
    assert capsys.readouterr().out == "step 1  loss 0.5  lr 0.25\nstep 7  loss nan\n"
    run = tmp_path / "run" / "checkpoints"
    for folder in (tmp_path / "checkpoints", run):
        assert stoker.checkpoint_dir() == folder and folder.is_dir()
        monkeypatch.setenv(session.CHECKPOINTS_VARIABLE, str(run))  # as in a job


def test_in_a_job_log_is_an_event_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events = in_a_job(monkeypatch, tmp_path)
    stoker.log({"loss": 1}, step=5)
    stoker.log({"loss": 2})
    found = [json.loads(line) for line in events.read_text().splitlines()]
    assert [(e["event"], e["step"], e["metrics"]) for e in found] == [
        ("metrics", 5, {"loss": 1.0}),
        ("metrics", 6, {"loss": 2.0}),
    ]
    in_a_job(monkeypatch, tmp_path, rank=1)
    stoker.log({"loss": 3})
    assert len(events.read_text().splitlines()) == 2
    stoker.log({"loss": 3}, rank=None)
    assert json.loads(events.read_text().splitlines()[-1])["metrics"] == {"rank-1/loss": 3.0}


@pytest.mark.parametrize("value", ["0.5", None, torch.ones(2), [1]])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"stoker\.log: 'loss' is a"):
        stoker.log({"loss": value})


def test_a_scripts_events_become_summary_files_report_and_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.events.console.EVERY_S", 60.0)
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    resolved = load(None, ["script=train.py", 'args=["--lr", "0.1"]'])
    (run_dir / "config.yaml").write_text(resolved_yaml(resolved))
    summary = Summary(name="train", script="train.py", args=["--lr", "0.1"], train_workers=2)
    recorder, console, scalars = Recorder(run_dir, summary, 0.0), Console(1), Scalars()
    events: list[dict[str, Any]] = [
        {"event": "output", "rank": 0, "text": "begin\n 10%\r 20%\r 30%\n\nlast"},
        {"event": "output", "rank": 1, "text": "other\n"},
        {"event": "metrics", "rank": 0, "step": 10, "metrics": {"loss": 2.0, "acc": 0.5}},
        {"event": "metrics", "rank": 0, "step": 20, "metrics": {"loss": 1.0, "lr": None}},
    ]
    for number, event in enumerate(events):
        stamped = {"time": float(number), **event}
        recorder.on_event(event_of(stamped))
        console.on_event(event_of(stamped))
        drawn = scalars.of(event_of(stamped))
    assert (drawn, scalars.step) == ({"loss": 1.0}, 20)
    assert capsys.readouterr().out == "begin\n 30%\nlast\nstep 10  loss 2  acc 0.5\n"
    summary.status = "succeeded"
    recorder.close(summary)
    assert (run_dir / "logs/script-rank-0.log").read_bytes() == b"begin\n 10%\r 20%\r 30%\n\nlast"
    assert (run_dir / "logs/script-rank-1.log").read_text() == "other\n"
    assert "begin" not in (run_dir / "events.jsonl").read_text()
    found = read_summary(run_dir / "summary.json")
    assert (found.script, found.args, found.steps) == ("train.py", ["--lr", "0.1"], 20)
    assert found.metrics.last == {"loss": 1.0, "acc": 0.5}
    rows = dict(closing_rows(found, "run"))
    found.metrics.last |= {"val/acc": 0.41666}
    for best, text in ((0.41666, None), (0.5, "0.5")):
        found.metrics.best["val/acc"] = best
        assert dict(closing_rows(found, "run")).get("best val/acc") == text, (
            "not the same value twice"
        )
    assert rows["loss"] == "1" and not {"samples/s", "input wait", "records"} & rows.keys()
    assert verdict(found).headline == "own script: the time it waits for data was not measured"
    assert PastRun(run_dir).status() == "succeeded  step 20  loss 1  acc 0.5", (
        "a script's epochs are unknown"
    )
    assert standing(run_dir) == [], "nothing that is not in the status"
    write_report([run_dir], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert ">loss</h" in page and ">acc</h" in page
    assert "Quarantined records" not in page, "nobody counted them"
