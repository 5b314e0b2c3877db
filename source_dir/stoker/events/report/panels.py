"""Head and laptop: the charts and tables of a report, with their captions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from markupsafe import Markup

from stoker.events.bottleneck import chain_limit, near, network_limit
from stoker.events.kinds import MetricTable
from stoker.events.recorder import repeats_text
from stoker.events.report import charts
from stoker.events.report.charts import WIDTH, Bar, Moment, Point, figure, svg
from stoker.events.runs import RunData, figures_of
from stoker.events.summary import number
from stoker.figures import count_of, size

Rows = list[list[str]]
MOST_ROWS = 12


@dataclass(frozen=True)
class Panel:
    """A chart, or several small ones, with a caption and a data table."""

    title: str
    svgs: list[Markup]
    caption: str = ""
    heads: list[str] = field(default_factory=list)
    rows: Rows = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """For small multiples: one per SVG."""
    wide: bool = False
    keys: list[tuple[int, str]] = field(default_factory=list)
    """Legend: (colour and hatching number, text)."""


def bar_panel(
    title: str,
    text: str,
    bars: Sequence[Bar],
    unit: str,
    heads: list[str],
    rows: Rows | None = None,
    **more: Any,
) -> Panel:
    """Bars with their values as a table, unless other rows are given."""
    shown = [[bar.name, "not measured" if bar.value is None else figure(bar.value)] for bar in bars]
    caption = more.pop("caption", text)
    return Panel(title, [charts.bars(title, text, bars, unit, **more)], caption, heads, rows or shown)


def table_rows(points: Sequence[Point]) -> Rows:
    step = max(1, len(points) // MOST_ROWS)
    return [[figure(x), figure(y)] for x, y in list(points)[::step]]


TERMS = {
    "compute": "compute",
    "host_to_device": "copy to device",
    "wait_production": "wait: preprocessing",
    "wait_transfer": "wait: network",
    "wait_collate": "wait: collating batches",
}
SHORT = {"checkpoint": "c", "resumed": "r", "stop": "S", "stopped": "S", "epoch": "e"}
SHORT |= {"train_worker_lost": "T", "host_lost": "L", "host_joined": "J", "host_released": "R"}
SHORT |= {"cpu_hosts": "H"}
MOST_MARKS, MOST_OTHER_MARKS = 12, 40
MOST_HOSTS = 48

HATCHES = (
    "<svg width='0' height='0' style='position:absolute' aria-hidden='true'><defs>"
    + "".join(
        f"<pattern id='hatch{number}' width='8' height='8' patternUnits='userSpaceOnUse'{turn}>"
        f"{content}</pattern>"
        for number, turn, content in (
            (1, "", ""),
            (2, " patternTransform='rotate(45)'", "<line x1='0' y1='0' x2='0' y2='8' class='hatch'/>"),
            (3, "", "<circle cx='4' cy='4' r='1.3' class='hatchdot'/>"),
            (4, " patternTransform='rotate(-45)'", "<line x1='0' y1='0' x2='0' y2='8' class='hatch'/>"),
            (5, "", "<line x1='0' y1='4' x2='8' y2='4' class='hatch'/>"),
        )
    )
    + "</defs></svg>"
)


def of_run(run: RunData) -> list[Panel]:
    """The panels for which a run has data, in display order."""
    makers = (*(loss, metrics, step_time, limits, throughput, waiting, chain, start, records, host_cpu),)
    found: list[Panel] = []
    for make in makers:
        made = make(run)
        found += made if isinstance(made, list) else [made] if made else []
    return found


def _events(run: RunData) -> list[Moment]:
    marks = sorted([*run.marks, *run.epochs], key=lambda mark: mark.seconds)
    if len(marks) > MOST_MARKS:  # keep failures, thin out routine events
        routine = [m for m in marks if m.kind in ("epoch", "checkpoint")]
        others = [m for m in marks if m.kind not in ("epoch", "checkpoint")][:MOST_OTHER_MARKS]
        marks = others + routine[:: max(1, len(routine) // MOST_MARKS)]
    return [(mark.seconds, SHORT[mark.kind], mark.text) for mark in marks]


SIGNS = "e: epoch end, c: checkpoint, L/J: host lost/joined, T: train worker lost, r: resumed, S: stop"


def over_time(title: str, name: str, unit: str, points: Sequence[Point], text: str, run: RunData) -> Panel:
    svg = charts.line_chart(
        f"{title} over time",
        text,
        {name: points},
        "seconds since the start",
        unit,
        events=_events(run),
        y_top=100 if unit.startswith("%") else None,
    )
    return Panel(title, [svg], caption=text, heads=["s", unit], rows=table_rows(points))


def throughput(run: RunData) -> Panel | None:
    points, mean = run.samples_per_s, run.summary.speed.steady_samples_per_s
    if not points:
        return None
    text = f"From {figure(min(y for _, y in points))} to {figure(max(y for _, y in points))} samples/s"
    text += f"; {figure(mean)} on average after warm-up." if mean else "."
    return over_time("Throughput", "samples/s", "samples/s", points, f"{text} {SIGNS}.", run)


def waiting(run: RunData) -> Panel | None:
    if not run.input_wait:
        return None
    text = f"{run.summary.speed.input_wait_pct:.0f} % of the training time was spent waiting for data."
    return over_time("Input wait", "input wait", "% of the time", run.input_wait, text, run)


def stacked(title: str, text: str, head: str, every: dict[str, float], unit: str) -> Panel:
    """Parts of a whole as one bar; small ones together."""
    total = sum(every.values())
    large = {name: value for name, value in every.items() if value >= 0.01 * total}
    rest = total - sum(large.values())
    parts = large | {"everything else": rest} if len(large) < len(every) and rest > 0 else large
    return Panel(
        title,
        [charts.stacked_bar(title, text, parts, unit)],
        caption=text,
        heads=[head, unit, "share"],
        rows=[[name, figure(value), f"{100 * value / total:.1f} %"] for name, value in every.items()],
        keys=[(n, f"{name}, {figure(value, unit)}") for n, (name, value) in enumerate(parts.items(), 1)],
    )


def step_time(run: RunData) -> Panel | None:
    terms = run.summary.speed.step_terms_ms
    every = {text: float(terms.get(name, 0.0)) for name, text in TERMS.items()}
    total = sum(every.values())
    if total <= 0:
        return None
    largest = max(every, key=lambda name: every[name])
    text = f"Mean step: {figure(total, 'ms')}; largest part: {largest}, {figure(every[largest], 'ms')}."
    return stacked("Step time breakdown", text, "part", every, "ms")


def start(run: RunData) -> Panel | None:
    ends = sorted(run.summary.startup.items(), key=lambda phase: phase[1])
    if not ends or ends[-1][1] <= 0:
        return None
    before = [0.0, *(at for _, at in ends)]
    every = {name: at - since for (name, at), since in zip(ends, before, strict=False)}
    text = f"The first step ended {figure(ends[-1][1], 's')} after the start of the job's process."
    if ends[-1][0] != "first step":
        text = f"The last phase, {ends[-1][0]}, ended after {figure(ends[-1][1], 's')}."
    return stacked("Start-up", text, "phase", every, "s")


def records(run: RunData) -> Panel | None:
    found = run.summary.records
    if not found.read:
        return None
    rows = [
        Bar(found.verb, found.read),
        Bar("trained", found.trained, f"{found.repeated:,} repeated" if found.repeated else "", strong=True),
        Bar("quarantined", found.quarantined),
        Bar("left over", found.remainder),
    ]
    text = f"{found.read:,} {found.verb} = {found.trained:,} trained + {found.quarantined:,} quarantined"
    text += repeats_text(run.run_dir, found)
    text += f" + {found.remainder:,} left over."
    return bar_panel("Records in and out", text, rows, "", ["records", "number"])


def limits(run: RunData) -> Panel | None:
    """Throughput limit of each component on its own."""
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
    rows = [Bar("measured", rate)]
    for part, name, value in could:
        binds = part == summary.bottleneck and near(summary, value)
        rows.append(Bar(name, value or None, "limits the run" if binds else "", strong=binds))
    heads, caption = (
        ["part", "samples/s"],
        "What each part could carry alone. CPUs that also train reach less.",
    )
    text = told(rows, "samples/s")
    return bar_panel("Throughput limits", text, rows, "samples/s", heads, caption=caption, cut_at=4)


def told(bars: Sequence[Bar], unit: str) -> str:
    return "; ".join(
        f"{b.name}: {'not measured' if b.value is None else figure(b.value, unit)}" for b in bars
    )


def loss(run: RunData) -> Panel | None:
    if not run.loss:
        return None
    lines = {"step": run.loss}
    for name, short in (("train/loss", "train"), ("val/loss", "val")):
        if run.metrics.get(name):
            lines[short] = run.metrics[name]
    last, (_, final) = [*lines][-1], [*lines.values()][-1][-1]
    course = f"From {figure(run.loss[0][1])} to {figure(run.loss[-1][1])} in {len(run.loss):,} logged steps."
    text = course if len(run.loss) > 1 else f"{figure(run.loss[0][1])} in the only logged step."
    svg = charts.line_chart("Loss against the global step", text, lines, "global step", "loss", height=220)
    caption = f"{text} {last.capitalize()} ends at {figure(final)}."
    return Panel("Loss", [svg], caption=caption, heads=["step", "loss"], rows=table_rows(run.loss))


def chain(run: RunData) -> Panel | None:
    stages = run.summary.chain
    if not stages:
        return None
    total = sum(stage["cpu_ms_per_sample"] for stage in stages) or 1.0
    rows = [
        Bar(
            s["stage"],
            s["cpu_ms_per_sample"],
            size(s["bytes_out"]) + " out",
            strong=s["cpu_ms_per_sample"] > 0.4 * total,
        )
        for s in stages
    ]
    dear = max(stages, key=lambda stage: stage["cpu_ms_per_sample"])
    text = (
        f"{figure(total, 'ms')} of CPU time per sample; {dear['stage']} takes"
        f" {100 * dear['cpu_ms_per_sample'] / total:.0f} % of it."
    )
    table = [[s["stage"], figure(s["cpu_ms_per_sample"]), size(s["bytes_out"])] for s in stages]
    heads = ["stage", "CPU ms per sample", "bytes out"]
    return bar_panel("The chain, stage by stage", text, rows, "ms", heads, table)


def host_cpu(run: RunData) -> Panel | None:
    """CPU utilisation per host, as small multiples on one scale."""
    if not run.host_cpu:
        return None
    means = {host: sum(y for _, y in p) / len(p) for host, p in run.host_cpu.items()}
    groups = {host.host: host.group for host in run.summary.cluster.hosts}
    order = sorted(means, key=lambda host: (groups.get(host, ""), host))
    shown = order[:MOST_HOSTS]
    text = "{:.0f} % on average, from 0 to 100 %"
    svgs = [
        charts.spark(f"CPU use of {host}", text.format(means[host]), run.host_cpu[host]) for host in shown
    ]
    number = count_of(len(order), "host")
    caption = f"From 0 to 100 % of each host's CPUs, over the run; {number}."
    if len(order) > len(shown):
        caption += f" The charts show the first {len(shown)}, the table all."
    return Panel(
        "CPU use per host",
        svgs,
        caption,
        ["host", "group", "mean %"],
        [[host, groups.get(host, "?"), f"{means[host]:.0f}"] for host in order],
        [f"{host} · {groups.get(host, '?')} · {means[host]:.0f} %" for host in shown],
        wide=len(shown) > 3,
    )


MOST_METRICS, MOST_DRAWN, MOST_LISTED, MOST_CELLS = 12, 40, 200, 5_000
"""Panels of each kind of scalars; classes of a matrix that is drawn; rows of another table; cells of all
tables, so that the page stays below a megabyte."""


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
        svg = charts.line_chart(
            f"{name} against the global step",
            text,
            {name: shown},
            "global step",
            unit or name,
            from_zero=False,
            height=220,
        )
        found.append(Panel(name, [svg], caption=text, heads=["step", name], rows=table_rows(shown)))
    several = [by_part(run, name, names) for name, names in parts.items() if name not in run.tables]
    found = found[:MOST_METRICS] + several[:MOST_METRICS]
    room = MOST_CELLS
    for name, table in run.tables.items():
        size = min(len(table.rows), MOST_LISTED) * len(table.columns)
        drawn = table.rows != table.columns or len(table.rows) <= MOST_DRAWN
        if drawn and size > room:
            found.append(Panel(name, [], "Too large for this page; see the event `table` in events.jsonl."))
        else:
            found.append(table_of(name, table))
            room -= size if drawn else 0
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
    rows = [[p[label:], figure(last[p]), "–" if best[p] is None else figure(best[p] or 0.0)] for p in order]
    return bar_panel(name, text, bars[:MOST_ROWS], "", ["", "last", "best"], rows)


def table_of(name: str, table: MetricTable) -> Panel:
    """A metric's table; a square one with the same rows and columns, such as a confusion matrix, is drawn."""
    rows, columns = ([name[:60] for name in names] for names in (table.rows, table.columns))
    values = [[number(cell) for cell in row] for row in table.cells]
    epoch = table.epoch
    text = "" if epoch is None else f"After epoch {epoch + 1}. "
    shown = [
        [row, *("–" if cell is None else figure(cell) for cell in cells)]
        for row, cells in zip(rows, values, strict=True)
    ]
    heads = ["", *columns]
    if rows == columns and len(rows) > MOST_DRAWN:
        pairs = [
            (cell or 0.0, row, columns[n])
            for row, cells in zip(rows, values, strict=True)
            for n, cell in enumerate(cells)
            if columns[n] != row
        ]
        shown = [
            [row, column, figure(cell)] for cell, row, column in sorted(pairs, reverse=True)[:50] if cell
        ]
        text += f"The largest values off the diagonal of {len(rows)} × {len(rows)}."
        return Panel(name, [], text, ["row (target)", "column (predicted)", "value"], shown)
    if rows != columns:
        text += f"The first {MOST_LISTED} of {len(shown)} rows." if len(shown) > MOST_LISTED else ""
        return Panel(name, [], text, heads, shown[:MOST_LISTED], wide=len(columns) > 8)
    text += "Rows are targets and columns predictions, shaded by their share of the row."
    svg = matrix(name, text, rows, values)
    return Panel(name, [svg], caption=text, heads=heads, rows=shown)


