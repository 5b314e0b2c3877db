"""What a run shows on the terminal, and where its dashboard is."""

from __future__ import annotations

import importlib.util
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from stoker.config import redaction
from stoker.config.loading import load
from stoker.config.schema import refuse_missing
from stoker.errors import UsageError
from stoker.events.console import Console, closing_rows, metrics_text, report
from stoker.events.kinds import EpochEnded, ModelWritten, RecordQuarantined, StepLogged, event_of
from stoker.events.summary import Summary
from stoker.hosts.cluster import write_token
from stoker_launcher.job import open_job
from stoker_launcher.places.sagemaker.training_job import METRICS, metrics_of


def test_equal_reasons_are_one_line_per_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(epochs=2, log=tmp_path / "console.log")
    for epoch in range(2):  # the second one meets all but one of its bad records again
        for number in range(60 + epoch):
            reason = "KeyError: 'mask'" if number else "ValueError: too small"
            console.on_event(
                RecordQuarantined(split="train", epoch=epoch, key=f"r{number}", reason=reason)
            )
        if not epoch:
            console.on_event(EpochEnded(epoch=epoch, step=1, metrics={}))
    console.close(Summary(name="job", place="local", started=""))
    expected = [
        "quarantined train record r0: ValueError: too small",
        "quarantined train record r1: KeyError: 'mask'",
        "quarantined 58 more train records like r1: KeyError: 'mask'",
        "epoch 1/2 done: ",
        "quarantined 1 more train record like r1: KeyError: 'mask'",
    ]
    assert capsys.readouterr().out.splitlines() == expected
    assert (tmp_path / "console.log").read_text().splitlines() == expected


def test_the_closing_table_shows_brackets_as_they_are_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redaction, "_known", {"s3cret-token"})
    console = Console(1, tmp_path / "console.log")
    console.table([("run", "/data/[red]/s3cret-token")])
    assert capsys.readouterr().out.split() == ["run", "/data/[red]/(redacted)"]
    assert (tmp_path / "console.log").read_text() == "  run  /data/[red]/(redacted)\n"


HOST_LOST = [{"event": kind} for kind in ("host_lost", "work_repeated", "work_repeated", "note")]
RECOVERED = [{"event": "recovered", "seconds": took, "data_s": 0.1} for took in (0.52, 6.1)]


@pytest.mark.parametrize(
    ("row", "events", "text"),
    [
        ("hosts", HOST_LOST, "1 lost, 2 work items done again"),
        ("restarts", RECOVERED, "2 after lost train workers, 6.6 s without training"),
    ],
)
def test_what_losses_cost_is_told(row: str, events: list[dict[str, Any]], text: str) -> None:
    summary = Summary(name="job", place="local")
    assert row not in dict(closing_rows(summary, "run"))
    summary.events = events
    assert dict(closing_rows(summary, "run"))[row] == text


def test_the_closing_line_has_the_time_of_this_start(tmp_path: Path) -> None:
    shown: list[str] = []
    console = Console(1)
    console.line = shown.append  # type: ignore[method-assign]
    report(Summary(name="flowers", seconds=61.0), console, tmp_path, 0, took_s=8.0)
    assert shown[0] == "flowers: done in 8 s; trained before, in 61 s"
    report(Summary(name="flowers", seconds=8.0), console, tmp_path, 0, took_s=8.0)
    assert "flowers: done in 8 s" in shown


def test_a_stop_is_told_once_when_asked_and_once_when_done(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    console = Console(3)
    for kind in ("stop", "stopped"):
        console.on_event(event_of({"event": kind, "reason": "Ctrl-C"}))
    report(Summary(status="interrupted", error="Ctrl-C"), console, tmp_path, 130, took_s=8.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == ["stop: Ctrl-C", "stopped: Ctrl-C"] and lines[-1].startswith("details: ")
    console.on_event(event_of({"event": "stopped", "reason": "train.max_steps reached at step 9"}))
    assert capsys.readouterr().out == "stopped: train.max_steps reached at step 9\n"


def test_every_graph_finds_its_figure_in_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(epochs=8)
    figures = {"epoch_samples": 64, "elapsed_s": 2.0, "wait_s": 1.0}
    console.on_event(StepLogged(epoch=0, step=1, loss=2.3412, lr=0.1, **figures))
    metrics = {
        "train/loss": 0.5,
        "val/loss": 0.25,
        "val/acc1": 0.9861,
        "perf/samples_per_s": 2000.0,
    }
    console.on_event(EpochEnded(epoch=0, step=1, metrics={**metrics, "perf/input_wait_pct": 3.0}))
    best = {"metric": "val/acc1", "value": 0.99, "mode": "max"}
    console.on_event(ModelWritten(path="m", checkpoint="c", epoch=3, step=9, whole=True, **best))
    graphs = metrics_of(open_job(load(None, ["name=flowers", "params.data=flowers"])))
    text = capsys.readouterr().out
    assert metrics_text({"val/acc1": 0.9861}) == "val/acc1 98.61 %"
    found = {
        name: [float(value) for value in re.findall(pattern, text)]
        for name, pattern in graphs.items()
    }
    assert all(found.values()), found
    assert 98.61 in [value for values in found.values() for value in values]
    assert 50.0 in [value for values in found.values() for value in values]
    assert "exported: epoch 3 by val/acc1" in text
    assert 99.0 not in [value for values in found.values() for value in values], (
        "no value of another epoch"
    )


def test_a_recipes_own_metrics_are_graphed_and_a_scripts_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "from stoker.recipe import Recipe\n"
        "class Own(Recipe):\n"
        "    def metrics(self):\n"
        "        return {'miou': None, 'top.acc1': None}\n"
    )
    graphs = metrics_of(open_job(load(None, ["name=own", "recipe=own:Own"]), tmp_path))
    assert graphs.keys() - METRICS.keys() == {"val:miou", "val:top.acc1_pct"}
    line = metrics_text({"val/miou": 0.5712, "val/top.acc1": 0.25})
    found = [re.findall(graphs[name], line) for name in ("val:miou", "val:top.acc1_pct")]
    assert found == [["0.5712"], ["25.00"]]
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert metrics_of(open_job(load(None, ["name=own", "script=train.py"]))) == METRICS


def test_without_its_packages_one_line_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def absent(name: str, *more: Any) -> Any:
        return None if name in ("aiohttp_cors", "opencensus") else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    with pytest.raises(UsageError) as refused:
        refuse_missing(load(None, ["cluster.dashboard=true"]).config)
    (problem,) = refused.value.problems
    assert problem.startswith("cluster.dashboard needs packages")
    assert problem.endswith("pip install 'ray[default]'")
    refuse_missing(load(None, []).config)


def test_the_token_is_for_this_users_eyes_alone(tmp_path: Path) -> None:
    file = tmp_path / "run" / "token"
    write_token(file, "a" * 64)
    file.chmod(0o644)
    write_token(file, "b" * 64)
    assert file.read_text() == "b" * 64 + "\n" and stat.S_IMODE(file.stat().st_mode) == 0o600
