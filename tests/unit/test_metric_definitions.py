"""The graphs of CloudWatch are cut out of the lines that the head prints: the two must fit."""

from __future__ import annotations

import re

import pytest

from launcher.sagemaker.request import METRICS
from stoker.tracking.console import PlainConsole, metrics_text


def test_every_graph_finds_its_figure_in_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console = PlainConsole(epochs=8)
    step = {"event": "step", "epoch": 0, "step": 1, "loss": 2.3412, "epoch_samples": 64, "elapsed_s": 2.0}
    console.take({**step, "wait_s": 1.0})
    metrics = {"train/loss": 0.5, "val/loss": 0.25, "val/acc1": 0.9861, "perf/samples_per_s": 2000.0}
    console.take({"event": "epoch", "epoch": 0, "metrics": {**metrics, "perf/input_wait_pct": 3.0}})
    text = capsys.readouterr().out
    assert metrics_text({"val/acc1": 0.9861}) == "val/acc1 98.61 %"
    found = {name: [float(value) for value in re.findall(pattern, text)] for name, pattern in METRICS.items()}
    assert all(found.values()), found
    assert 98.61 in [value for values in found.values() for value in values]
    assert 50.0 in [value for values in found.values() for value in values]
