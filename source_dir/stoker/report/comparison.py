"""Head and laptop: several runs as charts: time and cost against the shape of the cluster."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.report import charts
from stoker.report.charts import Bar, figure
from stoker.report.panels import BlockSlice, Panel, panel
from stoker.report.reading import RunData
from stoker.tracking.summary import number


def comparison(runs: Sequence[RunData]) -> list[Panel]:
    """Head and laptop: several runs: time and cost against the shape of the cluster."""
    from stoker.tracking.runs import shape_of

    labels = [f"{n + 1}" for n in range(len(runs))]
    rows: BlockSlice = []
    for label, run in zip(labels, runs, strict=True):
        summary, cost = run.summary, run.summary.cost or {}
        best = next(
            (v for k, v in summary.metrics.best.items() if k.startswith("val/") and "loss" not in k), None
        )
        usd = cost.get("usd")
        per = cost.get("usd_per_million_samples")
        rows.append(
            [
                label,
                run.name,
                shape_of(summary),
                summary.status,
                figure(summary.speed.steady_samples_per_s),
                f"{summary.speed.input_wait_pct:.0f} %",
                figure(summary.seconds, "s"),
                "–" if best is None else figure(best),
                "–" if usd is None else charts.usd(usd),
                "–" if per is None else charts.usd(per),
            ]
        )
    heads = ["", "run", "hosts", "status", "samples/s", "wait", "time", "best", "cost", "per 1M"]
    found = [Panel("Runs side by side", [], "Costs are estimated.", heads, rows, wide=True)]
    speed = [
        Bar(f"{a} · {shape_of(r.summary)}", r.summary.speed.steady_samples_per_s or None)
        for a, r in zip(labels, runs, strict=True)
    ]
    text = "; ".join(f"{b.name}: {figure(b.value) if b.value else 'not measured'}" for b in speed)
    found.append(
        panel(
            "Throughput by cluster shape", charts.bars("Samples per second by run", text, speed, "samples/s")
        )
    )
    time = [
        Bar(f"{a} · {shape_of(r.summary)}", r.summary.seconds or None)
        for a, r in zip(labels, runs, strict=True)
    ]
    text = "; ".join(f"{b.name}: {figure(b.value, 's') if b.value else 'not measured'}" for b in time)
    found.append(panel("Time by cluster shape", charts.bars("Seconds by run", text, time, "s")))
    costs = [
        Bar(f"{a} · {shape_of(r.summary)}", number((r.summary.cost or {}).get("usd_per_million_samples")))
        for a, r in zip(labels, runs, strict=True)
    ]
    if any(bar.value is not None for bar in costs):
        text = "; ".join(
            f"{b.name}: {'not known' if b.value is None else charts.usd(b.value)} per 1M samples"
            for b in costs
        )
        svg = charts.bars("Dollars per million samples by run", text, costs, "$ per 1M samples")
        found.append(panel("Cost by cluster shape", svg, caption="Estimated."))
    dots = [
        (label, run.summary.seconds / 60, float(run.summary.cost["usd"]))
        for label, run in zip(labels, runs, strict=True)
        if run.summary.cost and run.summary.cost.get("usd") is not None
    ]
    if dots:
        text = "Cost against time; further down and to the left is better."
        svg = charts.scatter("Cost against time", text, dots, "minutes", "$, estimated")
        found.append(panel("Time and cost", svg, caption=text))
    return found
