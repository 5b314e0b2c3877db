"""Head and laptop: the charts of a run with their captions and data tables."""

from __future__ import annotations

from markupsafe import Markup

from stoker.events.bottleneck import chain_limit, near, network_limit
from stoker.events.recorder import repeats_text
from stoker.events.report import charts
from stoker.events.report.charts import Bar, Event, Line, Part, figure
from stoker.events.report.metric_panels import metrics
from stoker.events.report.panel import Panel, panel, table_rows
from stoker.events.report.reading import RunData
from stoker.figures import count_of, size

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
    """Head and laptop: the panels for which a run has data, in display order."""
    makers = (*(loss, metrics, step_time, limits, throughput, waiting, chain, start, records, host_cpu),)
    found: list[Panel] = []
    for make in makers:
        made = make(run)
        found += made if isinstance(made, list) else [made] if made else []
    return found


def _events(run: RunData) -> list[Event]:
    marks = sorted([*run.marks, *run.epochs], key=lambda mark: mark.seconds)
    if len(marks) > MOST_MARKS:  # keep failures, thin out routine events
        routine = [m for m in marks if m.kind in ("epoch", "checkpoint")]
        others = [m for m in marks if m.kind not in ("epoch", "checkpoint")][:MOST_OTHER_MARKS]
        marks = others + routine[:: max(1, len(routine) // MOST_MARKS)]
    return [Event(mark.seconds, SHORT[mark.kind], mark.text) for mark in marks]


SIGNS = "e: epoch end, c: checkpoint, L/J: host lost/joined, T: train worker lost, r: resumed, S: stop"


def throughput(run: RunData) -> Panel | None:
    """Samples/s over time."""
    points = run.samples_per_s
    if not points:
        return None
    mean = run.summary.speed.steady_samples_per_s
    text = f"From {figure(min(y for _, y in points))} to {figure(max(y for _, y in points))} samples/s"
    text += f"; {figure(mean)} on average after warm-up." if mean else "."
    svg = charts.line_chart(
        "Throughput over time",
        text,
        [Line("samples/s", points)],
        "seconds since the start",
        "samples/s",
        events=_events(run),
    )
    return panel(
        "Throughput", svg, caption=f"{text} {SIGNS}.", heads=["s", "samples/s"], rows=table_rows(points)
    )


def waiting(run: RunData) -> Panel | None:
    """Input wait over time."""
    points = run.input_wait
    if not points:
        return None
    text = f"{run.summary.speed.input_wait_pct:.0f} % of the training time was spent waiting for data."
    svg = charts.line_chart(
        "Input wait over time",
        text,
        [Line("input wait", points)],
        "seconds since the start",
        "% of the time",
        events=_events(run),
        y_top=100,
    )
    return panel("Input wait", svg, caption=text, heads=["s", "% waiting"], rows=table_rows(points))


def step_time(run: RunData) -> Panel | None:
    """Breakdown of the step time."""
    terms = getattr(run.summary.speed, "step_terms_ms", None) or {}
    every = [Part(text, float(terms.get(name, 0.0))) for name, text in TERMS.items()]
    total = sum(part.value for part in every)
    if total <= 0:
        return None
    largest = max(every, key=lambda part: part.value)
    text = f"Mean step: {figure(total, 'ms')}; largest part: {largest.name}, {figure(largest.value, 'ms')}."
    rows = [[p.name, figure(p.value), f"{100 * p.value / total:.1f} %"] for p in every]
    parts = visible(every)
    return panel(
        "Step time breakdown",
        charts.stacked_bar("Step time breakdown", text, parts, "ms"),
        caption=text,
        heads=["part", "ms", "share"],
        rows=rows,
        keys=[(n + 1, f"{p.name}, {figure(p.value, 'ms')}") for n, p in enumerate(parts)],
    )


def visible(parts: list[Part]) -> list[Part]:
    """Head and laptop: the parts of at least 1 %, and the others together."""
    total = sum(part.value for part in parts)
    large = [part for part in parts if part.value >= 0.01 * total]
    rest = sum(part.value for part in parts if part not in large)
    return [*large, Part("everything else", rest)] if rest > 0 else large


def start(run: RunData) -> Panel | None:
    """The start, phase by phase."""
    ends = sorted(run.summary.startup.items(), key=lambda phase: phase[1])
    if not ends or ends[-1][1] <= 0:
        return None
    before = [0.0, *(at for _, at in ends)]
    every = [Part(name, at - since) for (name, at), since in zip(ends, before, strict=False)]
    text = f"The first step ended {figure(ends[-1][1], 's')} after the start of the job's process."
    if ends[-1][0] != "first step":
        text = f"The last phase, {ends[-1][0]}, ended after {figure(ends[-1][1], 's')}."
    parts = visible(every)
    return panel(
        "Start-up",
        charts.stacked_bar("Start-up by phase", text, parts, "s"),
        caption=text,
        heads=["phase", "s"],
        rows=[[p.name, figure(p.value)] for p in every],
        keys=[(n + 1, f"{p.name}, {figure(p.value, 's')}") for n, p in enumerate(parts)],
    )


def records(run: RunData) -> Panel | None:
    """Training records in and out, over all epochs."""
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
    return panel(
        "Records in and out",
        charts.bars("Training records of all epochs", text, rows, ""),
        caption=text,
        heads=["records", "number"],
        rows=[[row.name, f"{row.value:,.0f}"] for row in rows if row.value is not None],
    )


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
        rows.append(Bar(name, value, "limits the run" if binds else "", strong=binds))
    text = "; ".join(
        f"{row.name}: {figure(row.value, 'samples/s') if row.value else 'not measured'}" for row in rows
    )
    return panel(
        "Throughput limits",
        charts.bars("Limits in samples per second", text, rows, "samples/s", cut_at=4),
        caption="What each part could carry alone. CPUs that also train reach less.",
        heads=["part", "samples/s"],
        rows=[[row.name, figure(row.value) if row.value else "not measured"] for row in rows],
    )


def loss(run: RunData) -> Panel | None:
    """Loss at logged steps and at the end of each epoch."""
    if not run.loss:
        return None
    lines = [Line("step", run.loss)]
    for name, short in (("train/loss", "train"), ("val/loss", "val")):
        if run.metrics.get(name):
            lines.append(Line(short, run.metrics[name]))
    last = lines[-1].points[-1][1]
    course = f"From {figure(run.loss[0][1])} to {figure(run.loss[-1][1])} in {len(run.loss):,} logged steps."
    text = course if len(run.loss) > 1 else f"{figure(run.loss[0][1])} in the only logged step."
    svg = charts.line_chart("Loss against the global step", text, lines, "global step", "loss", height=220)
    caption = f"{text} {lines[-1].name.capitalize()} ends at {figure(last)}."
    return panel("Loss", svg, caption=caption, heads=["step", "loss"], rows=table_rows(run.loss))


def chain(run: RunData) -> Panel | None:
    """CPU time and output bytes of each stage."""
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
    return panel(
        "The chain, stage by stage",
        charts.bars("CPU milliseconds per sample by stage", text, rows, "ms"),
        caption=text,
        heads=["stage", "CPU ms per sample", "bytes out"],
        rows=table,
    )


def host_cpu(run: RunData) -> Panel | None:
    """CPU utilisation per host, as small multiples on one scale."""
    if not run.host_cpu:
        return None
    means = {host: sum(y for _, y in p) / len(p) for host, p in run.host_cpu.items()}
    groups = {host.host: host.group for host in run.summary.cluster.hosts}
    order = sorted(means, key=lambda host: (groups.get(host, ""), host))
    shown = order[:MOST_HOSTS]
    svgs = [
        Markup(  # noqa: S704 - made by charts, escaped
            charts.spark(
                f"CPU use of {host}", f"{means[host]:.0f} % on average, from 0 to 100 %", run.host_cpu[host]
            )
        )
        for host in shown
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
