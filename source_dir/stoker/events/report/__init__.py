"""Head and laptop: render run directories as one self-contained report.html of less than a megabyte.

write_report([Path("runs/latest")], Path("report.html"))
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from stoker.events.bottleneck import judged
from stoker.events.report import charts, panels
from stoker.events.report.panels import comparison
from stoker.events.runs import RunData, read_run
from stoker.events.summary import Summary, less_is_better, number
from stoker.figures import count_of, duration

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


def write_report(run_dirs: Sequence[Path], target: Path) -> None:
    """Write the report of one run, or of several side by side."""
    text = render([read_run(path) for path in run_dirs])
    draft = target.with_name(f".{target.name}-{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(target)


def render(runs: Sequence[RunData]) -> str:
    environment = Environment(
        loader=PackageLoader("stoker.events.report", "."),
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
        hatches=Markup(panels.HATCHES),  # noqa: S704 - constant
    )


def page_of(run: RunData) -> dict[str, Any]:
    """Everything that the template shows of a run."""
    summary = run.summary
    return {
        "run": run,
        "verdict": judged(summary),
        "status": STATUS[summary.status],
        "figures": key_figures(summary),
        "panels": panels.of_run(run),
        "hosts": [host.model_dump() for host in summary.cluster.hosts],
        "settings": settings_of(run),
        "links": [(text, name) for name, text in LINKS.items() if (run.run_dir / name).exists()],
        "mlflow": mlflow_of(summary),
    }


def key_figures(summary: Summary) -> list[tuple[str, str, str]]:
    """Name, value and note of each."""
    speed, records = summary.speed, summary.records
    found: list[tuple[str, str, str]] = []
    best, model = summary.metrics.best, summary.model_from or {}
    names = dict.fromkeys([model.get("metric"), *(name for name in best if name.startswith("val/"))])
    for name in [name for name in names if name in best][:2]:
        percent = 0 <= (value := best[name]) <= 1 and not less_is_better(name)
        shown = f"{100 * value:.2f} %" if percent else charts.figure(value)
        chose = f", the model: epoch {model['epoch']}" if name == model.get("metric") else ""
        found.append((name, shown, f"best{chose}"))
    if speed.steady_samples_per_s:
        found.append(("samples/s", charts.figure(speed.steady_samples_per_s), "after warm-up"))
        found.append(("input wait", f"{speed.input_wait_pct:.0f} %", "of training time"))
    if speed.step_ms_p50:
        found.append(("step", charts.figure(speed.step_ms_p50, "ms"), "median"))
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
        note = f"estimated, prices of {summary.cost.get('prices_as_of', '?')}"
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
    found = []
    for key, origin in run.origins.items():
        value: Any = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        found.append((key, "–" if value is None else str(value), origin))
    return sorted(found)


def mlflow_of(summary: Summary) -> str:
    """The run's URL in MLflow, if it was sent there and is http(s)."""
    about = summary.tracking.get("mlflow")
    url = about.get("url") if isinstance(about, dict) else None
    return url if isinstance(url, str) and urlsplit(url).scheme in ("http", "https") else ""
