"""report.html and compare: every kind of run renders, safely, small and quickly, or side by side."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from recorded import record
from typer.testing import CliRunner

from stoker import runs_dataframe
from stoker.config.loading import load, resolved_yaml
from stoker.errors import UsageError
from stoker.events.report import key_figures, settings_of, write_report
from stoker.events.runs import read_run
from stoker.events.summary import Cluster, Host, Metrics, Speed, Summary, read_summary
from stoker_launcher.advise.compare import metric_columns
from stoker_launcher.command_line import app
from stoker_launcher.commands import last_progress
from stoker_launcher.run_directory import is_lost


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.titles: list[str] = []
        self.text = text
        self.calls = re.findall(r"(?:src|href)=\"(?!data:|#)([^\"]*)\"", text)
        self.charts = text.count('<svg viewBox="0 0 420')
        self.headings = re.findall(r"<h[23]>([^<]*)</h[23]>", text)


def page_of(*runs: Path) -> Page:
    target = runs[0] / "report.html"
    write_report(runs, target)
    return Page(target.read_text())


def test_start_up_records_and_the_part_that_limits_are_charts_of_their_own(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 200)
    summary = json.loads((run / "summary.json").read_text())
    cpus = sum(host["cpus"] for host in summary["cluster"]["hosts"])
    busy = summary["speed"]["steady_samples_per_s"] / (1000 * cpus)
    summary["bottleneck"] = "cpu"
    summary["records"] |= {"read": 100, "trained": 97, "quarantined": 2, "remainder": 1}
    summary["chain"] = [{"stage": "decode", "cpu_ms_per_sample": 0.8 / busy, "bytes_out": 1}]
    phases = {"cluster formed": 6.0, "data opened": 6.01, "model built": 8.0, "first step": 9.0}
    terms = {"compute": 99.0, "wait_production": 0.4, "host_to_device": 0.6}
    summary["startup"], summary["speed"]["step_terms_ms"] = phases, terms
    (run / "summary.json").write_text(json.dumps(summary))
    text = page_of(run).text
    assert "100 read = 97 trained + 2 quarantined + 1 left over." in text
    assert "The first step ended 9 s after the start" in text and ">phase</th>" in text
    assert "> 6 s · 67 %</tspan>" in text and "> 1.99 s · 22 %</tspan>" in text
    assert "Mean step: 100 ms" in text and "> 99 ms · 99 %</tspan>" in text
    assert "<td>0.4 %</td>" in text and text.count("limits the run") == 1
    summary["chain"][0]["cpu_ms_per_sample"] /= 20
    (run / "summary.json").write_text(json.dumps(summary))
    assert "limits the run" not in page_of(run).text, "the chain could do far more"


def test_a_run_shows_all_that_was_measured(tmp_path: Path) -> None:
    lost = {"time": 15.0, "event": "host_lost", "host": "algo-3", "group": "cpu", "node": "n"}
    bad = {"event": "quarantined", "split": "train", "epoch": 0, "key": "a.jpg", "reason": "cut"}
    bad["time"] = 15.0
    run = record(tmp_path / "run", 200, extra=(lost, bad))
    content = json.loads((run / "summary.json").read_text())
    content["tracking"] = {"mlflow": {"url": "http://127.0.0.1:5000/#/experiments/1/runs/a"}}
    (run / "summary.json").write_text(json.dumps(content))
    page = page_of(run)
    assert "http://127.0.0.1:5000/#/experiments/1/runs/a" in page.calls
    charts = "Loss,val/acc1,Step time breakdown,Throughput limits,Throughput,Input wait"
    charts += ",The chain, stage by stage,Start-up"
    tables = "Events,Quarantined records,Hosts,Configuration,More"
    assert ",".join(page.headings) == f"{charts},{tables}"
    assert "38 %" in page.text and "host lost algo-3" in page.text
    assert re.search(r"train</td><td[^>]*>1</td><td[^>]*>a\.jpg", page.text), "epochs count from 1"
    assert "command line" in page.text, "where a value came from"
    assert page.text.count("<title") == page.text.count("</title>")


def test_nothing_is_fetched_and_nothing_is_taken_as_markup(tmp_path: Path) -> None:
    evil = {"time": 15.0, "event": "host_lost", "host": "<script>alert(1)</script>", "node": "n"}
    page = page_of(record(tmp_path / "run", 20, extra=(evil,)))
    assert "<script" not in page.text and "<b>rows</b>" not in page.text
    assert all("//" not in call for call in page.calls)
    assert "@import" not in page.text and "url(http" not in page.text


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        (0, {"status": "failed"}),
        (1, {"epochs": 1}),
        (30, {"status": "interrupted"}),
        (40, {"gpu": False}),
    ],
)
def test_odd_runs_render(tmp_path: Path, steps: int, options: dict[str, object]) -> None:
    page = page_of(record(tmp_path / "run", steps, **options))  # type: ignore[arg-type]
    assert page.charts >= (1 if steps == 0 else 4)
    assert ("in 1 logged step." in page.text) == (steps == 1)
    assert ("the loss is NaN" in page.text) == (options.get("status") == "failed")


STEP = {"time": 20, "event": "step", "epoch_samples": 1, "elapsed_s": 1, "wait_s": 0}
CRIPPLED_EVENTS: list[dict[str, Any]] = [
    {**STEP, "epoch": None, "step": 5, "loss": 1},
    {**STEP, "epoch": [], "step": "x", "loss": {}, "terms_ms": 3},
    {"time": 20, "event": "epoch", "epoch": 1, "step": 5, "metrics": {"val/x": "a", "val/y": None}},
    {"time": 20, "event": "host_lost", "host": ["a"]},
    {"time": float("inf"), "event": "step"},
    {"time": 20, "event": 7},
]


def test_files_that_are_absent_cut_short_or_of_another_shape_are_no_obstacle(
    tmp_path: Path,
) -> None:
    run = record(tmp_path / "run", 30)
    events = run / "events.jsonl"
    more = "".join(f"{json.dumps(event)}\n" for event in CRIPPLED_EVENTS)
    events.write_text(f"{events.read_text()[:-25]}\nnot json\n[]\n{more}")
    (run / "config.yaml").unlink()
    assert page_of(run).charts >= 5
    events.unlink()
    assert "Hosts" in page_of(run).headings


@pytest.mark.long
def test_ten_thousand_steps_and_three_hundred_hosts_stay_small_and_quick(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 10_000, epochs=90, hosts=300)
    started = time.process_time()
    page = page_of(run)
    assert time.process_time() - started < 20, "not quadratic"
    assert len(page.text) < 1_000_000


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    runs = [record(tmp_path / name, 50, hosts=n) for name, n in (("a", 1), ("b", 3))]
    shown = CliRunner().invoke(app, ["report", *map(str, runs), "-o", str(tmp_path / "both.html")])
    assert shown.exit_code == 0, shown.output
    page = Page((tmp_path / "both.html").read_text())
    assert page.headings[0] == "Runs side by side"
    assert "1 × gpu + 2 × cpu" in page.text
    (tmp_path / "latest").symlink_to("a")
    assert "Runs side by side" not in page_of(runs[0], tmp_path / "latest").headings, "one run"


def test_status_tells_the_verdict(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 100)
    shown = CliRunner().invoke(app, ["status", str(run)])
    assert shown.exit_code == 0 and "input-bound: 38 %" in shown.output
    assert "val/loss 0.6000  val/acc1 75.00 %" in shown.output, "as on the console"
    for text in (shown.output, page_of(run).text):
        assert "0.40 per 1M samples at the steady rate" in text, (
            "the cost of the run also has its start"
        )


def test_a_run_in_its_first_epoch_has_a_verdict_and_later_ones_count_the_pass_under_way(
    tmp_path: Path,
) -> None:
    """100 steps of the only epoch's 1,000; then 150 where an epoch has 100: no `pass` tells of the last."""
    for steps, per_epoch in ((100, 1000), (150, 100)):
        run = record(tmp_path / f"run{steps}", steps, status="running", per_epoch=per_epoch)
        told = read_summary(run / "summary.json")
        assert told.speed.steady_samples_per_s == pytest.approx(640, rel=0.01)
        assert told.speed.input_wait_pct == pytest.approx(38, abs=0.1)
        assert sum(told.speed.step_terms_ms.values()) == pytest.approx(100, rel=0.01)
        assert told.bottleneck == "network", (
            "the hosts that preprocess are not busy: they wait to read"
        )
        shown = CliRunner().invoke(app, ["status", str(run)])
        assert "input-bound: 38 %" in shown.output, shown.output


