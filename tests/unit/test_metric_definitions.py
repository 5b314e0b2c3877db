"""The graphs of CloudWatch are cut out of the lines that the head prints: the two must fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.job import open_job
from launcher.places.sagemaker.training_job import METRICS, metrics_of
from stoker.config.loading import load
from stoker.events.console import PlainConsole, metrics_text
from stoker.events.kinds import EpochEnded, ModelWritten, StepLogged


def test_every_graph_finds_its_figure_in_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console = PlainConsole(epochs=8)
    figures = {"epoch_samples": 64, "elapsed_s": 2.0, "wait_s": 1.0}
    console.on_event(StepLogged(epoch=0, step=1, loss=2.3412, lr=0.1, **figures))
    metrics = {"train/loss": 0.5, "val/loss": 0.25, "val/acc1": 0.9861, "perf/samples_per_s": 2000.0}
    console.on_event(EpochEnded(epoch=0, step=1, metrics={**metrics, "perf/input_wait_pct": 3.0}))
    best = {"metric": "val/acc1", "value": 0.99, "mode": "max"}
    console.on_event(ModelWritten(path="m", checkpoint="c", epoch=3, step=9, whole=True, **best))
    graphs = metrics_of(open_job(load(None, ["name=flowers", "params.data=flowers"])))
    text = capsys.readouterr().out
    assert metrics_text({"val/acc1": 0.9861}) == "val/acc1 98.61 %"
    found = {name: [float(value) for value in re.findall(pattern, text)] for name, pattern in graphs.items()}
    assert all(found.values()), found
    assert 98.61 in [value for values in found.values() for value in values]
    assert 50.0 in [value for values in found.values() for value in values]
    assert "exported: epoch 3 by val/acc1" in text
    assert 99.0 not in [value for values in found.values() for value in values], "no value of another epoch"


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
