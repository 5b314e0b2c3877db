"""Head: the steps of a run: open the data → build the trainer → fit → write the summary.

code = run(resolved, place)       with Ray connected
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from stoker.checkpoints.format import WRITE_S
from stoker.config import redaction
from stoker.config.loading import Resolved, resolved_yaml
from stoker.config.places import CpuHostsConfig
from stoker.config.schema import Config
from stoker.entry.fit import Fit, open_log
from stoker.entry.job_checks import Opened, open_all, own_sinks
from stoker.errors import Failure, StokerError, UsageError
from stoker.events import kinds
from stoker.events.console import Console, report
from stoker.events.kinds import HostChanged, HostJoined, HostLost, HostReleased
from stoker.events.mlflow import mlflow_sinks
from stoker.events.prices import prices_of
from stoker.events.recorder import Recorder
from stoker.events.sinks import Board, Sink, Tracking
from stoker.events.summary import Cluster, Host, Summary
from stoker.hosts import run_lock
from stoker.hosts.topology import GROUP_LABEL, host_name, label
from stoker.place import Outcome, RunPlace
from stoker.recipe import with_types
from stoker.storage.checkpoint_store import open_store, refuse_unwritable
from stoker.train.recipe_work import RecipeWork

if TYPE_CHECKING:
    from stoker.entry.fit import Work
    from stoker.scripts.supervisor import ScriptWork

POLL_S = 1.0
STOP_SHARE = 0.75
"""After this share of the time until the place kills, the driver gives up a stop."""
STOP_STILL_S, NOBODY_S = WRITE_S + 60, 90.0
"""In other places it does after so long without progress, or without a train worker. The write of a
checkpoint says nothing until it ends, earlier than this."""
PROGRESS = (
    kinds.TrainWorkerStarted | kinds.StepLogged | kinds.PassEnded | kinds.EpochEnded
    | kinds.MetricsLogged | kinds.LoaderProgress | kinds.CheckpointWritten | kinds.ModelWritten
    | kinds.ExportWritten | kinds.Stopped | kinds.Note | kinds.Printed | kinds.ScriptOutput
)  # fmt: skip
ANSWER_S = 120.0
"""Deadline of a call to the coordinator, which may still be starting on a busy host."""

STATISTICS = "ray_data_stats.txt"
_stop_reason = ""
_stop_code = 143
_wake: SimpleQueue[None] = SimpleQueue()
"""Ends a wait of `follow`; a signal handler may put into it at any time."""


def request_stop(reason: str, code: int = 143) -> None:
    """Request a stop with a checkpoint; safe to call from a signal handler."""
    global _stop_reason, _stop_code
    if not _stop_reason:
        _stop_reason, _stop_code = reason, code
        _wake.put(None)


def stop_requested() -> str:
    """The reason; empty if no stop was requested."""
    return _stop_reason


def run(resolved: Resolved, place: RunPlace, opened: Opened | None = None) -> Outcome:
    """Exit codes: 0 done, 1 failed, 2 wrong usage, 130 or 143 stopped by request."""
    resolved = replace(resolved, config=with_types(resolved.config))
    config = resolved.config
    redaction.learn_job(config.model_dump(mode="json"))
    log = open_log(place.run_dir)
    if place.name in ("local", "ray") and not place.copies:  # of others, ask their service
        run_lock.hold(place.run_dir)
    (place.run_dir / "config.yaml").write_text(resolved_yaml(resolved), encoding="utf-8")
    summary = Summary(
        name=config.name,
        script=config.script,
        args=redaction.redact(config.args, "args"),
        place=place.name,
        started=datetime.now().astimezone().isoformat(timespec="seconds"),
    )
    summary.cluster = Cluster(
        hosts=hosts(config.cluster.cpu_hosts), formed_s=round(place.formed_s, 2)
    )
    process_started = time.time() - place.formed_s
    prices = prices_of(config, summary.cluster.hosts)
    recorder = Recorder(place.run_dir, summary, process_started, prices, config.cluster.cpu_hosts)
    recorder.refresh()
    console = Console(config.train.epochs, place.run_dir / "logs" / "console.log")
    tracking = Tracking(summary, [recorder, console])
    coordinator = None
    ray_script: ScriptWork | None = None
    code = 1
    try:
        tracking.add(*optional_sinks(config, place.run_dir))
        tracking.phase("cluster formed")
        work: Work
        if config.script is not None:
            from stoker.scripts.supervisor import ScriptWork

            work = ScriptWork(config, place, tracking)
            ray_script = work if config.driver else None
        else:
            found, data = opened or open_all(resolved)
            tracking.phase("data opened")
            work = RecipeWork(found, data, place, tracking)
        check_groups(config, summary.cluster.hosts)
        refuse_unwritable(work.where, "checkpoint.dir")
        refuse_unwritable(str(place.model_dir), "model")
        summary.train_workers = work.workers
        coordinator = work.start_coordinator()
        console.line(work.opening_line())
        for note in work.notes():
            tracking.note(f"note: {note}")
        fit = Fit(work, place, coordinator, lambda: _wake.put(None))
        store = open_store(work.where, work.synced)
        tracking.add(*mlflow_sinks(work.config, place, store, tracking.say))
        follow(fit, coordinator, tracking, config.cluster.cpu_hosts, place.killed_after_s)
        code = conclude(fit, summary)
        if code == 0 and work.leaves_model():
            summary.model = str(place.model_dir)
    except Exception as error:
        summary.status, summary.error = "failed", str(Failure.of(error))
        code = error.exit_code if isinstance(error, StokerError) else 1
        log.error("%s", traceback.format_exc())
    finally:
        recorder.figures = last_figures(coordinator, tracking, place.run_dir)
        if ray_script is not None:
            with contextlib.suppress(Exception):  # must not cost the run's own figures
                ray_script.write_statistics(place.run_dir / "logs" / STATISTICS)
        summary.error = summary.error and redaction.scrub(summary.error)
        tracking.close()
        if coordinator is not None:
            import ray

            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(coordinator)  # and its agents, which would live as long as this process
    report(summary, console, place.run_dir, code, recorder.took_s)
    cause = summary.error or f"the driver ended with exit code {code}"
    return Outcome(code, "" if code == 0 else cause)


def optional_sinks(config: Config, run_dir: Path) -> list[Sink]:
    sinks: list[Sink] = [Board(run_dir)] if config.tracking.tensorboard else []
    sinks += [kind(run_dir, config) for kind in own_sinks(config)]
    return [*sinks, ReportFile(run_dir)]


class ReportFile(Sink):
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def close(self, summary: Summary) -> None:
        from stoker.events.report import REPORT, write_report

        write_report([self.run_dir], self.run_dir / REPORT)


def check_groups(config: Config, hosts: list[Host]) -> None:
    """Reject groups without hosts, whose tasks would never be scheduled."""
    there = sorted({host.group for host in hosts})
    unknown = [group for group in config.data.preprocess_on if label(group) not in there]
    if unknown and not config.cluster.cpu_hosts.max:
        raise UsageError(
            f"data.preprocess_on: no host in group {', '.join(unknown)}; available: {', '.join(there)}"
        )


class StopDeadline:
    """How long a stop may last; see RunPlace.killed_after_s."""

    def __init__(self, killed_after_s: float | None) -> None:
        self._killed_after_s = killed_after_s
        self._trains, self._heard = False, 0.0

    def take(self, events: list[kinds.Event]) -> None:
        for event in events:
            if isinstance(event, kinds.TrainWorkerStarted | kinds.DriverStarted):
                self._trains = True
            elif isinstance(event, kinds.TrainWorkerLost) or (
                isinstance(event, kinds.AttemptStarted) and event.ahead
            ):
                self._trains = False  # whoever starts later stops at once
            if isinstance(event, PROGRESS):
                self._heard = time.monotonic()

    def passed_since(self, asked: float) -> str:
        """What is wrong if it is over."""
        if self._killed_after_s is None and self._trains:
            still_s = time.monotonic() - max(asked, self._heard)
            late = still_s > STOP_STILL_S
            return f"training made no progress for {still_s:.0f} s after" if late else ""
        deadline_s = NOBODY_S if self._killed_after_s is None else self._killed_after_s * STOP_SHARE
        late = time.monotonic() - asked > deadline_s
        return f"training did not end within {deadline_s:.0f} s of" if late else ""


def follow(
    fit: Fit,
    coordinator: Any,
    tracking: Tracking,
    scaling: CpuHostsConfig,
    killed_after_s: float | None = None,
) -> None:
    """Until fit() returns, forward events, detect lost hosts and relay stop requests."""
    import ray

    stop_sent, stop = 0.0, StopDeadline(killed_after_s)
    next_hosts = time.monotonic() + 2
    while True:
        alive = fit.alive
        events = tracking.take(ray.get(coordinator.drain.remote(), timeout=ANSWER_S))
        fit.complete = fit.complete or any(isinstance(event, kinds.Completed) for event in events)
        if not alive:
            return
        if _stop_reason and not stop_sent:
            coordinator.request_stop.remote(_stop_reason)
            stop_sent = time.monotonic()
        stop.take(events)
        if stop_sent and (late := stop.passed_since(stop_sent)):
            fit.reason = f"{late}: {_stop_reason}"
            return
        if time.monotonic() > next_hosts:
            next_hosts = time.monotonic() + 2
            tracking.take(host_changes(tracking.summary, scaling))
        with contextlib.suppress(Empty):
            _wake.get(timeout=POLL_S)


def conclude(fit: Fit, summary: Summary) -> int:
    if fit.failure or fit.reason:
        summary.status, summary.error = "failed", fit.reason or str(fit.failure)
        return 1
    if _stop_reason and not fit.complete:
        summary.status, summary.error = "interrupted", _stop_reason
        return _stop_code
    failed = [done["error"] for done in summary.exports if done["error"]]
    if failed:
        summary.status, summary.error = "failed", f"export failed; {'; '.join(failed)}"
        return 1
    summary.status = "succeeded"
    return 0


def last_figures(coordinator: Any, tracking: Tracking, run_dir: Path) -> dict[str, Any]:
    """Take the coordinator's last events and return its figures, if it is still alive."""
    import ray

    if coordinator is None:
        return {}
    try:
        tracking.take(ray.get(coordinator.drain.remote(), timeout=20))
        figures: dict[str, Any] = ray.get(coordinator.figures.remote(), timeout=20)
        if not figures:
            return {}
    except Exception:
        logging.getLogger("stoker").error("%s", traceback.format_exc())
        return {}
    try:
        stats, operators = ray.get(coordinator.ray_data_stats.remote(), timeout=20)
        (run_dir / "logs" / STATISTICS).write_text(redaction.scrub(stats) + "\n")
        figures["operators"] = operators
    except Exception:
        # Missing Ray Data statistics must not cost the run's own figures.
        logging.getLogger("stoker").error("%s", traceback.format_exc())
    return figures