def test_a_metric_that_is_no_number_is_left_out_and_the_run_stays_readable(tmp_path: Path) -> None:
    metrics = {"train/loss": 0.5, "val/auroc": float("nan"), "val/loss": float("inf")}
    odd = {"time": 30.0, "event": "epoch", "epoch": 1, "step": 100, "metrics": metrics}
    run = record(tmp_path / "run", 100, extra=(odd,))
    told = read_summary(run / "summary.json")
    assert told.metrics.last == {"train/loss": 0.5}
    assert "val/auroc" not in told.metrics.best and told.metrics.best["val/loss"] == pytest.approx(
        0.6
    )
    for verb in ("report", "status", "compare"):
        shown = CliRunner().invoke(app, [verb, str(run)])
        assert shown.exit_code == 0, shown.output


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chain", [{"stage": "read"}, {"stage": "x", "cpu_ms_per_sample": None, "bytes_out": "a"}]),
        ("chain", [{"cpu_ms_per_sample": 1.0}, {"stage": 5, "cpu_ms_per_sample": NAN}]),
        ("cost", {"usd": "much", "usd_per_million_samples": []}),
        ("speed", {"steady_samples_per_s": NAN, "step_terms_ms": {"compute": None}}),
        ("speed", {"steady_samples_per_s": 5.0, "step_terms_ms": {"compute": INF}}),
        ("metrics", {"last": {"val/acc1": None}, "best": {"val/acc1": None}}),
        ("tracking", {"mlflow": {"url": "javascript:alert(1)"}}),
        ("tracking", {"mlflow": 5}),
        ("steps", "many"),
    ],
)
@pytest.mark.long
def test_a_summary_of_another_shape_is_shown_or_refused_in_one_line(
    tmp_path: Path, key: str, value: object
) -> None:
    run = record(tmp_path / "run", 30)
    content = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**content, key: value}))
    for verb in ("report", "status", "compare"):
        shown = CliRunner().invoke(app, [verb, str(run)])
        if shown.exit_code:
            assert isinstance(shown.exception, UsageError), shown.exception
            assert len(shown.exception.problems) == 1 and key in str(shown.exception)
        elif verb == "report":
            assert "javascript:" not in (run / "report.html").read_text()