def matrix(
    title: str, description: str, names: Sequence[str], rows: Sequence[Sequence[float | None]]
) -> Markup:
    """A square matrix, each cell shaded by its share of the row's sum; of few rows, with the values."""
    left, top = 92, 16
    side = min(34.0, (WIDTH - left) / len(names))
    body, written = [], side >= 24
    for line, (name, row) in enumerate(zip(names, rows, strict=True)):
        total = sum(abs(cell) for cell in row if cell) or 1.0
        y = top + line * side
        short = name if len(name) <= 15 else f"{name[:14]}…"
        if side >= 9:
            middle = f"{y + side / 2 + 4:.1f}"
            body.append(
                f'<text class="tick" x="{left - 5}" y="{middle}" text-anchor="end">{escape(short)}</text>'
            )
        for column, cell in enumerate(row):
            x, share = left + column * side, 0.12 + 0.88 * abs(cell) / total if cell else 0.0
            told = f"{escape(name)} as {escape(names[column])}: {'–' if cell is None else figure(cell)}"
            box = f'x="{x:.1f}" y="{y:.1f}" width="{side:.1f}" height="{side:.1f}"'
            kind = "f1" if line == column else "f3"
            if cell or written:
                body.append(
                    f'<g><title>{told}</title><rect class="cell" {box}/>'
                    f'<rect class="{kind}" {box} opacity="{share:.2f}"/></g>'
                )
            if written and cell:
                ink = ' style="fill:var(--on)"' if share > 0.5 else ""
                body.append(
                    f'<text class="tick" x="{x + side / 2:.1f}" y="{y + side / 2 + 4:.1f}"'
                    f' text-anchor="middle"{ink}>{figure(cell)}</text>'
                )
    whole = side * len(names)
    body.append(f'<rect class="frame" x="{left}" y="{top}" width="{whole:.1f}" height="{whole:.1f}"/>')
    body.append(f'<text class="axis" x="{left}" y="10">predicted →</text>')
    body.append('<text class="axis" x="0" y="10">target ↓</text>')
    return svg(title, description, math.ceil(top + whole + 2), body)