def hosts(scaling: CpuHostsConfig) -> list[Host]:
    import ray

    found, now = [], time.time()
    for node in ray.nodes():
        if node["Alive"]:
            labels, resources = node.get("Labels", {}), node["Resources"]
            found.append(
                Host(
                    host=host_name(node),
                    group=labels.get(GROUP_LABEL, "default"),
                    cpus=resources.get("CPU", 0),
                    gpus=resources.get("GPU", 0),
                    ip=node["NodeManagerAddress"],
                    type=labels.get("stoker.type"),
                    node_id=node["NodeID"],
                    scaled=bool(scaling.max and resources.get(scaling.resource, 0)),
                    since=now,
                )
            )
    return sorted(found, key=lambda host: (host.group, host.host))


def host_changes(summary: Summary, scaling: CpuHostsConfig) -> list[dict[str, Any]]:
    """Events since the last call; adds late hosts to the summary, and when the others ended."""
    now = {host.node_id: host for host in hosts(scaling)}
    known = {host.node_id: host for host in summary.cluster.hosts}
    closing = (event["nodes"] for event in reversed(summary.events) if event["event"] == "closing")
    released: list[str] = next(closing, [])
    changed: list[tuple[type[HostChanged], Host]] = []
    for node, host in known.items():
        if node not in now and host.until is None:
            host.until = time.time()
            changed.append((HostReleased if node in released else HostLost, host))
    joined = [host for node, host in now.items() if node not in known]
    summary.cluster.hosts += joined
    changed += [(HostJoined, host) for host in joined]
    return [kind(host=h.host, group=h.group, node=h.node_id).record() for kind, h in changed]
