"""Head: writes the run's events to files: events.jsonl, quarantine.jsonl, summary.json."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections import Counter, defaultdict, deque
from itertools import zip_longest
from pathlib import Path
from typing import Any

from stoker.config.places import CpuHostsConfig
from stoker.errors import UsageError
from stoker.events import kinds
from stoker.events.bottleneck import MIN_STEPS, bottleneck
from stoker.events.prices import PriceList, run_cost
from stoker.events.sinks import Sink
from stoker.events.summary import STEP_TERMS, TRAINED, Summary, read_summary

NOTABLE: tuple[type[kinds.Event], ...] = (  # what the summary includes
    *(kinds.Resumed, kinds.StopRequested, kinds.Stopped, kinds.Note, kinds.HostChanged),
    *(kinds.CpuHostsRequested, kinds.HostsClosing, kinds.WorkRepeated),
    *(kinds.TrainWorkerLost, kinds.Recovered),
)

Sums = defaultdict[str, float]
WAITED = ("elapsed_s", "wait_s", "longest_wait_s")

REFRESH_S, PAUSE = 2.0, 20
"""Least time between two writes of the summary, and in multiples of what one takes."""
MOST_TIMES = 10_000
"""The median step is that of so many last ones."""
LISTED = ("split", "key", "reason")


class Recorder(Sink):
    essential = True

    def __init__(
        self,
        run_dir: Path,
        summary: Summary,
        process_started: float,
        prices: PriceList | None = None,
        scaling: CpuHostsConfig | None = None,
    ) -> None:
        self.run_dir, self.summary, self.prices = run_dir, summary, prices
        self.scaling = scaling or CpuHostsConfig()
        self.process_started = process_started
        self.earlier: Summary | None = None
        """The summary of the start before."""
        with contextlib.suppress(UsageError):  # none, or cut by a full disk
            earlier = read_summary(run_dir / "summary.json")
            summary.started, summary.earlier_s = earlier.started or summary.started, earlier.seconds
            summary.earlier_cost = earlier.cost
            if summary.script is not None:  # no checkpoint of its own fills them in
                for name in TRAINED:
                    setattr(summary, name, getattr(earlier, name))
            if earlier.speed.samples_per_s:
                self.earlier = earlier
        for record in kinds.read_events(run_dir / "events.jsonl", NOTABLE):
            summary.keep(record.record())
        self.took_s = 0.0
        self.started = time.monotonic()
        self.events_file = (run_dir / "events.jsonl").open("a", buffering=1)
        self.refreshed, self.pause_s = self.started, REFRESH_S
        rows = kinds.json_lines(run_dir / "quarantine.jsonl")
        self.listed = {tuple(str(row.get(name)) for name in LISTED) for row in rows}
        """A record has one line for each reason, over all epochs and starts."""
        self.figures: dict[str, Any] = {}  # the coordinator's, at the end
        self.totals: Sums = defaultdict(int)
        self.steady: Sums = defaultdict(int)
        self.step_ms: deque[float] = deque(maxlen=MOST_TIMES)
        self.running: Sums = defaultdict(int)
        """Sums of the current pass, up to its last logged step."""
        self.loaders: dict[int, Sums] = {}
        self.warm = False
        """Whether a pass has ended since the train workers started."""
        self.pass_from = self.told_step = summary.steps
        """The global steps before the current pass, and at its last logged step."""
        self.worker_nodes: dict[int, str] = {}
        self.trained = False
        """Whether this start has trained a step."""
        self.cpu: dict[tuple[bool, str], tuple[int, float, float]] = {}
        """Samples of CPU use, their sum and the most; by whether training had begun, and host."""
        self.gpus: dict[str, tuple[int, list[float]]] = {}
        """Number of samples of a host's GPUs, and the most of each."""
        self.ended: list[kinds.EpochEnded] = []
        """By this start, as far as their weights are kept, and the metrics before them."""
        self.metrics_before = summary.metrics

    def on_event(self, event: kinds.Event) -> None:
        match event:
            case kinds.RecordIds():
                name = f"{event.split}-epoch-{event.epoch:03d}-rank-{event.rank}.txt"
                (self.run_dir / "records").mkdir(exist_ok=True)
                keys = "".join(f"{key}\n" for key in event.keys)
                (self.run_dir / "records" / name).write_text(keys)
                return
            case kinds.ScriptOutput():
                path = self.run_dir / "logs" / f"script-rank-{event.rank}.log"
                with path.open("a", newline="") as file:
                    file.write(event.text)
                return
        record = event.record()
        self.events_file.write(json.dumps(record) + "\n")
        if isinstance(event, NOTABLE):
            self.summary.keep(record)
        self._sum_up(event)
        if time.monotonic() - self.refreshed > self.pause_s:
            self.refresh()

    def _sum_up(self, event: kinds.Event) -> None:
        summary = self.summary
        match event:
            case kinds.AttemptStarted():
                self.warm = False
            case kinds.HostCpu():
                for host, used in event.hosts.items():
                    count, total, most = self.cpu.get((self.trained, host), (0, 0.0, used))
                    self.cpu[self.trained, host] = count + 1, total + used, max(most, used)
                for host, gpus in event.gpus.items():
                    samples, most_used = self.gpus.get(host, (0, []))
                    pairs = zip_longest(most_used, gpus, fillvalue=0.0)
                    self.gpus[host] = samples + 1, [max(pair) for pair in pairs]
            case kinds.PhaseDone():
                summary.startup.setdefault(event.phase, round(event.time - self.process_started, 2))
            case kinds.TrainWorkerStarted():
                # By rank, so that a restarted worker counts once, on its present host.
                self.worker_nodes[event.rank] = event.node
                on_hosts = Counter(map(summary.host_of, self.worker_nodes.values()))
                summary.train_workers_by_host = dict(on_hosts)
                # Those of a Ray script's trainer are known only once they report.
                summary.train_workers = max(summary.train_workers, len(self.worker_nodes))
            case kinds.RecordQuarantined():
                row = event.model_dump(include={*LISTED, "epoch"})
                if (line := tuple(row[name] for name in LISTED)) not in self.listed:
                    self.listed.add(line)
                    with (self.run_dir / "quarantine.jsonl").open("a") as file:
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
            case kinds.StepLogged():
                self._on_step(event)
            case kinds.EpochEnded():
                summary.steps, summary.epochs = event.step, event.epoch + 1
                if not self.ended:
                    self.metrics_before = summary.metrics.model_copy(deep=True)
                self.ended.append(event)
                summary.metrics.take(event.metrics)
            case kinds.MetricsLogged():
                if event.is_step:  # a script may count differently from its loader
                    self.told_step = max(self.told_step, event.step)
                    summary.steps = max(summary.steps, event.step)
                self.trained |= event.step > 0
                summary.metrics.take({**summary.metrics.last, **event.metrics})
            case kinds.LoaderProgress():
                self._on_loader(event)
            case kinds.CacheUsed():
                self._on_cache(event)
            case kinds.ExportWritten():
                others = [done for done in summary.exports if done["format"] != event.format]
                summary.exports = [*others, event.values()]
            case kinds.ModelWritten():
                values = event.values().items()
                summary.model_from = {n: v for n, v in values if n not in ("path", "loss")}
            case kinds.RecordsCounted():
                counts = event.values().items()
                summary.records.add({n: value for n, value in counts if n != "remainder_ids"})
            case kinds.Resumed():
                summary.records.rewind(event.epoch, event.validate_only)
                if self.ended:
                    self.ended = [done for done in self.ended if _within(done, event)]
                    summary.metrics = self.metrics_before.model_copy(deep=True)
                    for done in self.ended:
                        summary.metrics.take(done.metrics)
                self.running.clear()
                self.told_step = self.pass_from = event.step
            case kinds.PassEnded(split="train"):
                self._on_pass(event)

    def _on_step(self, event: kinds.StepLogged) -> None:
        self.summary.steps, self.trained = event.step, True
        if self.summary.speed.first_step_s is None:
            self.summary.speed.first_step_s = round(event.time - self.process_started, 2)
            self.summary.startup["first step"] = self.summary.speed.first_step_s
        if event.step <= self.told_step:  # restarted without a checkpoint
            self.running.clear()
            self.told_step = self.pass_from = 0
        seconds = event.elapsed_s - self.running["elapsed_s"]
        self.running["steps"] += event.step - self.told_step
        self.told_step = event.step
        # Terms are means since the previous logged step; other figures are sums since the start of the pass.
        terms = event.terms_ms
        total = sum(terms.values()) or 1.0
        for name, mean_ms in terms.items():
            self.running[f"{name}_s"] += seconds * mean_ms / total
        for name in ("elapsed_s", "wait_s", "first_wait_s", "longest_wait_s", "batches"):
            self.running[name] = getattr(event, name)
        self.running["samples"] = event.epoch_samples

    def _on_loader(self, event: kinds.LoaderProgress) -> None:
        """Of a script's `stoker.DataLoader` since its pass began; ranks are alike."""
        if event.rank == 0:
            # The times begin when the first batch is there, so it counts for no rate.
            steps = event.steps - 1
            samples = event.samples * max(self.summary.train_workers, 1) * steps // event.steps
            passed = {name: getattr(event, name) for name in WAITED}
            passed |= {"taken": event.steps, "steps": steps, "batches": steps, "samples": samples}
            passed |= {"compute_s": event.elapsed_s - event.wait_s}
            passed |= {"wait_production_s": event.wait_s}
            self.loaders[event.loader], self.trained = Sums(int, passed), True
        self.running = _together(*self.loaders.values())
        self.summary.steps = max(self.told_step, int(self.running["taken"]))

    def _on_cache(self, event: kinds.CacheUsed) -> None:
        hosts = [
            {
                "host": self.summary.host_of(node),
                **use.model_dump(include={"bytes", "limit_bytes"}),
                "hit_pct": _percent(use.found, use.records),
            }
            for node, use in event.hosts.items()
        ]
        cache: dict[str, Any] = {"kind": event.kind, "hosts": hosts}
        if event.split == "train":
            cache["hit_pct"] = _percent(event.found, event.records)
            self.summary.cache = cache
        elif self.summary.cache:
            by_host = {row["host"]: row for row in hosts}
            for row in self.summary.cache["hosts"]:
                row["bytes"] = by_host.get(row["host"], row)["bytes"]

    def _on_pass(self, event: kinds.PassEnded) -> None:
        self.trained |= event.steps > 0
        self.step_ms.extend(event.step_ms)
        self.running.clear()
        self.summary.steps = self.told_step = self.pass_from = self.pass_from + event.steps
        own = {"samples": event.samples, "elapsed_s": event.elapsed_s, "steps": event.steps}
        figures = Sums(int, own | event.times)
        self.totals = _together(self.totals, figures)
        if self.warm:
            self.steady = _together(self.steady, figures)
        self.warm = True

    def refresh(self) -> None:
        began = time.monotonic()
        self._fill()
        self.summary.model_copy(update=self._kept()).write(self.run_dir)
        self.refreshed = time.monotonic()
        self.pause_s = max(REFRESH_S, PAUSE * (self.refreshed - began))

    def _fill(self) -> None:
        self.summary.host_cpu = []
        # A host that came back under its name counts once.
        for name, group in {host.host: host.group for host in self.summary.cluster.hosts}.items():
            # What was measured before the first step counts only if there is nothing else.
            if used := self.cpu.get((True, name)) or self.cpu.get((False, name)):
                use = {"mean_pct": round(used[1] / used[0], 1), "max_pct": used[2]}
                self.summary.host_cpu.append({"host": name, "group": group, **use})
        self.summary.host_gpus = [
            {"host": host, "samples": samples, "max_pct": most}
            for host, (samples, most) in self.gpus.items()
        ]
        self._fill_speed()
        self.took_s = round(time.monotonic() - self.started, 2)
        self.summary.seconds = round(self.summary.earlier_s + self.took_s, 2)
        if self.prices is not None:
            self.summary.cost = run_cost(self.summary, self.prices, self.scaling)

    def _kept(self) -> dict[str, Any]:
        """The figures of the start before, as long as this one has trained no step."""
        return self.summary.measured_by(self.earlier) if self.earlier and not self.trained else {}

    def _fill_speed(self) -> None:
        speed, total = self.summary.speed, _together(self.totals, self.running)
        if total["elapsed_s"]:
            speed.samples_per_s = round(total["samples"] / total["elapsed_s"], 2)
            # The first pass warms up: processes start and libraries are imported.
            steady = _together(self.steady, self.running) if self.warm else self.steady
            steady = steady if steady["steps"] >= MIN_STEPS else total
            elapsed = max(steady["elapsed_s"], 1e-9)
            speed.steady_samples_per_s = round(steady["samples"] / elapsed, 2)
            speed.input_wait_pct = round(100 * steady["wait_s"] / elapsed, 2)
            speed.steps, speed.batches = int(steady["steps"]), int(steady["batches"])
            batches = max(speed.batches, 1)
            speed.first_wait_s = round(steady["first_wait_s"], 3)
            speed.longest_wait_s = round(steady["longest_wait_s"], 3)
            mean_ms = {n: 1000 * steady[f"{n}_s"] / batches for n in STEP_TERMS}
            speed.step_terms_ms = {n: round(ms, 3) for n, ms in mean_ms.items()}
            judged = speed.steps >= MIN_STEPS
            self.summary.bottleneck = bottleneck(self.summary, steady) if judged else None
        if self.step_ms:
            speed.step_ms_p50 = round(statistics.median(self.step_ms), 3)

    def close(self, summary: Summary) -> None:
        if figures := self.figures:
            self.summary.speed.bytes_per_sample = round(figures["bytes_per_sample"], 1)
            self.summary.chain = figures["chain"]
            self.summary.operators = figures.get("operators", [])
            tasks = figures["tasks_by_node"].items()
            by_host = {self.summary.host_of(node): count for node, count in tasks}
            self.summary.chain_tasks_by_host = by_host
            records = self.summary.records
            for books in figures["open"]:
                same = {key: books.get(key) for key in ("split", "epoch", "trained")}.items()
                if not any(same <= booked.items() for booked in records.epochs):
                    records.add(books)
        self._fill()
        for name, value in self._kept().items():
            setattr(self.summary, name, value)
        self.summary.write(self.run_dir)
        self.events_file.close()


def _together(*parts: Sums) -> Sums:
    """The sums of several passes, with the longest of their waits."""
    found: Sums = defaultdict(int)
    for part in parts:
        for name, value in part.items():
            found[name] += value
    found["longest_wait_s"] = max((part["longest_wait_s"] for part in parts), default=0)
    return found


def _within(done: kinds.EpochEnded, start: kinds.Resumed) -> bool:
    """Whether the checkpoint contains the epoch: it may be of its last step, but from before its end."""
    if done.step != start.step:
        return done.step < start.step
    return (done.epoch < start.epoch or not done.whole) and done.epoch != start.validate_only


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2) if whole else 0.0