def comparison(runs: Sequence[RunData]) -> list[Panel]:
    def cell(value: float | None, shown: Callable[[float], str]) -> str:
        return "–" if value is None else shown(value)

    figures = [figures_of(run.summary) for run in runs]
    rows: Rows = []
    for place, (run, row) in enumerate(zip(runs, figures, strict=True), 1):
        known, chose = run.summary.metrics.best, (run.summary.model_from or {}).get("metric")
        others = (name for name in known if name.startswith("val/") and "loss" not in name)
        best = next((f"{name} {figure(known[name])}" for name in (chose, *others) if name in known), "–")
        speed = cell(row["samples_per_s"], figure), cell(row["input_wait_pct"], "{:.0f} %".format)
        cost = [cell(row[name], charts.usd) for name in ("usd", "usd_per_million_samples")]
        about = [str(place), run.name, row["hosts"], str(row["train_workers"]), row["status"]]
        rows.append([*about, *speed, figure(row["seconds"], "s"), best, *cost])
    heads = ["", "run", "hosts", "workers", "status", "samples/s", "wait", "time", "best", "cost", "per 1M"]
    caption = "Samples/s and per 1M: after warm-up; time and cost include the start. Costs are estimated."
    found = [Panel("Runs side by side", [], caption, heads, rows, wide=True)]
    for what, name, unit, caption in (
        ("Throughput", "samples_per_s", "samples/s", ""),
        ("Time", "seconds", "s", ""),
        ("Cost", "usd_per_million_samples", "$ per 1M samples", "Estimated, after warm-up."),
    ):
        bars = [Bar(f"{n} · {row['hosts']}", number(row[name]) or None) for n, row in enumerate(figures, 1)]
        if what != "Cost" or any(bar.value for bar in bars):
            title = f"{what} by cluster shape"
            svg = charts.bars(title, told(bars, unit), bars, unit)
            found.append(Panel(title, [svg], caption))
    return found
