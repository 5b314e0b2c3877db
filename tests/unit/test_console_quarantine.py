"""Quarantined records on the screen: the first of each reason, and how many more there were."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.tracking.console import PlainConsole
from stoker.tracking.summary import Summary

pytestmark = pytest.mark.unit


def test_equal_reasons_are_one_line_per_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = PlainConsole(epochs=2, log=tmp_path / "console.log")
    for epoch in range(2):
        for number in range(60):
            reason = "KeyError: 'mask'" if number else "ValueError: too small"
            bad = {"event": "quarantined", "split": "train", "key": f"r{number}", "reason": reason}
            console.take(bad)
        if not epoch:
            console.take({"event": "epoch", "epoch": epoch, "metrics": {}})
    console.close(Summary(name="job", backend="local", started=""))
    expected = [
        "quarantined train record r0: ValueError: too small",
        "quarantined train record r1: KeyError: 'mask'",
        "quarantined 58 more train records like r1: KeyError: 'mask'",
        "epoch 1/2 done: ",
        "quarantined 1 more train record like r0: ValueError: too small",
        "quarantined 59 more train records like r1: KeyError: 'mask'",
    ]
    assert capsys.readouterr().out.splitlines() == expected
    assert (tmp_path / "console.log").read_text().splitlines() == expected
