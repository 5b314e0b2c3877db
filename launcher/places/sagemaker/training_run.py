"""Laptop: an existing training job: status, logs, end and cost."""

from __future__ import annotations

import functools
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.files import table
from launcher.places.sagemaker import aws, training_run
from launcher.places.sagemaker.training_job import Group, usd_per_hour
from launcher.runs import Patience
from stoker.errors import UsageError
from stoker.events import prices
from stoker.events.prices import PriceList, price_list
from stoker.figures import duration

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
POLL_S = 5.0
LATE_S = 60.0
"""How far back to re-read logs: CloudWatch delays the lines of each host differently."""
DRAIN_S = 15.0
"""How long to wait for the last lines after the job has ended."""

_WORDS = {"InProgress": "running", "Completed": "succeeded", "Stopping": "running: stopping"}
_EXIT_CODES = {"succeeded": 0, "failed": 1, "interrupted": 143}
_ORIGIN = re.compile(r"^\[(?P<group>.+) (?P<host>\S+) (?:head|worker|start)\] ?(?P<text>.*)$", re.S)


@dataclass
class SageMakerRun:
    """Laptop: one training job, by region and name."""

    region: str
    name: str
    poll_s: float = POLL_S
    submitted: bool = False
    """Whether this process has submitted it, so that there is a run, whatever the service answers."""
    _groups: dict[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._patiently = Patience(self.poll_s, aws.PassingError, self.submitted)

    @property
    def id(self) -> str:
        return f"sagemaker:{self.region}/{self.name}"

    def describe(self) -> dict[str, Any]:
        """The answer of DescribeTrainingJob.

        Raises:
            UsageError: the job does not exist, or access is denied.
        """
        return self._patiently(self._described)

    def _described(self) -> dict[str, Any]:
        with aws.readable_errors(f"job {self.name}"):
            found: dict[str, Any] = aws.client("sagemaker", self.region).describe_training_job(
                TrainingJobName=self.name
            )
        return found

    def status(self) -> str:
        """running, succeeded, failed or interrupted, with SageMaker's reason after a colon."""
        return status_text(self.describe())

    def wait(self) -> int:
        """Block until the end; returns the exit code that corresponds to the status."""
        while (state := self.status()).startswith("running"):
            time.sleep(self.poll_s)
        return _EXIT_CODES.get(state.partition(":")[0], 1)

    def stop(self) -> None:
        """Send SIGTERM to every host; SIGKILL follows after 120 s, which leaves time for a checkpoint."""
        with aws.readable_errors(f"job {self.name}"):
            aws.client("sagemaker", self.region).stop_training_job(TrainingJobName=self.name)

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The lines of all hosts, ordered by time, each as `[group/host] text`."""
        seen: dict[str, int] = {}
        start_ms = 0
        ended_at: float | None = None
        last_state = ""
        while True:
            description = self.describe()
            if follow and (state := _progress(description)) != last_state:
                last_state = state
                yield f"[{self.name}] {state}"
            events = self._patiently(functools.partial(self._events, start_ms))
            fresh = [event for event in events if event["eventId"] not in seen]
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
                # The last lines arrive late: end at the first poll without new lines after a delay.
                if not fresh and time.monotonic() - ended_at >= min(DRAIN_S, 3 * self.poll_s):
                    return
            time.sleep(self.poll_s)

    def closing(self) -> str:
        """Message after the end: outcome, billable time, cost per group, location of the model."""
        description = self.describe()
        lines = [f"{self.name}: {status_text(description)}"]
        billable_s = description.get("BillableTimeInSeconds")
        if billable_s is None and {"TrainingStartTime", "TrainingEndTime"} <= set(description):
            # SageMaker reports the billable time some seconds after the end.
            ran = description["TrainingEndTime"] - description["TrainingStartTime"]
            billable_s = round(ran.total_seconds())
        if billable_s is not None:
            groups = described_groups(description)
            lines.append(training_run.billed_table(groups, billable_s, price_list(self.region)))
        if artefact := description.get("ModelArtifacts", {}).get("S3ModelArtifacts"):
            lines.append(f"model: {artefact}")
        return "\n".join(lines)

    def detached(self) -> str:
        """Message when the user stops watching: the job continues."""
        return (
            f"{self.name} keeps running. Watch it again: stoker logs -f {shlex.quote(self.id)};"
            f" stop it: stoker stop {shlex.quote(self.id)}"
        )

    def _events(self, start_ms: int) -> list[dict[str, Any]]:
        client = aws.client("logs", self.region)
        query: dict[str, Any] = {
            "logGroupName": LOG_GROUP,
            "logStreamNamePrefix": f"{self.name}/",
            "startTime": start_ms,
        }
        try:
            pages = client.get_paginator("filter_log_events").paginate(**query)
            events = [event for page in pages for event in page["events"]]
            return [event for event in events if event["logStreamName"].startswith(f"{self.name}/")]
        except client.exceptions.ResourceNotFoundException:
            return []  # no host has written yet
        except Exception:
            with aws.readable_errors("logs"):
                raise

    def _lines(self, event: dict[str, Any], description: dict[str, Any]) -> Iterator[str]:
        stream = event["logStreamName"].partition("/")[2]
        match = re.search(r"algo-\d+", stream)
        host = match.group() if match else stream
        groups = description.get("ResourceConfig", {}).get("InstanceGroups")
        for line in event["message"].splitlines() or [""]:
            # Stream names do not contain the group, but the lines do once Stoker runs on the host.
            if origin := _ORIGIN.match(line):
                host, line = origin["host"], origin["text"]
                self._groups[host] = origin["group"]
            group = self._groups.get(host) if groups else "all"
            yield f"[{group}/{host}] {line}" if group else f"[{host}] {line}"


def status_text(description: dict[str, Any]) -> str:
    """Laptop: the status in DescribeTrainingJob's answer, in the terms common to all backends."""
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
        raise UsageError(f"{description.get('TrainingJobName')}: SageMaker lists no hosts for this job")
    return (Group("all", resources["InstanceType"], resources.get("InstanceCount", 1), ""),)


def _progress(description: dict[str, Any]) -> str:
    transitions = description.get("SecondaryStatusTransitions") or [{}]
    message = transitions[-1].get("StatusMessage", "")
    text = status_text(description)
    return f"{text} ({message})" if message and not text.startswith("failed") else text


def cost_table(groups: tuple[Group, ...], max_runtime_s: int, spot: bool, known_prices: PriceList) -> str:
    """Laptop: a table of groups with $/h, and the maximum cost of the job."""
    rows = []
    for group in groups:
        known = prices.machine(group.type)
        rows.append(
            (
                group.name,
                str(group.count),
                group.type,
                str(known.vcpus * group.count) if known else "?",
                f"{known.gpus * group.count}×{known.gpu_name}" if known and known.gpus else "-",
                f"{known.baseline_gbps:g}" if known else "?",
                dollars(group.usd_per_hour(known_prices), 3),
            )
        )
    total = usd_per_hour(groups, known_prices)
    rows.append(("total", str(sum(group.count for group in groups)), "", "", "", "", dollars(total, 3)))
    head = ("group", "hosts", "type", "vCPUs", "GPUs", "Gb/s each", "$/h")
    hours = max_runtime_s / 3600
    most = dollars(total * hours if total is not None else None)
    note = "; spot usually costs less" if spot else ""
    limit = f"at most ${most} in {hours:g} h (sagemaker.max_runtime_s)"
    return f"{table(head, rows)}\n{limit}; {known_prices.label}{note}"


def billed_table(groups: Sequence[Group], billable_s: int, known_prices: PriceList) -> str:
    """Laptop: the cost of each group, from the billable seconds reported by SageMaker."""
    hours = billable_s / 3600
    rows = []
    for group in groups:
        price = group.usd_per_hour(known_prices)
        cost = dollars(price * hours if price is not None else None)
        rows.append((group.name, str(group.count), group.type, dollars(price, 3), cost))
    total = usd_per_hour(groups, known_prices)
    rows.append(("total", "", "", dollars(total, 3), dollars(total * hours if total is not None else None)))
    head = ("group", "hosts", "type", "$/h", "$")
    return f"{table(head, rows)}\nbillable {duration(billable_s)}; {known_prices.label}"


def dollars(amount: float | None, digits: int = 2) -> str:
    """Laptop: an amount without the $ sign; ? if unknown."""
    return "?" if amount is None else f"{amount:,.{digits}f}"
