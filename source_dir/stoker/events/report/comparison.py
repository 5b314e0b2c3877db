"""Head and laptop: charts that compare runs: time and cost by cluster shape."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.events.report import charts
from stoker.events.report.charts import Bar, figure
from stoker.events.report.panel import Panel, Rows, panel
from stoker.events.report.reading import RunData
from stoker.events.summary import number


def comparison(runs: Sequence[RunData]) -> list[Panel]:
    """Head and laptop: the panels that compare several runs."""
    from stoker.events.runs import shape_of

    labels = [f"{n + 1}" for n in range(len(runs))]
    rows: Rows = []
    for label, run in zip(labels, runs, strict=True):
        summary, cost = run.summary, run.summary.cost or {}
        known, chose = summary.metrics.best, (summary.model_from or {}).get("metric")
        others = (name for name in known if name.startswith("val/") and "loss" not in name)
        best = next(((name, known[name]) for name in (chose, *others) if name in known), None)
        usd = cost.get("usd")
        per = cost.get("usd_per_million_samples")
        rows.append(
            [
                label,
                run.name,
                shape_of(summary),
                str(summary.train_workers),
                summary.status,
                figure(rate) if (rate := summary.speed.steady_samples_per_s) else "–",
                f"{summary.speed.input_wait_pct:.0f} %" if rate else "–",
                figure(summary.seconds, "s"),
                "–" if best is None else f"{best[0]} {figure(best[1])}",
                "–" if usd is None else charts.usd(usd),
                "–" if per is None else charts.usd(per),
            ]
        )
    heads = ["", "run", "hosts", "workers", "status", "samples/s", "wait", "time", "best", "cost", "per 1M"]
    caption = "Samples/s and per 1M: after warm-up; time and cost include the start. Costs are estimated."
    found = [Panel("Runs side by side", [], caption, heads, rows, wide=True)]
    shapes = [f"{label} · {shape_of(run.summary)}" for label, run in zip(labels, runs, strict=True)]
    rates = [run.summary.speed.steady_samples_per_s for run in runs]
    costs = [number((run.summary.cost or {}).get("usd_per_million_samples")) for run in runs]
    for what, title, unit, values, caption in (
        ("Throughput", "Samples per second", "samples/s", rates, ""),
        ("Time", "Seconds", "s", [run.summary.seconds for run in runs], ""),
        ("Cost", "Dollars per million samples", "$ per 1M samples", costs, "Estimated, after warm-up."),
    ):
        if what == "Cost" and not any(costs):
            continue
        rows_of = [Bar(shape, value or None) for shape, value in zip(shapes, values, strict=True)]
        text = "; ".join(f"{b.name}: {figure(b.value, unit) if b.value else 'not measured'}" for b in rows_of)
        svg = charts.bars(f"{title} by run", text, rows_of, unit)
        found.append(panel(f"{what} by cluster shape", svg, caption=caption))
    dots = [
        (label, run.summary.seconds / 60, float(run.summary.cost["usd"]))
        for label, run in zip(labels, runs, strict=True)
        if run.summary.cost and run.summary.cost.get("usd") is not None
    ]
    if dots:
        text = "Cost against time; lower left is better."
        svg = charts.scatter("Cost against time", text, dots, "minutes", "$, estimated")
        found.append(panel("Time and cost", svg, caption=text))
    return found
