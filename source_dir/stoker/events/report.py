"""Head and laptop: render run directories as one self-contained report.html of less than a megabyte.

write_report([Path("runs/latest")], Path("report.html"))
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from stoker.config.loading import leaves
from stoker.errors import UsageError
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
    write_page(
        target,
        "stoker.events",
        REPORT,
        pages=[page_of(run) for run in runs],
        comparison=comparison(runs) if len(runs) > 1 else None,
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
    )


def write_page(target: Path, package: str, template: str, **values: Any) -> None:
    """Render a package's template with these values and the time, at once or not at all."""
    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quoted"] = shlex.quote
    written = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    text = environment.get_template(template).render(written=written, **values)
    draft = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        draft.replace(target)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from None


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
    speed, records, best = summary.speed, summary.records, summary.metrics.best
    found, model = list[tuple[str, str, str]](), summary.model_from or {}
    values = {**best, **{n: v for n, v in summary.metrics.last.items() if n not in best}}
    names = dict.fromkeys([model.get("metric"), *best, *values])
    for name in [n for n in names if n in values and n.startswith(("val/", "train/loss"))][:2]:
        note = "best" if name in best else "last"
        if name == model.get("metric"):
            note += f", the model: epoch {model['epoch']}"
            if (own := model.get("value", values[name])) != values[name]:  # the best was damaged
                note += f", {figure(own)}"
        found.append((name, figure(values[name]), note))
    if speed.steady_samples_per_s:
        found.append(("samples/s", figure(speed.steady_samples_per_s), "after warm-up"))
        found.append(("input wait", f"{speed.input_wait_pct:.0f} %", "of training time"))
    if speed.step_ms_p50:
        found.append(("step", figure(speed.step_ms_p50, "ms"), "median"))
    if (gpus := gpus_used(summary))[1]:
        found.append(("GPUs used", f"{gpus[0]} of {gpus[1]}", "in at least one sample"))
    if summary.seconds:
        steps = count_of(summary.steps, "step") if summary.steps or summary.script is None else ""
        found.append(("time", duration(summary.seconds), steps))
    if records.read:
        note = f"{records.quarantined:,} quarantined, {records.remainder:,} left over"
        note += f", {records.repeated:,} repeated" if records.repeated else ""
        found.append(("records trained", f"{records.trained:,}", note))
    if (cost := summary.cost) and cost.get("usd") is not None:
        note = f"estimated, prices of {cost.get('prices_as_of', '?')}{spot_note(cost)}"
        if (per := number(cost.get("usd_per_million_samples"))) is not None:
            note = f"{charts.usd(per)} per 1M samples at the steady rate; {note}"
        found.append(("cost", charts.usd(cost["usd"]), note))
    return found


def settings_of(run: RunData) -> list[tuple[str, str, str]]:
    """The keys that were set: (key, value, origin)."""
    import yaml

    try:
        tree = yaml.safe_load(run.config) or {}
    except yaml.YAMLError:
        return []
    values, found = dict(leaves(tree if isinstance(tree, dict) else {})), []
    for key, origin in run.origins.items():
        start = f"{key}."
        below = {n.removeprefix(start): v for n, v in values.items() if n.startswith(start)}
        value = values.get(key, below or None)
        found.append((key, "–" if value is None else str(value), origin))
    return sorted(found)


Rows = list[list[str]]
MOST_ROWS = 12
SECONDS = "seconds since the start"
ROUTINE = ("epoch", "checkpoint")
MOST_MARKS, MOST_OTHER_MARKS = 12, 40
TERMS = {
    "compute": "compute",
    "host_to_device": "copy to device",
    "wait_production": "wait: preprocessing",
    "wait_transfer": "wait: network",
    "wait_collate": "wait: collating batches",
}


@dataclass(frozen=True)
class Panel:
    """A chart with a caption and a data table; without a chart, the table alone."""

    title: str
    svg: Markup | None = None
    caption: str = ""
    heads: list[str] = field(default_factory=list)
    rows: Rows = field(default_factory=list)
    wide: bool = False


Panels = Iterator[Panel]


def panels_of(run: RunData) -> list[Panel]:
    kinds = (loss, metrics, step_time, limits, rates, chain, start, records)
    return [panel for kind in kinds for panel in kind(run)]


def bar_panel(
    title: str,
    text: str,
    bars: list[Bar],
    unit: str,
    heads: list[str],
    rows: Rows | None = None,
    **options: Any,
) -> Panel:
    """Bars with their values as a table, unless other rows are given."""
    shown = ["not measured" if bar.value is None else figure(bar.value) for bar in bars]
    rows = rows or [[bar.name, value] for bar, value in zip(bars, shown, strict=True)]
    described = "; ".join(": ".join(row) for row in rows[: len(bars)])
    return Panel(title, charts.bars(title, described, bars, unit, **options), text, heads, rows)


def parts_of(title: str, text: str, head: str, every: dict[str, float], unit: str) -> Panel:
    """Parts of a whole; small ones are in the table only."""
    total = sum(every.values())
    share = {name: 100 * value / total for name, value in every.items()}
    bars = [Bar(name, every[name], f"{part:.0f} %") for name, part in share.items() if part >= 1]
    rows = [[name, figure(every[name]), f"{part:.1f} %"] for name, part in share.items()]
    return bar_panel(title, text, bars, unit, [head, unit, "share"], rows)


