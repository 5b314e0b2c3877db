"""Head: the actor between the driver and the script's processes: events, stops, and how it all ended."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from stoker.data.transport.agents import Agents
from stoker.integrations.scripts.failures import Exit, first_failure, reason_of

GRACE_S = 3.0
"""From the first failure until the other ranks are ended: those that fail with it tell why themselves."""


@dataclass(frozen=True)
class Report:
    """Train worker → head: what its script did since the last report."""

    attempt: str
    rank: int
    output: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    end: Exit | None = None


@dataclass(frozen=True)
class Order:
    """Head → train worker."""

    stop: str = ""
    """Why the script is to end, or "": somebody asked, or another rank has failed."""
    soon: bool = False
    """Whether it gets only seconds for that, as there is nothing more to save together."""
    over: bool = False
    """All ranks have ended."""
    failure: str = ""
    """Why the run has failed, in one line; "" where it has not."""


class Supervisor:
    """Head: one per run, zero CPUs; every call answers at once.

    Args:
        script: its name.
        workers: train workers.
    """

    def __init__(self, script: str, workers: int) -> None:
        self.script, self.workers = script, workers
        self.events: list[dict[str, Any]] = []
        self.attempts: list[str] = []
        self.exits: list[Exit] = []
        self.stop_reason = ""
        self.failed_at = math.inf

    def watch_hosts(self) -> None:
        """Driver's call, once: have every host say how busy its CPUs are."""
        self._agents = Agents(lambda used: self.log("host_cpu", {"hosts": used}), serve=False)

    def report(self, report: Report) -> Order:
        """Train worker's call, several times a second."""
        if report.attempt not in self.attempts:
            self._begin(report.attempt)
        if report.attempt != self.attempts[-1]:
            return Order(stop="the train workers have started again", soon=True, over=True)
        if report.output:
            self.log("output", {"rank": report.rank, "text": report.output})
        for event in report.events:
            self.events.append(_finite(event))
        if report.end is not None and report.end.rank not in {end.rank for end in self.exits}:
            self._ended(report.end)
        return self._order()

    def _begin(self, attempt: str) -> None:
        self.attempts.append(attempt)
        self.exits, self.failed_at = [], math.inf
        if len(self.attempts) > 1:
            text = f"the script starts again on all train workers (start {len(self.attempts)})"
            self.log("note", {"text": text})

    def _ended(self, end: Exit) -> None:
        # Once a stop was asked for, a rank that it ended takes others along.
        stopped = self.stop_reason and any(other.asked for other in [*self.exits, end])
        self.exits.append(end)
        if end.failed and not stopped:
            self.failed_at = min(self.failed_at, time.monotonic())
        if len(self.exits) == self.workers and all(e.code == 0 and not e.asked for e in self.exits):
            self.log("complete", {})

    def _order(self) -> Order:
        over = len(self.exits) == self.workers
        if self.failed_at < math.inf:
            first = first_failure(self.exits)
            ending = over or time.monotonic() - self.failed_at > GRACE_S
            failure = reason_of(self.script, first) if first else ""
            return Order(failure if ending else "", True, over, failure if over else "")
        return Order(self.stop_reason, False, over)

    def log(self, event: str, values: dict[str, Any]) -> None:
        """Anyone's call: one event for the sinks."""
        self.events.append({"time": round(time.time(), 3), "event": event, **values})

    def request_stop(self, reason: str) -> None:
        """Driver's call: have every rank sent SIGTERM."""
        if not self.stop_reason:
            self.stop_reason = reason
            self.log("stop", {"reason": reason})

    def drain(self) -> list[dict[str, Any]]:
        """Driver's call: the events since the last call."""
        events, self.events = self.events, []
        return events

    def figures(self) -> dict[str, Any]:
        """Driver's call: a script's data plane is its own."""
        return {}


def _finite(event: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: what is not finite becomes null."""
    metrics = event.get("metrics")
    if not isinstance(metrics, dict):
        return event
    return {**event, "metrics": {k: v if math.isfinite(v) else None for k, v in metrics.items()}}
