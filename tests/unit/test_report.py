"""report.html: every kind of run renders, safely, small and quickly."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded import record
from typer.testing import CliRunner

from launcher.submit import app
from stoker.config import UsageError
from stoker.report.charts import nice_ticks, thin
from stoker.report.page import write_report


class Page(HTMLParser):
    """What a reader without eyes gets, and what would call out."""

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
        "Throughput",
        "Input wait",
        "Where the time of a step goes",
        "What each part could carry",
        "Loss",
        "val/acc1",
        "The chain, stage by stage",
        "CPU use per host",
        "Training images as the model saw them",
        "What happened",
        "Records that could not be used",
        "Hosts",
        "Configuration",
        "More",
    ]
    assert "38 %" in page.text and "host lost algo-3" in page.text and "a.jpg" in page.text
    assert "command line" in page.text, "where a value came from"
    assert page.text.count("<title") == page.text.count("</title>") and 'alt="training image' in page.text


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


def test_ten_thousand_steps_and_three_hundred_hosts_stay_small_and_quick(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 10_000, epochs=90, hosts=300)
    started = time.process_time()
    page = page_of(run)
    assert time.process_time() - started < 2
    assert len(page.text) < 1_000_000


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    runs = [record(tmp_path / name, 50, hosts=n) for name, n in (("a", 1), ("b", 3))]
    shown = CliRunner().invoke(app, ["report", *map(str, runs), "-o", str(tmp_path / "both.html")])
    assert shown.exit_code == 0, shown.output
    page = Page((tmp_path / "both.html").read_text())
    assert page.headings[:4] == [
        "Runs side by side",
        "Throughput by cluster shape",
        "Time by cluster shape",
        "Time and cost",
    ]
    assert "1 × gpu + 2 × cpu" in page.text


def test_status_tells_the_verdict(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["status", str(record(tmp_path / "run", 100))])
    assert shown.exit_code == 0 and "input-bound: 40 %" in shown.output


def test_a_wrong_path_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no run directory"):
        write_report([tmp_path], tmp_path / "report.html")


def test_axes_and_thinning() -> None:
    assert nice_ticks(0, 97, 4) == [0, 25, 50, 75, 100]
    assert nice_ticks(3, 3)[0] <= 3 <= nice_ticks(3, 3)[-1]
    points = [(float(i), 100.0 if i == 777 else 1.0) for i in range(10_000)]
    kept = thin(points)
    assert len(kept) <= 360 and (777.0, 100.0) in kept and kept == sorted(kept)
