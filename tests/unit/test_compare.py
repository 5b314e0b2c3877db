"""Runs side by side: as a data frame, on the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launcher.advise.compare import metric_columns
from launcher.submit import app
from stoker import runs_dataframe
from stoker.config.loading import load, resolved_yaml
from stoker.errors import UsageError
from stoker.events.summary import Cluster, Host, Metrics, Speed, Summary


def make_run(folder: Path, name: str, acc1: float | None, *overrides: str, cost: Any = None) -> Path:
    job = folder / "job.yaml"
    job.write_text("name: flowers\nparams: {data: rows}\n")
    run = folder / "runs" / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(resolved_yaml(load(job, overrides)))
    best = {} if acc1 is None else {"val/acc1": acc1}
    summary = Summary(name="flowers", status="failed" if acc1 is None else "succeeded", cost=cost)
    summary.speed = Speed(steady_samples_per_s=1234.5, input_wait_pct=38.2)
    summary.metrics = Metrics(best=best, last=best)
    hosts = [Host(host=f"algo-{i}", group="cpu", cpus=4, gpus=0, ip="10.0.0.1") for i in (1, 2)]
    summary.cluster = Cluster(hosts=hosts)
    summary.write(run)
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    cost = {"usd": 1.5, "usd_per_million_samples": 0.42}
    return [
        make_run(tmp_path, "flowers-1", 0.91, cost=cost),
        make_run(tmp_path, "flowers-2", 0.93, "train.lr=0.1", "data.order=exact"),
        make_run(tmp_path, "flowers-3", None, "train.lr=9"),
    ]


def test_classes_of_a_metric_do_not_fill_the_table(tmp_path: Path) -> None:
    frame = runs_dataframe([make_run(tmp_path, "flowers-1", 0.91)])
    for number in range(50):
        frame[f"best/val/iou/class {number}"] = 0.5
    assert metric_columns(frame) == ["best/val/acc1"]
    assert len(metric_columns(frame.drop(columns="best/val/acc1"))) == 6


def test_a_frame_holds_settings_metrics_speed_and_cost(runs: list[Path]) -> None:
    frame = runs_dataframe(runs)
    assert list(frame.index) == ["flowers-1", "flowers-2", "flowers-3"]
    assert frame["config/train.lr"].tolist() == [0.01, 0.1, 9.0]
    assert frame.loc["flowers-2", "best/val/acc1"] == 0.93
    assert frame.loc["flowers-1", ["samples_per_s", "input_wait_pct", "usd", "hosts"]].tolist() == [
        1234.5,
        38.2,
        1.5,
        "2 × cpu",
    ]
    assert frame["best/val/acc1"].isna().tolist() == [False, False, True]


def test_a_folder_of_runs_stands_for_all_and_links_count_once(runs: list[Path]) -> None:
    (runs[0].parent / "latest").symlink_to("flowers-3")
    assert len(runs_dataframe([runs[0].parent, runs[1]])) == 3


def test_the_table_shows_what_differs_and_nothing_else(runs: list[Path]) -> None:
    shown = CliRunner().invoke(app, ["compare", *map(str, runs)])
    assert shown.exit_code == 0
    assert "train.lr=0.1" in shown.output and "data.order=exact" in shown.output
    assert "train.batch_size" not in shown.output
    assert "93.00 %" in shown.output and "1,234" in shown.output and "38 %" in shown.output


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_narrow_terminal_gets_whole_words(
    runs: list[Path], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = CliRunner().invoke(app, ["compare", *map(str, runs)]).output
    assert "…" not in shown
    for word in ("succeeded", "samples/s", "val/acc1", "$/1M samples", "1,234", "0.42"):
        assert word in shown, shown


def test_what_was_not_measured_is_no_zero(tmp_path: Path) -> None:
    run = make_run(tmp_path, "flowers-1", None)
    content = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(content | {"speed": {}}))
    frame = runs_dataframe([run, make_run(tmp_path, "flowers-2", 0.9)])
    assert frame["samples_per_s"].isna().tolist() == [True, False] == frame["input_wait_pct"].isna().tolist()
    shown = CliRunner().invoke(app, ["compare", str(run)]).output
    assert "–" in shown and " 0 %" not in shown


def test_what_is_no_run_is_named(runs: list[Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    shown = CliRunner().invoke(app, ["compare", str(runs[0]), str(empty)])
    assert shown.exit_code == 0 and f"skipped: {empty}" in shown.output
    with pytest.raises(UsageError, match="no such folder"):
        runs_dataframe([tmp_path / "nope"])
    (runs[1] / "summary.json").write_text("{")
    with pytest.raises(UsageError, match=r"flowers-2/summary.json: cannot be read"):
        runs_dataframe(runs)
    (runs[2] / "config.yaml").unlink()
    shown = CliRunner().invoke(app, ["compare", *map(str, runs)])
    assert shown.exit_code == 0 and "flowers-1" in shown.output
    assert "flowers-2/summary.json: cannot be read" in shown.output
    assert "flowers-3/config.yaml: cannot be read: No such file or directory" in shown.output
