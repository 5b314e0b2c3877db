"""Head: console output of a job, as lines."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from stoker.config.redaction import scrub
from stoker.events import kinds
from stoker.events.bottleneck import judged
from stoker.events.prices import cost_row
from stoker.events.sinks import Sink
from stoker.events.summary import Records, Summary
from stoker.figures import count_of
from stoker.session import metrics_line

EVERY_S = 10.0
MOST_PARTS = 6
"""Values of a metric, such as one per class, on a line or in the closing table."""


class Console(Sink):
    essential = True

    def __init__(self, epochs: int, log: Path | None = None) -> None:
        self.epochs = epochs
        self.last = 0.0
        self.log = log.open("a", buffering=1) if log else None
        self.stop_asked = ""
        """Why a stop was requested; `report` says that the run stopped for it."""
        self.known_bad: set[tuple[str, str]] = set()
        """(split, key) of quarantined records; later epochs meet them again."""
        self.bad: dict[tuple[str, str], tuple[str, int]] = {}
        """(split, reason) of quarantined records → key of the first one, and how many more were not shown."""

    def line(self, text: str) -> None:
        text = scrub(text)
        print(text, flush=True)
        if self.log:
            self.log.write(text + "\n")

    def on_event(self, event: kinds.Event) -> None:
        match event:
            case kinds.StepLogged() if event.step == 1 or self.due():
                self.last = time.monotonic()
                elapsed = max(event.elapsed_s, 1e-9)
                self.line(
                    f"epoch {event.epoch + 1}/{self.epochs}  step {event.step}  loss {event.loss:.4f}"
                    f"  {event.epoch_samples / elapsed:.0f} samples/s"
                    f"  input wait {100 * event.wait_s / elapsed:.0f} %"
                )
            case kinds.EpochEnded():
                self.show_quarantined()
                done = "done" if event.whole else f"up to step {event.step}"
                self.line(
                    f"epoch {event.epoch + 1}/{self.epochs} {done}: {metrics_text(event.metrics)}"
                )
            case kinds.MetricsLogged() if self.due():
                self.last = time.monotonic()
                self.line(metrics_line(event.step, event.metrics))
            case kinds.ScriptOutput(rank=0):
                for line in event.text.split("\n"):
                    # Of a progress bar that overwrites itself, the visible part.
                    if shown := line.rstrip("\r").rpartition("\r")[2]:
                        self.line(shown)
            case kinds.Printed() | kinds.Note():
                self.line(event.text)
            case kinds.RecordQuarantined():
                self.quarantined(event.split, event.key, event.reason)
            case kinds.StopRequested():
                self.stop_asked = event.reason
                self.line(f"stop: {self.stop_asked}")
            case kinds.Stopped() if event.reason != self.stop_asked:
                self.line(f"stopped: {event.reason}")
            case kinds.Resumed():
                ended = event.epoch >= self.epochs
                where = "after the last epoch" if ended else f"at epoch {event.epoch + 1}"
                self.line(f"resumed from {event.path} {where}, step {event.step}")
            case kinds.ModelWritten():
                why = ", the last checkpoint"
                if event.metric is not None:  # the comma keeps its value out of SageMaker's metrics
                    why = f" by {event.metric}, {metric_text(event.metric, event.value)}"
                where = "" if event.whole else f" up to step {event.step}"
                self.line(f"exported: epoch {event.epoch}{where}{why}")
            case kinds.ExportWritten() if not event.error:
                tested = f"loaded again, {event.note}"
                if event.max_abs_diff is not None:
                    sizes = " and ".join(map(str, event.batch_sizes))
                    tested = f"max abs difference {event.max_abs_diff:.2g} (batches of {sizes})"
                self.line(f"exported {event.path}: {tested}")
            case kinds.TrainWorkerLost():
                left = count_of(event.restarts_left, "restart")
                self.line(f"{event.cause}; restarting training ({left} left after this one)")
            case kinds.Recovered():
                self.line(
                    f"training again after {event.seconds:.1f} s ({event.data_s:.1f} s for data)"
                )
            case kinds.HostChanged():
                self.line(f"{event.event.replace('_', ' ')}: {event.host}")
            case kinds.CpuHostsRequested():
                self.line(f"requesting {count_of(event.count, 'CPU host')}: {event.reason}")

    def due(self) -> bool:
        return time.monotonic() - self.last >= EVERY_S

    def quarantined(self, split: str, key: str, reason: str) -> None:
        """Show the first record of each reason at once, and count the others; each record once."""
        if (split, key) in self.known_bad:
            return
        self.known_bad.add((split, key))
        if (split, reason) not in self.bad:
            self.line(f"quarantined {split} record {key}: {reason}")
        first, more = self.bad.get((split, reason), (key, -1))
        self.bad[split, reason] = first, more + 1

    def show_quarantined(self) -> None:
        """One line for the equal reasons since the last time; each record is in quarantine.jsonl."""
        for (split, reason), (first, more) in self.bad.items():
            if more:
                records = count_of(more, f"more {split} record")
                self.line(f"quarantined {records} like {first}: {reason}")
                self.bad[split, reason] = first, 0

    def close(self, summary: Summary) -> None:
        self.show_quarantined()

    def table(self, rows: list[tuple[str, str]]) -> None:
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.line(f"  {name:<{width}}  {value}")


def metrics_text(metrics: dict[str, Any]) -> str:
    parts = []
    deep = [name for name in metrics if name.count("/") > 1][MOST_PARTS:]
    for name, value in metrics.items():
        if name == "perf/samples_per_s":
            parts.append(f"{value:.0f} samples/s")
        elif name == "perf/input_wait_pct":
            parts.append(f"input wait {value:.0f} %")
        elif name != "lr" and name not in deep:
            parts.append(f"{name} {metric_text(name, value)}")
    return "  ".join([*parts, f"({len(deep)} more in the report)"] if deep else parts)


def metric_text(name: str, value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{100 * value:.2f} %" if name.endswith("acc1") else f"{value:.4f}"


def closing_rows(summary: Summary, run_dir: str) -> list[tuple[str, str]]:
    best = {name: value for name, value in summary.metrics.best.items() if name.startswith("val/")}
    speed, records = summary.speed, summary.records
    if summary.script is not None:
        last = summary.metrics.last
        rows = [
            (f"best {name}", f"{value:.6g}")
            for name, value in best.items()
            if value != last.get(name)
        ]
        rows += [(name, f"{value:.6g}") for name, value in last.items()]
    else:
        deep = [name for name in best if name.count("/") > 1][MOST_PARTS:]
        rows = [
            (f"best {name}", metric_text(name, best[name])) for name in best if name not in deep
        ]
        rows.append(("samples/s", f"{speed.steady_samples_per_s:.0f}"))
        rows.append(("input wait", f"{speed.input_wait_pct:.0f} % of the training time"))
    if summary.bottleneck:
        rows.append(("bottleneck", judged(summary).headline))
    if summary.cache:
        held = sum(host["bytes"] for host in summary.cache["hosts"])
        text = (
            f"{summary.cache['hit_pct']:.0f} % of the last epoch's records came from {summary.cache['kind']},"
            f" {held / 1e9:.2f} GB on {count_of(len(summary.cache['hosts']), 'host')}"
        )
        rows.append(("cache", text))
    if summary.script is None:
        rows.append(("records", books_text(records)))
    seen = summary.notable()
    lost = [f"{seen['host_lost']} lost"] if seen["host_lost"] else []
    lost += (
        [f"{count_of(again, 'work item')} done again"] if (again := seen["work_repeated"]) else []
    )
    rows += [("hosts", ", ".join(lost))] if lost else []
    if seen["recovered"]:
        lasted = [event["seconds"] for event in summary.events if event["event"] == "recovered"]
        pause = f", {sum(lasted):.1f} s without training" * (len(lasted) == seen["recovered"])
        rows.append(("restarts", f"{seen['recovered']} after lost train workers{pause}"))
    if cost := cost_row(summary):
        rows.append(cost)
    if "url" in summary.tracking.get("mlflow", {}):
        rows.append(("mlflow", summary.tracking["mlflow"]["url"]))
    if summary.place == "rehearsal":  # paths in an emulated host; the launcher shows the real ones
        return rows
    if summary.model:
        rows.append(("model", summary.model))
    board = shlex.join(["tensorboard", "--logdir", f"{run_dir}/tensorboard"])
    return [*rows, ("run", run_dir), ("report", f"{run_dir}/report.html"), ("next", board)]


def books_text(records: Records) -> str:
    text = (
        f"{records.read} {records.verb} = {records.trained} trained"
        f" + {records.quarantined} quarantined + {records.remainder} remaining"
    )
    return f"{text}; {records.repeated} repeated" if records.repeated else text


def report(summary: Summary, console: Console, run_dir: Path, code: int, took_s: float) -> None:
    if code == 0:
        before = ""
        if took_s != summary.seconds:
            own = abs(summary.seconds - summary.earlier_s - took_s) < 0.1
            before = f"; {'with earlier starts' if own else 'trained before, in'} {summary.seconds:.0f} s"
        console.line(f"{summary.name}: done in {took_s:.0f} s{before}")
        console.table(closing_rows(summary, str(run_dir)))
        return
    kind = "stopped" if summary.status == "interrupted" else "error"
    for problem in (summary.error or "unknown").splitlines():
        console.line(f"{kind}: {problem}")
    if code != 2 and summary.place != "rehearsal":
        console.line(f"details: {run_dir}/logs/driver.log")
