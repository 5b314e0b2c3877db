"""Laptop: an existing training job: status, logs, end and cost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.places.remote import CloudRun, Group, LogEntry, dollars, usd_per_hour
from launcher.places.sagemaker import aws
from launcher.places.sagemaker.training_job import group
from launcher.source import table
from stoker.errors import UsageError
from stoker.events.prices import PriceList, price_list
from stoker.figures import duration

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
POLL_S = 5.0
_WORDS = {"InProgress": "running", "Completed": "succeeded", "Stopping": "running: stopping"}
_ORIGIN = re.compile(r"^\[(?P<group>.+) (?P<host>\S+) (?:head|worker|start)\] ?(?P<text>.*)$", re.S)


class SageMakerRun(CloudRun):
    """One training job, by region and name."""

    def __init__(self, region: str, name: str, poll_s: float = POLL_S, submitted: bool = False) -> None:
        super().__init__(f"sagemaker:{region}/{name}", poll_s, submitted, aws.PassingError)
        self.region, self.name = region, name
        self._groups: dict[str, str] = {}

    @property
    def label(self) -> str:
        return self.name

    def ask(self) -> dict[str, Any]:
        with aws.readable_errors(f"job {self.name}"):
            found: dict[str, Any] = aws.client("sagemaker", self.region).describe_training_job(
                TrainingJobName=self.name
            )
        return found

    def stop(self) -> None:
        """Send SIGTERM to every host; SIGKILL follows after 120 s, which leaves time for a checkpoint."""
        with aws.readable_errors(f"job {self.name}"):
            aws.client("sagemaker", self.region).stop_training_job(TrainingJobName=self.name)

    def status_in(self, description: dict[str, Any]) -> str:
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

    def progress(self, description: dict[str, Any]) -> str:
        transitions = description.get("SecondaryStatusTransitions") or [{}]
        message = transitions[-1].get("StatusMessage", "")
        text = self.status_in(description)
        return f"{text} ({message})" if message and not text.startswith("failed") else text

    def closing(self) -> str:
        """Message after the end: outcome, billable time, cost per group, location of the model."""
        description = self.describe()
        lines = [f"{self.name}: {self.status_in(description)}"]
        billable_s = description.get("BillableTimeInSeconds")
        if billable_s is None and {"TrainingStartTime", "TrainingEndTime"} <= set(description):
            # SageMaker reports the billable time some seconds after the end.
            ran = description["TrainingEndTime"] - description["TrainingStartTime"]
            billable_s = round(ran.total_seconds())
        if billable_s is not None:
            lines.append(billed_table(described_groups(description), billable_s, price_list()))
        if artefact := description.get("ModelArtifacts", {}).get("S3ModelArtifacts"):
            lines.append(f"model: {artefact}")
        return "\n".join(lines)

    def entries(self, since_s: float) -> list[LogEntry]:
        client, prefix = aws.client("logs", self.region), f"{self.name}/"
        query = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": prefix, "startTime": int(since_s * 1000)}
        try:
            pages = client.get_paginator("filter_log_events").paginate(**query)
            events = [event for page in pages for event in page["events"]]
        except client.exceptions.ResourceNotFoundException:
            return []  # no host has written yet
        except Exception:
            with aws.readable_errors("logs"):
                raise
        return [
            LogEntry(
                event["eventId"], event["timestamp"] / 1000, stream.removeprefix(prefix), event["message"]
            )
            for event in events
            if (stream := event["logStreamName"]).startswith(prefix)
        ]

    def lines(self, entry: LogEntry, description: dict[str, Any]) -> Iterator[str]:
        """Lines as `[group/host] text`."""
        match = re.search(r"algo-\d+", entry.host)
        host = match.group() if match else entry.host
        groups = description.get("ResourceConfig", {}).get("InstanceGroups")
        for line in entry.text.splitlines() or [""]:
            # Stream names do not contain the group, but the lines do once Stoker runs on the host.
            if origin := _ORIGIN.match(line):
                host, line = origin["host"], origin["text"]
                self._groups[host] = origin["group"]
            named = self._groups.get(host) if groups else "all"
            yield f"[{named}/{host}] {line}" if named else f"[{host}] {line}"


def described_groups(description: dict[str, Any]) -> tuple[Group, ...]:
    resources = description.get("ResourceConfig", {})
    if listed := resources.get("InstanceGroups"):
        return tuple(
            group(one["InstanceGroupName"], one["InstanceType"], one["InstanceCount"]) for one in listed
        )
    if "InstanceType" not in resources:
        raise UsageError(f"{description.get('TrainingJobName')}: SageMaker lists no hosts for this job")
    return (group("all", resources["InstanceType"], resources.get("InstanceCount", 1)),)


def billed_table(groups: Sequence[Group], billable_s: int, prices: PriceList) -> str:
    """The cost of each group, from the billable seconds reported by SageMaker."""
    hours = billable_s / 3600
    rows = []
    for one in groups:
        price = one.usd_per_hour(prices)
        cost = dollars(price * hours if price is not None else None)
        rows.append((one.name, str(one.count), one.type, dollars(price, 3), cost))
    total = usd_per_hour(groups, prices)
    rows.append(("total", "", "", dollars(total, 3), dollars(total * hours if total is not None else None)))
    head = ("group", "hosts", "type", "$/h", "$")
    return f"{table(head, rows)}\nbillable {duration(billable_s)}; {prices.label}"