def test_status_says_when_the_figures_cannot_be_read(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 30)
    (run / "summary.json").write_text("{")
    shown = CliRunner().invoke(app, ["status", str(run)])
    assert "no figures" in shown.output and shown.exit_code == 0


class EndlessLog:
    id = "ray:endless"
    over = False

    def logs(self, follow: bool) -> Iterator[str]:
        yield "epoch 1/2  step 10  loss 1.0  500 samples/s"
        while not self.over:
            time.sleep(0.01)
            yield "more"


def test_status_of_a_remote_run_reads_its_log_no_longer_than_it_may() -> None:
    log = EndlessLog()
    told = last_progress(log, timeout_s=3)
    log.over = True
    assert "500 samples/s" in told[0] and "use `logs` for all of it" in told[1]


def make_run(
    folder: Path, name: str, acc1: float | None, *overrides: str, cost: Any = None
) -> Path:
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


def test_the_table_shows_what_differs_and_nothing_else(runs: list[Path]) -> None:
    shown = CliRunner().invoke(app, ["compare", *map(str, runs)])
    assert shown.exit_code == 0
    assert "train.lr=0.1" in shown.output and "data.order=exact" in shown.output
    assert "train.batch_size" not in shown.output
    assert "93.00 %" in shown.output and "1,234" in shown.output and "38 %" in shown.output
    (runs[0].parent / "latest").symlink_to("flowers-3")
    assert len(runs_dataframe([runs[0].parent, runs[1]])) == 3, "links count once"


def test_numbers_of_a_configuration_are_shown_whole(tmp_path: Path) -> None:
    given = ("train.lr=0.12345 train.max_steps=123456", "train.lr=0.12346", "train.max_steps=7")
    names = [f"flowers-{number}" for number in range(3)]
    runs = [make_run(tmp_path, n, 0.9, *w.split()) for n, w in zip(names, given, strict=True)]
    shown = CliRunner().invoke(app, ["compare", *map(str, runs)]).output
    steps = [f"train.max_steps={text}" for text in ("123456", "–", "7")]
    for text in ("train.lr=0.12345", "train.lr=0.12346", *steps):
        assert text in shown.split(), shown
    (runs[0] / "config.yaml").write_text("train: {max_steps: 7}\n")
    assert runs_dataframe(runs)["config/train.lr"].dtype == float, "also beside a run that has none"


