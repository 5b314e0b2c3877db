"""Quarantined records on the screen: the first of each reason, and how many more there were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.events.console import PlainConsole, closing_rows
from stoker.events.kinds import EpochEnded, RecordQuarantined
from stoker.events.report.panels import of_run
from stoker.events.runs import read_run
from stoker.events.summary import Records, Summary

pytestmark = pytest.mark.unit


def test_equal_reasons_are_one_line_per_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = PlainConsole(epochs=2, log=tmp_path / "console.log")
    for epoch in range(2):  # the second one meets all but one of its bad records again
        for number in range(60 + epoch):
            reason = "KeyError: 'mask'" if number else "ValueError: too small"
            console.on_event(RecordQuarantined(split="train", epoch=epoch, key=f"r{number}", reason=reason))
        if not epoch:
            console.on_event(EpochEnded(epoch=epoch, step=1, metrics={}))
    console.close(Summary(name="job", backend="local", started=""))
    expected = [
        "quarantined train record r0: ValueError: too small",
        "quarantined train record r1: KeyError: 'mask'",
        "quarantined 58 more train records like r1: KeyError: 'mask'",
        "epoch 1/2 done: ",
        "quarantined 1 more train record like r1: KeyError: 'mask'",
    ]
    assert capsys.readouterr().out.splitlines() == expected
    assert (tmp_path / "console.log").read_text().splitlines() == expected


def test_a_bad_record_of_every_epoch_is_one_record(tmp_path: Path) -> None:
    summary = Summary(name="job", backend="local")
    summary.records = Records(read=432, trained=429, quarantined=3)
    rows = [{"split": "train", "epoch": epoch, "key": "square/img_007.jpg"} for epoch in range(3)]
    rows.append({"split": "val", "epoch": 0, "key": "square/img_001.jpg"})
    file = tmp_path / "quarantine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    books = dict(closing_rows(summary, str(tmp_path)))["records"]
    assert books == "432 read = 429 trained + 3 quarantined (1 record in 3 epochs) + 0 remaining"
    summary.write(tmp_path)
    (found,) = [panel for panel in of_run(read_run(tmp_path)) if panel.title == "Records in and out"]
    assert "3 quarantined (1 record in 3 epochs)" in found.caption
    summary.records.quarantined = 5  # two of them in an earlier run directory
    assert "5 quarantined + 0" in dict(closing_rows(summary, str(tmp_path)))["records"]


def test_what_lost_hosts_cost_is_told(tmp_path: Path) -> None:
    summary = Summary(name="job", backend="local")
    assert "hosts" not in dict(closing_rows(summary, str(tmp_path)))
    summary.events = [{"event": kind} for kind in ("host_lost", "work_repeated", "work_repeated", "note")]
    assert dict(closing_rows(summary, str(tmp_path)))["hosts"] == "1 lost, 2 work items done again"


def test_what_lost_train_workers_cost_is_told(tmp_path: Path) -> None:
    summary = Summary(name="job", backend="local")
    assert "restarts" not in dict(closing_rows(summary, str(tmp_path)))
    summary.events = [{"event": "recovered", "seconds": took, "data_s": 0.1} for took in (0.52, 6.1)]
    text = dict(closing_rows(summary, str(tmp_path)))["restarts"]
    assert text == "2 after lost train workers, 6.6 s without training"
