"""report.html: every kind of run renders, safely, small and quickly."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded import record
from typer.testing import CliRunner

from launcher.commands import last_progress
from launcher.submit import app
from stoker.errors import UsageError
from stoker.events import charts
from stoker.events.report import panels_of, write_report
from stoker.events.runs import read_run
from stoker.events.summary import read_summary


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


def test_a_negative_value_is_shown_as_it_is() -> None:
    """As of MeanAveragePrecision, where -1 stands for none."""
    drawn = charts.bars("t", "d", [charts.Bar("none", -1.0), charts.Bar("half", 0.5)], "")
    assert "> -1</tspan>" in drawn and "cut" not in drawn
    widths = [float(width) for width in re.findall(r'width="([\d.]+)"', drawn)]
    assert widths[0] < 2 < 300 < widths[1]


def test_start_up_records_and_the_part_that_limits_are_charts_of_their_own(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 200)
    summary = json.loads((run / "summary.json").read_text())
    summary["records"] |= {"read": 100, "trained": 97, "quarantined": 2, "remainder": 1}
    summary["bottleneck"] = "cpu"
    cpus = sum(host["cpus"] for host in summary["cluster"]["hosts"])
    busy = summary["speed"]["steady_samples_per_s"] / (1000 * cpus)
    summary["chain"] = [{"stage": "decode", "cpu_ms_per_sample": 0.8 / busy, "bytes_out": 1}]
    summary["startup"] = {"cluster formed": 6.0, "data opened": 6.01, "model built": 8.0, "first step": 9.0}
    summary["speed"]["step_terms_ms"] = {"compute": 99.0, "wait_production": 0.4, "host_to_device": 0.6}
    (run / "summary.json").write_text(json.dumps(summary))
    page = page_of(run)
    assert "100 read = 97 trained + 2 quarantined + 1 left over." in page.text
    assert "The first step ended 9 s after the start" in page.text
    assert "<th>phase</th>" in page.text.replace(' scope="col"', "") and ">until<" not in page.text
    assert "Mean step: 100 ms" in page.text
    assert "> 6 s · 67 %</tspan>" in page.text and "> 1.99 s · 22 %</tspan>" in page.text
    assert "> 99 ms · 99 %</tspan>" in page.text and "<td>0.4 %</td>" in page.text
    assert page.text.count("limits the run") == 1
    summary["chain"][0]["cpu_ms_per_sample"] /= 20
    (run / "summary.json").write_text(json.dumps(summary))
    assert "limits the run" not in page_of(run).text, "the chain could do far more"


def test_a_run_shows_all_that_was_measured(tmp_path: Path) -> None:
    lost = {"time": 15.0, "event": "host_lost", "host": "algo-3", "group": "cpu", "node": "n"}
    bad = {
        "time": 15.0,
        "event": "quarantined",
        "split": "train",
        "epoch": 0,
        "key": "a.jpg",
        "reason": "cut",
    }
    run = record(tmp_path / "run", 200, extra=(lost, bad))
    page = page_of(run)
    assert page.headings == [
        "Loss",
        "val/acc1",
        "Step time breakdown",
        "Throughput limits",
        "Throughput",
        "Input wait",
        "The chain, stage by stage",
        "Start-up",
        "Events",
        "Quarantined records",
        "Hosts",
        "Configuration",
        "More",
    ]
    assert "38 %" in page.text and "host lost algo-3" in page.text
    assert re.search(r"train</td><td[^>]*>1</td><td[^>]*>a\.jpg", page.text), "epochs count from 1"
    assert "command line" in page.text, "where a value came from"
    assert page.text.count("<title") == page.text.count("</title>")


def test_nothing_is_fetched_and_nothing_is_taken_as_markup(tmp_path: Path) -> None:
    evil = {
        "time": 15.0,
        "event": "host_lost",
        "host": "<script>alert(1)</script>",
        "group": "g",
        "node": "n",
    }
    page = page_of(record(tmp_path / "run", 20, extra=(evil,)))
    assert "<script" not in page.text and "<b>rows</b>" not in page.text
    assert all("//" not in call for call in page.calls)
    assert "@import" not in page.text and "url(http" not in page.text


@pytest.mark.parametrize(
    ("steps", "options"),
    [(0, {"status": "failed"}), (1, {"epochs": 1}), (30, {"status": "interrupted"}), (40, {"gpu": False})],
)
def test_odd_runs_render(tmp_path: Path, steps: int, options: dict[str, object]) -> None:
    page = page_of(record(tmp_path / "run", steps, **options))  # type: ignore[arg-type]
    assert page.charts >= (1 if steps == 0 else 4)
    assert ("the loss is NaN" in page.text) == (options.get("status") == "failed")


def test_files_that_are_absent_or_cut_short_are_no_obstacle(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 30)
    events = run / "events.jsonl"
    events.write_text(events.read_text()[:-25] + "\nnot json\n[]\n")
    (run / "config.yaml").unlink()
    assert page_of(run).charts >= 5
    (run / "events.jsonl").unlink()
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


def test_one_logged_step_is_no_course(tmp_path: Path) -> None:
    run = read_run(record(tmp_path / "run", 1, epochs=1))
    (loss,) = [panel for panel in panels_of(run) if panel.title == "Loss"]
    assert "in the only logged step." in loss.caption and "From" not in loss.caption


def test_status_tells_the_verdict(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 100)
    shown = CliRunner().invoke(app, ["status", str(run)])
    assert shown.exit_code == 0 and "input-bound: 38 %" in shown.output
    assert "val/loss 0.6000  val/acc1 75.00 %" in shown.output, "as on the console"
    for text in (shown.output, page_of(run).text):
        assert "0.40 per 1M samples at the steady rate" in text, "the cost of the run also has its start"


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
        assert told.bottleneck == "network", "the hosts that preprocess are not busy: they wait to read"
        shown = CliRunner().invoke(app, ["status", str(run)])
        assert "input-bound: 38 %" in shown.output, shown.output


def test_a_metric_that_is_no_number_is_left_out_and_the_run_stays_readable(tmp_path: Path) -> None:
    metrics = {"train/loss": 0.5, "val/auroc": float("nan"), "val/loss": float("inf")}
    odd = {"time": 30.0, "event": "epoch", "epoch": 1, "step": 100, "metrics": metrics}
    run = record(tmp_path / "run", 100, extra=(odd,))
    told = read_summary(run / "summary.json")
    assert told.metrics.last == {"train/loss": 0.5}
    assert "val/auroc" not in told.metrics.best and told.metrics.best["val/loss"] == pytest.approx(0.6)
    for verb in ("report", "status", "compare"):
        shown = CliRunner().invoke(app, [verb, str(run)])
        assert shown.exit_code == 0, shown.output


CRIPPLED_EVENTS = (
    '{"time": 20, "event": "step", "epoch": null, "step": 5, "loss": 1, "epoch_samples": 1, "elapsed_s": 1,'
    ' "wait_s": 0}',
    '{"time": 20, "event": "step", "epoch": [], "step": "x", "loss": {}, "terms_ms": 3}',
    '{"time": 20, "event": "epoch", "epoch": null, "step": 5, "metrics": [1]}',
    '{"time": 20, "event": "epoch", "epoch": 1, "step": 5, "metrics": {"val/x": "high", "val/y": null}}',
    '{"time": 20, "event": "checkpoint", "step": null, "path": 7}',
    '{"time": 20, "event": "host_lost", "host": ["a"]}',
    '{"time": 20, "event": "host_cpu", "hosts": [1]}',
    '{"time": 1e999, "event": "step"}',
    '{"time": 20, "event": 7}',
)


def test_events_of_another_shape_are_passed_over(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 30)
    with (run / "events.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in CRIPPLED_EVENTS)
    page = page_of(run)
    assert page.charts >= 7 and "<script" not in page.text and "could not be drawn" not in page.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chain", [{"stage": "read"}, {"stage": "decode", "cpu_ms_per_sample": None, "bytes_out": "many"}]),
        ("chain", [{"cpu_ms_per_sample": 1.0}, {"stage": 5, "cpu_ms_per_sample": float("nan")}]),
        ("cost", {"usd": "much", "usd_per_million_samples": []}),
        ("cost", {"usd": 1.0, "usd_per_million_samples": "x", "usd_per_hour_by_type": 5}),
        ("speed", {"steady_samples_per_s": float("nan"), "step_terms_ms": {"compute": None}}),
        ("speed", {"steady_samples_per_s": 5.0, "step_terms_ms": {"compute": float("inf")}}),
        ("metrics", {"last": {"val/acc1": None}, "best": {"val/acc1": None}}),
        ("host_cpu", [{"host": "a"}]),
        ("tracking", {"mlflow": {"url": "javascript:alert(1)"}}),
        ("tracking", {"mlflow": 5}),
        ("steps", "many"),
        ("chain", 5),
    ],
)
@pytest.mark.parametrize("verb", ["report", "status", "compare"])
@pytest.mark.long
def test_a_summary_of_another_shape_is_shown_or_refused_in_one_line(
    tmp_path: Path, key: str, value: object, verb: str
) -> None:
    run = record(tmp_path / "run", 30)
    content = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**content, key: value}))
    shown = CliRunner().invoke(app, [verb, str(run)])
    if shown.exit_code:
        assert isinstance(shown.exception, UsageError), shown.exception
        assert len(shown.exception.problems) == 1 and key in str(shown.exception)
    elif verb == "report":
        assert "javascript:" not in (run / "report.html").read_text()


def test_mlflow_is_linked_where_the_run_was_sent_there(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 30)
    content = json.loads((run / "summary.json").read_text())
    content["tracking"] = {"mlflow": {"url": "http://127.0.0.1:5000/#/experiments/1/runs/a"}}
    (run / "summary.json").write_text(json.dumps(content))
    assert 'href="http://127.0.0.1:5000/#/experiments/1/runs/a"' in page_of(run).text


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


@pytest.mark.long
def test_status_of_a_remote_run_reads_its_log_no_longer_than_it_may() -> None:
    log = EndlessLog()
    told = last_progress(log, timeout_s=3)
    log.over = True
    assert "500 samples/s" in told[0] and "could not be read to the end" in told[1]


def test_a_wrong_path_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run directory"):
        write_report([tmp_path], tmp_path / "report.html")
