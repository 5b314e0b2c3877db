"""Head and laptop: render run directories as one self-contained report.html of less than a megabyte.

write_report([Path("runs/latest")], Path("report.html"))
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from stoker.config.loading import leaves
from stoker.events import charts
from stoker.events.bottleneck import chain_limit, gpus_used, judged, near, network_limit
from stoker.events.charts import Bar, Moment, figure
from stoker.events.kinds import MetricTable
from stoker.events.prices import spot_note
from stoker.events.runs import Point, RunData, figures_of, read_run
from stoker.events.summary import Summary, number
from stoker.figures import count_of, duration, size

REPORT = "report.html"
STATUS = {
    "succeeded": "✓ succeeded",
    "failed": "✗ failed",
    "interrupted": "‖ interrupted",
    "running": "… running",
}
LINKS = {
    "summary.json": "all figures",
    "events.jsonl": "all events",
    "quarantine.jsonl": "quarantined records",
    "config.yaml": "the configuration",
    "logs/console.log": "console output",
}


def write_report(
    run_dirs: Sequence[Path], target: Path, is_lost: Callable[[Path], bool] = lambda _: False
) -> None:
    """`is_lost`: whether the process of a run is gone, although its summary says that it runs."""
    # runs/* has one a second time, as `latest`.
    runs = [read_run(path) for path in {path.resolve(): path for path in run_dirs}.values()]
    for run in runs:
        if is_lost(run.run_dir):
            run.summary.status, run.summary.error = "failed", "the process exited without a result"
    text = render(runs)
    draft = target.with_name(f".{target.name}-{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(target)


def render(runs: Sequence[RunData]) -> str:
    environment = Environment(
        loader=PackageLoader("stoker.events", "."),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quoted"] = shlex.quote
    pages = [page_of(run) for run in runs]
    return environment.get_template("report.html").render(
        pages=pages,
        comparison=comparison(runs) if len(runs) > 1 else None,
        title=runs[0].name if len(pages) == 1 else f"{len(pages)} runs",
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def page_of(run: RunData) -> dict[str, Any]:
    summary = run.summary
    about = summary.tracking.get("mlflow")
    url = about.get("url") if isinstance(about, dict) else None
    is_link = isinstance(url, str) and urlsplit(url).scheme in ("http", "https")
    return {
        "run": run,
        "verdict": judged(summary),
        "status": STATUS[summary.status],
        "figures": key_figures(summary),
        "panels": panels_of(run),
        "hosts": [host.model_dump() for host in summary.cluster.hosts],
        "cpu_use": {row["host"]: f"{row['mean_pct']:.0f} %" for row in summary.host_cpu},
        "settings": settings_of(run),
        "links": [(text, name) for name, text in LINKS.items() if (run.run_dir / name).exists()],
        "mlflow": url if is_link else "",
    }


def key_figures(summary: Summary) -> list[tuple[str, str, str]]:
    """Name, value and note of each."""
    speed, records = summary.speed, summary.records
    found: list[tuple[str, str, str]] = []
    best, model = summary.metrics.best, summary.model_from or {}
    values = {**best, **{n: v for n, v in summary.metrics.last.items() if n not in best}}
    names = dict.fromkeys([model.get("metric"), *best, *values])
    for name in [n for n in names if n in values and n.startswith(("val/", "train/loss"))][:2]:
        value, kind = values[name], "best" if name in best else "last"
        chose = f", the model: epoch {model['epoch']}" if name == model.get("metric") else ""
        if chose and (own := model.get("value", value)) != value:  # the best checkpoint was damaged
            chose += f", {charts.figure(own)}"
        found.append((name, charts.figure(value), f"{kind}{chose}"))
    if speed.steady_samples_per_s:
        found.append(("samples/s", charts.figure(speed.steady_samples_per_s), "after warm-up"))
        found.append(("input wait", f"{speed.input_wait_pct:.0f} %", "of training time"))
    if speed.step_ms_p50:
        found.append(("step", charts.figure(speed.step_ms_p50, "ms"), "median"))
    if (gpus := gpus_used(summary))[1]:
        found.append(("GPUs used", f"{gpus[0]} of {gpus[1]}", "in at least one sample"))
    if summary.seconds:
        steps = count_of(summary.steps, "step") if summary.steps or summary.script is None else ""
        found.append(("time", duration(summary.seconds), steps))
    if records.read:
        note = f"{records.quarantined:,} quarantined, {records.remainder:,} left over"
        if records.repeated:
            note += f", {records.repeated:,} repeated"
        found.append(("records trained", f"{records.trained:,}", note))
    if summary.cost and summary.cost.get("usd") is not None:
        per = number(summary.cost.get("usd_per_million_samples"))
        note = (
            f"estimated, prices of {summary.cost.get('prices_as_of', '?')}{spot_note(summary.cost)}"
        )
        if per is not None:
            note = f"{charts.usd(per)} per 1M samples at the steady rate; {note}"
        found.append(("cost", charts.usd(summary.cost["usd"]), note))
    return found


def settings_of(run: RunData) -> list[tuple[str, str, str]]:
    """The keys that were set: (key, value, origin)."""
    import yaml

    try:
        tree = yaml.safe_load(run.config) or {}
    except yaml.YAMLError:
        return []
    values = dict(leaves(tree if isinstance(tree, dict) else {}))
    found = []
    for key, origin in run.origins.items():
        below = {
            name.removeprefix(f"{key}."): v
            for name, v in values.items()
            if name.startswith(f"{key}.")
        }
        value = values.get(key, below or None)
        found.append((key, "–" if value is None else str(value), origin))
    return sorted(found)


Rows = list[list[str]]
MOST_ROWS = 12
SECONDS = "seconds since the start"


@dataclass(frozen=True)
class Panel:
    """A chart with a caption and a data table; without a chart, the table alone."""

    title: str
    svg: Markup | None = None
    caption: str = ""
    heads: list[str] = field(default_factory=list)
    rows: Rows = field(default_factory=list)
    wide: bool = False


def bar_panel(
    title: str,
    text: str,
    bars: Sequence[Bar],
    unit: str,
    heads: list[str],
    rows: Rows | None = None,
) -> Panel:
    """Bars with their values as a table, unless other rows are given."""
    return Panel(title, charts.bars(title, text, bars, unit), text, heads, rows or values_of(bars))


def values_of(bars: Sequence[Bar]) -> Rows:
    return [[bar.name, "not measured" if bar.value is None else figure(bar.value)] for bar in bars]


TERMS = {
    "compute": "compute",
    "host_to_device": "copy to device",
    "wait_production": "wait: preprocessing",
    "wait_transfer": "wait: network",
    "wait_collate": "wait: collating batches",
}
MOST_MARKS, MOST_OTHER_MARKS = 12, 40


def panels_of(run: RunData) -> list[Panel]:
    rest = (step_time, limits, throughput, waiting, chain, start, records)
    return [*filter(None, [loss(run), *metrics(run), *(make(run) for make in rest)])]


def _events(run: RunData) -> list[Moment]:
    marks = sorted([*run.marks, *run.epochs], key=lambda mark: mark.seconds)
    if len(marks) > MOST_MARKS:  # keep failures, thin out routine events
        routine = [m for m in marks if m.kind in ("epoch", "checkpoint")]
        others = [m for m in marks if m.kind not in ("epoch", "checkpoint")][:MOST_OTHER_MARKS]
        marks = others + routine[:: max(1, len(routine) // MOST_MARKS)]
    return [(mark.seconds, mark.text) for mark in marks]


def line_panel(
    title: str,
    lines: dict[str, list[Point]],
    text: str,
    unit: str,
    x: str = "global step",
    caption: str = "",
    **options: Any,
) -> Panel:
    """Lines, with the points of the first in the table."""
    svg = charts.line_chart(f"{title} against the {x}", text, lines, x, unit, **options)
    first, head = next(iter(lines.values())), {"global step": "step", SECONDS: "s"}[x]
    step = max(1, len(first) // MOST_ROWS)
    rows = [[figure(at), figure(value)] for at, value in first[::step]]
    return Panel(title, svg, caption or text, [head, unit], rows)


def throughput(run: RunData) -> Panel | None:
    points, mean = run.samples_per_s, run.summary.speed.steady_samples_per_s
    if not points:
        return None
    text = (
        f"From {figure(min(y for _, y in points))} to {figure(max(y for _, y in points))} samples/s"
    )
    text += f"; {figure(mean)} on average after warm-up." if mean else "."
    lines = {"samples/s": points}
    return line_panel("Throughput", lines, text, "samples/s", SECONDS, events=_events(run))


def waiting(run: RunData) -> Panel | None:
    if not run.input_wait:
        return None
    text = (
        f"{run.summary.speed.input_wait_pct:.0f} % of the training time was spent waiting for data."
    )
    lines, events = {"input wait": run.input_wait}, _events(run)
    return line_panel(
        "Input wait", lines, text, "% of the time", SECONDS, events=events, y_top=100.0
    )


def parts_of(title: str, text: str, head: str, every: dict[str, float], unit: str) -> Panel:
    """Parts of a whole; small ones are in the table only."""
    total = sum(every.values())
    large = [(name, value) for name, value in every.items() if value >= 0.01 * total]
    bars = [Bar(name, value, f"{100 * value / total:.0f} %") for name, value in large]
    rows = [[name, figure(value), f"{100 * value / total:.1f} %"] for name, value in every.items()]
    return bar_panel(title, text, bars, unit, [head, unit, "share"], rows)


def step_time(run: RunData) -> Panel | None:
    terms = run.summary.speed.step_terms_ms
    every = {text: float(terms.get(name, 0.0)) for name, text in TERMS.items()}
    total = sum(every.values())
    if total <= 0:
        return None
    largest = max(every, key=lambda name: every[name])
    text = f"Mean step: {figure(total, 'ms')}; largest part: {largest}, {figure(every[largest], 'ms')}."
    return parts_of("Step time breakdown", text, "part", every, "ms")


def start(run: RunData) -> Panel | None:
    ends = sorted(run.summary.startup.items(), key=lambda phase: phase[1])
    if not ends or ends[-1][1] <= 0:
        return None
    before = [0.0, *(at for _, at in ends)]
    every = {name: at - since for (name, at), since in zip(ends, before, strict=False)}
    text = f"The first step ended {figure(ends[-1][1], 's')} after the start of the job's process."
    if ends[-1][0] != "first step":
        text = f"The last phase, {ends[-1][0]}, ended after {figure(ends[-1][1], 's')}."
    return parts_of("Start-up", text, "phase", every, "s")


def records(run: RunData) -> Panel | None:
    found = run.summary.records
    if not found.read:
        return None
    rows = [
        Bar(found.verb, found.read),
        Bar(
            "trained",
            found.trained,
            f"{found.repeated:,} repeated" if found.repeated else "",
            strong=True,
        ),
        Bar("quarantined", found.quarantined),
        Bar("left over", found.remainder),
    ]
    text = f"{found.read:,} {found.verb} = {found.trained:,} trained + {found.quarantined:,} quarantined"
    text += f" + {found.remainder:,} left over."
    return bar_panel("Records in and out", text, rows, "", ["records", "number"])


def limits(run: RunData) -> Panel | None:
    summary = run.summary
    rate = summary.speed.steady_samples_per_s
    if not rate:
        return None
    share = min(summary.speed.input_wait_pct / 100, 0.98)
    on_gpu = any(host.gpus for host in summary.cluster.hosts)
    training = "GPUs without input wait" if on_gpu else "training without input wait"
    could: list[tuple[str, str, float | None]] = [
        ("gpu", training, rate / (1 - share)),
        ("cpu", "chain on the CPUs that preprocess", chain_limit(summary)),
        ("network", "network", network_limit(summary)),
    ]
    bars = [Bar("measured", rate)]
    for part, name, value in could:
        binds = part == summary.bottleneck and near(summary, value)
        bars.append(Bar(name, value or None, "limits the run" if binds else "", strong=binds))
    title, unit = "Throughput limits", "samples/s"
    caption = "What each part could carry alone. CPUs that also train reach less."
    told = [
        f"{b.name}: {'not measured' if b.value is None else figure(b.value, unit)}" for b in bars
    ]
    svg = charts.bars(title, "; ".join(told), bars, unit, cut_at=4)
    return Panel(title, svg, caption, ["part", unit], values_of(bars))


def loss(run: RunData) -> Panel | None:
    if not run.loss:
        return None
    lines = {"step": run.loss}
    for name, short in (("train/loss", "train"), ("val/loss", "val")):
        if run.metrics.get(name):
            lines[short] = run.metrics[name]
    last, (_, final) = [*lines][-1], [*lines.values()][-1][-1]
    course = f"From {figure(run.loss[0][1])} to {figure(run.loss[-1][1])} in {len(run.loss):,} logged steps."
    if run.steps_per_point > 1:
        course = f"{course[:-1]}: one in {run.steps_per_point} of all."
    text = course if len(run.loss) > 1 else f"{figure(run.loss[0][1])} in the only logged step."
    caption = f"{text} {last.capitalize()} ends at {figure(final)}."
    return line_panel("Loss", lines, text, "loss", caption=caption, height=220)


def chain(run: RunData) -> Panel | None:
    stages = run.summary.chain
    if not stages:
        return None
    total = sum(stage["cpu_ms_per_sample"] for stage in stages) or 1.0
    bars, rows = [], []
    for name, ms, out in (
        (s["stage"], s["cpu_ms_per_sample"], size(s["bytes_out"])) for s in stages
    ):
        bars.append(Bar(name, ms, f"{out} out", strong=ms > 0.4 * total))
        rows.append([name, figure(ms), out])
    dear = max(stages, key=lambda stage: stage["cpu_ms_per_sample"])
    share = f"{100 * dear['cpu_ms_per_sample'] / total:.0f} %"
    text = f"{figure(total, 'ms')} of CPU time per sample; {dear['stage']} takes {share} of it."
    heads = ["stage", "CPU ms per sample", "bytes out"]
    return bar_panel("The chain, stage by stage", text, bars, "ms", heads, rows)


MOST_METRICS, MOST_LISTED, MOST_CELLS = 12, 200, 5_000
"""Panels of each kind of scalars; rows of a table; cells of all tables, so that the page stays below a
megabyte."""


def metrics(run: RunData) -> list[Panel]:
    """One chart per validation metric except the loss, or per metric that a script logs; then the tables."""
    found, own = [], run.summary.script is not None
    parts: dict[str, list[str]] = {}
    for name, points in run.metrics.items():
        if not own and (not name.startswith("val/") or name == "val/loss"):
            continue
        if not own and name.count("/") > 1:
            parts.setdefault(name.rpartition("/")[0], []).append(name)
            continue
        percent = not own and all(0 <= y <= 1 for _, y in points)
        shown = [(x, 100 * y) for x, y in points] if percent else points
        unit = "%" if percent else ""
        best = run.summary.metrics.best.get(name)
        text = f"Best {figure(100 * best if percent else best, unit)}, " if best is not None else ""
        text += f"last {figure(shown[-1][1], unit)}."
        lines = {name: shown}
        found.append(line_panel(name, lines, text, unit or name, from_zero=False, height=220))
    several = [by_part(run, name, names) for name, names in parts.items() if name not in run.tables]
    found = found[:MOST_METRICS] + several[:MOST_METRICS]
    room = MOST_CELLS
    for name, table in run.tables.items():
        cells = min(len(table.rows), MOST_LISTED) * len(table.columns)
        if cells > room:
            found.append(
                Panel(name, None, "Too large for this page; see the event `table` in events.jsonl.")
            )
        else:
            room -= cells
            found.append(table_of(name, table))
    return found


def by_part(run: RunData, name: str, names: list[str]) -> Panel:
    """The last values of a metric that has several, such as one per class; the lowest first."""
    last = {part: run.metrics[part][-1][1] for part in names}
    best = {part: run.summary.metrics.best.get(part) for part in names}
    order = sorted(names, key=lambda part: last[part])
    label = len(name) + 1
    bars = [Bar(part[label:], last[part]) for part in order]
    text = f"From {figure(last[order[0]])} to {figure(last[order[-1]])} in the last epoch."
    if len(order) > MOST_ROWS:
        text += f" The chart shows the {MOST_ROWS} lowest of {len(order)}, the table all."
    rows = [
        [p[label:], figure(last[p]), "–" if best[p] is None else figure(best[p] or 0.0)]
        for p in order
    ]
    return bar_panel(name, text, bars[:MOST_ROWS], "", ["", "last", "best"], rows)


def table_of(name: str, table: MetricTable) -> Panel:
    rows = [
        [row[:60], *("–" if (value := number(cell)) is None else figure(value) for cell in cells)]
        for row, cells in zip(table.rows, table.cells, strict=True)
    ]
    text = "" if table.epoch is None else f"After epoch {table.epoch + 1}. "
    text += "Rows are targets and columns predictions. " if table.rows == table.columns else ""
    text += f"The first {MOST_LISTED} of {len(rows)} rows." if len(rows) > MOST_LISTED else ""
    heads = ["", *(column[:60] for column in table.columns)]
    return Panel(name, None, text.strip(), heads, rows[:MOST_LISTED], wide=len(table.columns) > 8)


def comparison(runs: Sequence[RunData]) -> list[Panel]:
    def cell(value: float | None, shown: Callable[[float], str]) -> str:
        return "–" if value is None else shown(value)

    rows: Rows = []
    for place, run in enumerate(runs, 1):
        row = figures_of(run.summary)
        known, chose = run.summary.metrics.best, (run.summary.model_from or {}).get("metric")
        others = (name for name in known if name.startswith("val/") and name != "val/loss")
        best = next(
            (f"{name} {figure(known[name])}" for name in (chose, *others) if name in known), "–"
        )
        speed = cell(row["samples_per_s"], figure), cell(row["input_wait_pct"], "{:.0f} %".format)
        cost = [cell(row[name], charts.usd) for name in ("usd", "usd_per_million_samples")]
        about = [str(place), run.name, row["hosts"], str(row["train_workers"]), row["status"]]
        rows.append([*about, *speed, figure(row["seconds"], "s"), best, *cost])
    heads = [
        "",
        "run",
        "hosts",
        "workers",
        "status",
        "samples/s",
        "wait",
        "time",
        "best",
        "cost",
        "per 1M",
    ]
    caption = (
        "Samples/s and per 1M: after warm-up; time and cost include the start. Costs are estimated."
    )
    return [Panel("Runs side by side", None, caption, heads, rows, wide=True)]