def line_panel(
    title: str, lines: dict[str, list[Point]], text: str, unit: str, x: str = "step", **options: Any
) -> Panel:
    """Lines, with the points of the first in the table."""
    label = {"step": "global step", "s": SECONDS}[x]
    svg = charts.line_chart(f"{title} against the {label}", text, lines, label, unit, **options)
    first = next(iter(lines.values()))
    thinned = first[:: max(1, len(first) // MOST_ROWS)]
    rows = [[figure(at), figure(value)] for at, value in thinned]
    return Panel(title, svg, text, [x, unit], rows)


def _events(run: RunData) -> list[Moment]:
    """Of routine events, a selection; of failures and changes, the first ones."""
    routine = [mark for mark in run.marks if mark.kind in ROUTINE]
    others = [mark for mark in run.marks if mark.kind not in ROUTINE]
    shown = routine[:: max(1, len(routine) // MOST_MARKS)] + others[:MOST_OTHER_MARKS]
    return [(mark.seconds, mark.text) for mark in shown]


def loss(run: RunData) -> Panels:
    if not run.loss:
        return
    lines = {"step": run.loss}
    for name in ("train/loss", "val/loss"):
        if run.metrics.get(name):
            lines[name.partition("/")[0]] = run.metrics[name]
    last, (_, final) = [*lines][-1], [*lines.values()][-1][-1]
    first, end = (figure(run.loss[at][1]) for at in (0, -1))
    every = f": one in {run.steps_per_point} of all" if run.steps_per_point > 1 else ""
    text = f"From {first} to {end} in {count_of(len(run.loss), 'logged step')}{every}."
    text += f" {last.capitalize()} ends at {figure(final)}."
    yield line_panel("Loss", lines, text, "loss", height=220)


def rates(run: RunData) -> Panels:
    """Throughput and input wait, against the time."""
    if points := run.samples_per_s:
        mean, values = run.summary.speed.steady_samples_per_s, [y for _, y in points]
        text = f"From {figure(min(values))} to {figure(max(values))} samples/s"
        text += f"; {figure(mean)} on average after warm-up." if mean else "."
        yield line_panel(
            "Throughput", {"samples/s": points}, text, "samples/s", "s", events=_events(run)
        )
    if run.input_wait:
        waited = f"{run.summary.speed.input_wait_pct:.0f} % of the training time"
        text, lines = f"{waited} was spent waiting for data.", {"input wait": run.input_wait}
        options = {"events": _events(run), "y_top": 100.0}
        yield line_panel("Input wait", lines, text, "% of the time", "s", **options)


def step_time(run: RunData) -> Panels:
    terms = run.summary.speed.step_terms_ms
    every = {text: float(terms.get(name, 0.0)) for name, text in TERMS.items()}
    if (total := sum(every.values())) > 0:
        most = max(every, key=lambda name: every[name])
        part = f"{most}, {figure(every[most], 'ms')}"
        text = f"Mean step: {figure(total, 'ms')}; largest part: {part}."
        yield parts_of("Step time breakdown", text, "part", every, "ms")


def start(run: RunData) -> Panels:
    ends = sorted(run.summary.startup.items(), key=lambda phase: phase[1])
    if not ends or ends[-1][1] <= 0:
        return
    before = [0.0, *(at for _, at in ends)]
    every = {name: at - since for (name, at), since in zip(ends, before, strict=False)}
    name, took = ends[-1][0], figure(ends[-1][1], "s")
    text = f"The first step ended {took} after the start of the job's process."
    text = text if name == "first step" else f"The last phase, {name}, ended after {took}."
    yield parts_of("Start-up", text, "phase", every, "s")


def records(run: RunData) -> Panels:
    found = run.summary.records
    if not found.read:
        return
    again = f"{found.repeated:,} repeated" if found.repeated else ""
    counts = {"quarantined": found.quarantined, "left over": found.remainder}
    parts = [Bar(name, count) for name, count in counts.items()]
    bars = [Bar(found.verb, found.read), Bar("trained", found.trained, again, strong=True), *parts]
    text = f"{found.read:,} {found.verb} = {found.trained:,} trained"
    text += f" + {found.quarantined:,} quarantined + {found.remainder:,} left over."
    yield bar_panel("Records in and out", text, bars, "", ["records", "number"])


def limits(run: RunData) -> Panels:
    summary = run.summary
    rate = summary.speed.steady_samples_per_s
    if not rate:
        return
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
    text, unit = "What each part could carry alone. CPUs that also train reach less.", "samples/s"
    yield bar_panel("Throughput limits", text, bars, unit, ["part", unit])


def chain(run: RunData) -> Panels:
    costs = {at: float(s["cpu_ms_per_sample"]) for at, s in enumerate(run.summary.chain)}
    if not costs:
        return
    total, bars, rows = sum(costs.values()) or 1.0, [], []
    for at, stage in enumerate(run.summary.chain):
        name, ms, out = stage["stage"], costs[at], size(stage["bytes_out"])
        bars.append(Bar(name, ms, f"{out} out", strong=ms > 0.4 * total))
        rows.append([name, figure(ms), out])
    dear = max(costs, key=lambda at: costs[at])
    share = f"{run.summary.chain[dear]['stage']} takes {100 * costs[dear] / total:.0f} % of it"
    text = f"{figure(total, 'ms')} of CPU time per sample; {share}."
    heads = ["stage", "CPU ms per sample", "bytes out"]
    yield bar_panel("The chain, stage by stage", text, bars, "ms", heads, rows)


MOST_METRICS, MOST_LISTED, MOST_CELLS = 12, 200, 5_000
"""Panels of each kind of scalars; rows of a table; cells of all tables, so that the page stays below a
megabyte."""


def metrics(run: RunData) -> Panels:
    """One chart per validation metric except the loss, or per metric that a script logs; then the tables."""
    own, parts = run.summary.script is not None, dict[str, list[str]]()
    charted = list[str]()
    for name in run.metrics:
        if own or (name.startswith("val/") and name != "val/loss" and name.count("/") == 1):
            charted.append(name)
        elif name.startswith("val/") and name.count("/") > 1:
            parts.setdefault(name.rpartition("/")[0], []).append(name)
    for name in charted[:MOST_METRICS]:
        points, best = run.metrics[name], run.summary.metrics.best.get(name)
        factor, unit = (1, "") if own or not all(0 <= y <= 1 for _, y in points) else (100, "%")
        shown = [(x, factor * y) for x, y in points]
        text = f"Best {figure(factor * best, unit)}, " if best is not None else ""
        text += f"last {figure(shown[-1][1], unit)}."
        yield line_panel(name, {name: shown}, text, unit or name, from_zero=False, height=220)
    several = [name for name in parts if name not in run.tables]
    yield from (by_part(run, name, parts[name]) for name in several[:MOST_METRICS])
    room = MOST_CELLS
    for name, table in run.tables.items():
        cells = min(len(table.rows), MOST_LISTED) * len(table.columns)
        if cells > room:
            text = "Too large for this page; see the event `table` in events.jsonl."
            yield Panel(name, None, text)
        else:
            room -= cells
            yield table_of(name, table)


def _shown(value: float | None, form: Callable[[float], str] = figure) -> str:
    return "–" if value is None else form(value)


def by_part(run: RunData, name: str, names: list[str]) -> Panel:
    """The last values of a metric that has several, such as one per class; the lowest first."""
    last = {part: run.metrics[part][-1][1] for part in names}
    order, best = sorted(names, key=lambda part: last[part]), run.summary.metrics.best
    text = f"From {figure(last[order[0]])} to {figure(last[order[-1]])} in the last epoch."
    if len(order) > MOST_ROWS:
        text += f" The chart shows the {MOST_ROWS} lowest of {len(order)}, the table all."
    rows = [[p[len(name) + 1 :], figure(last[p]), _shown(best.get(p))] for p in order]
    bars = [Bar(row[0], last[part]) for part, row in zip(order, rows, strict=True)]
    return bar_panel(name, text, bars[:MOST_ROWS], "", ["", "last", "best"], rows)


def table_of(name: str, table: MetricTable) -> Panel:
    rows = [
        [row[:60], *(_shown(number(cell)) for cell in cells)]
        for row, cells in zip(table.rows, table.cells, strict=True)
    ]
    text = "" if table.epoch is None else f"After epoch {table.epoch + 1}. "
    text += "Rows are targets and columns predictions. " if table.rows == table.columns else ""
    text += f"The first {MOST_LISTED} of {len(rows)} rows." if len(rows) > MOST_LISTED else ""
    heads = ["", *(column[:60] for column in table.columns)]
    return Panel(name, None, text.strip(), heads, rows[:MOST_LISTED], wide=len(table.columns) > 8)


HEADS = "run,hosts,workers,status,samples/s,wait,time,best,cost,per 1M"


def comparison(runs: Sequence[RunData]) -> list[Panel]:
    rows: Rows = []
    for place, run in enumerate(runs, 1):
        row, known = figures_of(run.summary), run.summary.metrics.best
        chose = (run.summary.model_from or {}).get("metric")
        others = (name for name in known if name.startswith("val/") and name != "val/loss")
        best = [f"{name} {figure(known[name])}" for name in (chose, *others) if name in known]
        about = [str(place), run.name, row["hosts"], str(row["train_workers"]), row["status"]]
        speed = [_shown(row["samples_per_s"]), _shown(row["input_wait_pct"], "{:.0f} %".format)]
        cost = [_shown(row[name], charts.usd) for name in ("usd", "usd_per_million_samples")]
        rows.append([*about, *speed, figure(row["seconds"], "s"), (best or ["–"])[0], *cost])
    text = (
        "Samples/s and per 1M: after warm-up; time and cost include the start. Costs are estimated."
    )
    return [Panel("Runs side by side", None, text, ["", *HEADS.split(",")], rows, wide=True)]