@pytest.mark.parametrize("alive", [True, False])
def test_a_killed_run_is_not_shown_as_running(tmp_path: Path, alive: bool) -> None:
    run = make_run(tmp_path, "flowers-1", 0.9)
    content = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(content | {"status": "running"}))
    hold = f"from pathlib import Path; from stoker.hosts.run_lock import hold; hold(Path({str(run)!r}))"
    command = [sys.executable, "-c", f"{hold}; print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        if not alive:
            process.kill()
            process.wait()
        shown = CliRunner().invoke(app, ["compare", str(run)]).output
        assert ("failed" in shown) == ("running" not in shown) == (not alive)
        assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0
        page = (run / "report.html").read_text()
        assert ("the process exited without a result" in page) == (not alive)
        assert ("✗ failed" in page) == ("… running" not in page) == (not alive)
        copy = shutil.copytree(run, tmp_path / "copies" / run.name)
        assert not is_lost(copy), "nobody knows of a copy"
        run.rename(tmp_path / "renamed")
        assert is_lost(tmp_path / "renamed") == (not alive)
        process.kill()


def test_keys_of_mappings_are_settings_of_the_report(tmp_path: Path) -> None:
    run, job = make_run(tmp_path, "flowers-1", 0.9), tmp_path / "job.yaml"
    job.write_text("sagemaker: {prices: {ml.g5.xlarge: 9.9}}\nparams: {sizes: {a: 0, b: [1]}}\n")
    (run / "config.yaml").write_text(resolved_yaml(load(job, ["vertex.prices={c: 1}"])))
    found = {key: value for key, value, _ in settings_of(read_run(run))}
    assert found == {
        "sagemaker.prices.ml.g5.xlarge": "9.9",
        "params.sizes.a": "0",
        "params.sizes.b": "[1]",
        "vertex.prices": "{'c': 1.0}",
    }


def test_a_model_that_is_not_the_best_epochs_has_its_own_value(tmp_path: Path) -> None:
    summary = read_summary(make_run(tmp_path, "flowers-1", 0.95) / "summary.json")
    chosen = {"checkpoint": "step-2", "epoch": 2, "step": 2, "metric": "val/acc1", "mode": "max"}
    for value, note in (
        (0.95, "best, the model: epoch 2"),
        (0.9, "best, the model: epoch 2, 0.9"),
    ):
        summary.model_from = chosen | {"value": value}
        assert key_figures(summary)[0] == ("val/acc1", "0.95", note)


def test_what_was_not_measured_is_no_zero(tmp_path: Path) -> None:
    run = make_run(tmp_path, "flowers-1", None)
    content = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(content | {"speed": {}}))
    frame = runs_dataframe([run, make_run(tmp_path, "flowers-2", 0.9)])
    assert (
        frame["samples_per_s"].isna().tolist()
        == [True, False]
        == frame["input_wait_pct"].isna().tolist()
    )
    shown = CliRunner().invoke(app, ["compare", str(run)]).output
    assert "–" in shown and " 0 %" not in shown


def test_what_is_no_run_is_named(runs: list[Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    shown = CliRunner().invoke(app, ["compare", str(runs[0]), str(empty)])
    assert shown.exit_code == 0 and f"skipped: {empty}" in shown.output
    with pytest.raises(UsageError, match="no such folder"):
        runs_dataframe([tmp_path / "nope"])
    with pytest.raises(UsageError, match="not a run directory"):
        write_report([tmp_path], tmp_path / "report.html")
    (runs[1] / "summary.json").write_text("{")
    with pytest.raises(UsageError, match=r"flowers-2/summary.json: cannot be read"):
        runs_dataframe(runs)
    (runs[2] / "config.yaml").unlink()
    shown = CliRunner().invoke(app, ["compare", *map(str, runs)])
    assert shown.exit_code == 0 and "flowers-1" in shown.output
    assert "flowers-2/summary.json: cannot be read" in shown.output
    assert "flowers-3/config.yaml: cannot be read: No such file or directory" in shown.output
