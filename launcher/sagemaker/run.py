"""Laptop: a training job that exists: its status, its logs, its end and what it cost."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from launcher.sagemaker import aws, render
from launcher.sagemaker.groups import Group
from stoker.costs.prices import price_list
from stoker.errors import UsageError

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
POLL_S = 5.0
LATE_S = 60.0
"""CloudWatch shows lines of different hosts with different delay; so far back is read again."""
DRAIN_S = 15.0
"""So long after a job's end its last lines may still arrive."""

_WORDS = {"InProgress": "running", "Completed": "succeeded", "Stopping": "running: stopping"}
_EXIT_CODES = {"succeeded": 0, "failed": 1, "interrupted": 143}
_ORIGIN = re.compile(r"^\[(?P<group>.+) (?P<host>\S+) (?:head|worker|start)\] ?(?P<text>.*)$", re.S)


@dataclass
class SageMakerRun:
    """Laptop: one training job, by region and name."""

    region: str
    name: str
    poll_s: float = POLL_S
    _groups: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def id(self) -> str:
        return f"sagemaker:{self.region}/{self.name}"

    def describe(self) -> dict[str, Any]:
        """The service's own description.

        Raises:
            UsageError: no such job, or no access.
        """
        with aws.readable_errors(f"job {self.name}"):
            found: dict[str, Any] = aws.client("sagemaker", self.region).describe_training_job(
                TrainingJobName=self.name
            )
        return found

    def status(self) -> str:
        """running, succeeded, failed or interrupted, with the service's reason after a colon."""
        return status_text(self.describe())

    def wait(self) -> int:
        """Block until the end; the exit code that the head's process had, as far as known."""
        while (state := self.status()).startswith("running"):
            time.sleep(self.poll_s)
        return _EXIT_CODES.get(state.partition(":")[0], 1)

    def stop(self) -> None:
        """SIGTERM to every host, then 120 s until SIGKILL: time for a checkpoint."""
        with aws.readable_errors(f"job {self.name}"):
            aws.client("sagemaker", self.region).stop_training_job(TrainingJobName=self.name)

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The lines of all hosts in the order of their time, each as `[group/host] text`."""
        seen: dict[str, int] = {}
        start_ms = 0
        ended_at: float | None = None
        last_state = ""
        while True:
            description = self.describe()
            if follow and (state := _progress(description)) != last_state:
                last_state = state
                yield f"[{self.name}] {state}"
            fresh = [event for event in self._events(start_ms) if event["eventId"] not in seen]
            for event in sorted(fresh, key=lambda event: event["timestamp"]):
                seen[event["eventId"]] = event["timestamp"]
                yield from self._lines(event, description)
            if seen:
                start_ms = max(0, max(seen.values()) - int(LATE_S * 1000))
                seen = {key: stamp for key, stamp in seen.items() if stamp >= start_ms}
            if not follow:
                return
            if not status_text(description).startswith("running"):
                ended_at = ended_at or time.monotonic()
                # The last lines arrive late; the first quiet look after that is the end.
                if not fresh and time.monotonic() - ended_at >= min(DRAIN_S, 3 * self.poll_s):
                    return
            time.sleep(self.poll_s)

    def closing(self) -> str:
        """After the end: the outcome, billable time and cost by group, where the model lies."""
        description = self.describe()
        lines = [f"{self.name}: {status_text(description)}"]
        billable_s = description.get("BillableTimeInSeconds")
        if billable_s is None and {"TrainingStartTime", "TrainingEndTime"} <= set(description):
            # The service tells billable time some seconds after the end.
            ran = description["TrainingEndTime"] - description["TrainingStartTime"]
            billable_s = round(ran.total_seconds())
        if billable_s is not None:
            groups = described_groups(description)
            lines.append(render.billed_table(groups, billable_s, price_list(self.region)))
        if artefact := description.get("ModelArtifacts", {}).get("S3ModelArtifacts"):
            lines.append(f"model: {artefact}")
        return "\n".join(lines)

    def detached(self) -> str:
        """What to say when the user leaves: the job goes on."""
        return (
            f"{self.name} goes on without you. Come back: stoker logs -f {self.id};"
            f" stop it: stoker stop {self.id}"
        )

    def _events(self, start_ms: int) -> Iterator[dict[str, Any]]:
        client = aws.client("logs", self.region)
        query: dict[str, Any] = {
            "logGroupName": LOG_GROUP,
            "logStreamNamePrefix": f"{self.name}/",
            "startTime": start_ms,
        }
        try:
            for page in client.get_paginator("filter_log_events").paginate(**query):
                for event in page["events"]:
                    if event["logStreamName"].startswith(f"{self.name}/"):
                        yield event
        except client.exceptions.ResourceNotFoundException:
            return  # no host has written yet
        except Exception:
            with aws.readable_errors("logs"):
                raise

    def _lines(self, event: dict[str, Any], description: dict[str, Any]) -> Iterator[str]:
        stream = event["logStreamName"].partition("/")[2]
        match = re.search(r"algo-\d+", stream)
        host = match.group() if match else stream
        groups = description.get("ResourceConfig", {}).get("InstanceGroups")
        for line in event["message"].splitlines() or [""]:
            # Streams do not tell the group; the host's own lines do, once Stoker runs there.
            if origin := _ORIGIN.match(line):
                host, line = origin["host"], origin["text"]
                self._groups[host] = origin["group"]
            group = self._groups.get(host) if groups else "all"
            yield f"[{group}/{host}] {line}" if group else f"[{host}] {line}"


def status_text(description: dict[str, Any]) -> str:
    """Laptop: DescribeTrainingJob's answer in the words of every backend."""
    state = description.get("TrainingJobStatus", "")
    detail = description.get("SecondaryStatus", "")
    if state == "Failed":
        reason = " ".join(description.get("FailureReason", "no reason given").split())
        return f"failed: {reason}"
    if state == "Stopped":
        return f"interrupted: {detail}" if detail and detail != "Stopped" else "interrupted"
    if state == "InProgress" and detail:
        return f"running: {detail}"
    return _WORDS.get(state, f"unknown: {state}")


def described_groups(description: dict[str, Any]) -> tuple[Group, ...]:
    """Laptop: the instance groups of an existing job."""
    resources = description.get("ResourceConfig", {})
    if listed := resources.get("InstanceGroups"):
        return tuple(
            Group(one["InstanceGroupName"], one["InstanceType"], one["InstanceCount"], "") for one in listed
        )
    if "InstanceType" not in resources:
        raise UsageError(f"{description.get('TrainingJobName')}: the service names no hosts of this job")
    return (Group("all", resources["InstanceType"], resources.get("InstanceCount", 1), ""),)


def _progress(description: dict[str, Any]) -> str:
    transitions = description.get("SecondaryStatusTransitions") or [{}]
    message = transitions[-1].get("StatusMessage", "")
    text = status_text(description)
    return f"{text} ({message})" if message and not text.startswith("failed") else text
