"""Laptop: `--on sagemaker`: one CreateTrainingJob request, fully checked before anything is uploaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from stoker.errors import UsageError
from stoker.events.prices import PriceList, price_list
from stoker.figures import dollars, duration, table
from stoker_launcher.job import Job, measure
from stoker_launcher.places import Place
from stoker_launcher.places.remote import (
    CloudRun,
    HostGroup,
    LogEntry,
    Tell,
    collected,
    created_once,
    job_name,
    stamp,
    usd_per_hour,
    without_price,
)
from stoker_launcher.places.sagemaker import aws, sagemaker_rules
from stoker_launcher.places.sagemaker.training_job import SageMakerRequest, group, request_of

OFFLINE_ACCOUNT = "000000000000"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
POLL_S = 5.0
_WORDS = {"InProgress": "running", "Completed": "succeeded", "Stopping": "running: stopping"}
_ORIGIN = re.compile(r"^\[(?P<group>.+) (?P<host>\S+) (?:head|worker|start)\] ?(?P<text>.*)$", re.S)


def plan(job: Job, *, offline: bool = False) -> SageMakerRequest:
    settings = job.resolved.config.sagemaker
    problems: list[str] = []
    region = aws.region_of(settings.region) or ""
    known = region in aws.regions()
    if not region:
        problems.append(
            "sagemaker.region: not set, and the AWS profile has none; for example us-east-1"
        )
    elif not known:
        problems.append(f"sagemaker.region: AWS has no such region (got {region!r})")
    s3_uri = settings.s3_uri
    if s3_uri is None:
        account = OFFLINE_ACCOUNT
        if offline:
            problems.append("sagemaker.s3_uri: needed with --offline; set it to s3://bucket/prefix")
        elif known:
            account = collected(problems, lambda: aws.account_id(region), OFFLINE_ACCOUNT)
        s3_uri = f"s3://sagemaker-{region or 'us-east-1'}-{account}/stoker"
    if not (offline or known):
        collected(problems, aws.refuse_without_credentials, None)
    wanted = request_of(job, job_name(job.name, stamp()), region, s3_uri)
    problems += sagemaker_rules.problems(wanted)
    count, size = measure(job, wanted.data_at, "params or sagemaker.channels", problems)
    if not offline and not any(problem.startswith("AWS") for problem in problems) and known:
        problems += collected(problems, lambda: list(aws.existence_problems(wanted)), [])
    if problems:
        raise UsageError(*dict.fromkeys(problems))
    # The hosts' token comes with the source when it is staged to be sent.
    notes = tuple(sagemaker_rules.warnings(wanted))
    return replace(wanted, code_files=count + 1, code_bytes=size, warnings=notes)


def submit(request: SageMakerRequest, tell: Tell | None = None) -> SageMakerRun:
    region = request.region
    with aws.readable_errors("upload"):
        request.upload(aws.S3Store(request), tell)
    known = price_list(request.settings.prices, region=region)
    run = SageMakerRun(region, request.name, submitted=True, prices=known)

    def create() -> Any:
        with aws.readable_errors("SageMaker"):
            return aws.client("sagemaker", region).create_training_job(**request.body)

    doubt = f"the job may have been created all the same: stoker status {run.id}"
    created_once(create, run.ask, doubt)
    return run


def attach(run_id: str) -> SageMakerRun:
    """Find a run by `sagemaker:region/name`, training job name or ARN; UsageError without a region."""
    text = run_id.removeprefix("sagemaker:")
    if text.startswith("arn:"):
        region, name = text.split(":")[3], text.rpartition("/")[2]
    elif "/" in text:
        region, _, name = text.partition("/")
    else:
        name, region = text, aws.region_of(None) or ""
    if not region:
        raise UsageError(f"{run_id}: the region is unknown; write sagemaker:<region>/{name}")
    return SageMakerRun(region, name)


class SageMakerRun(CloudRun):
    def __init__(
        self,
        region: str,
        name: str,
        poll_s: float = POLL_S,
        submitted: bool = False,
        prices: PriceList | None = None,
    ) -> None:
        super().__init__(f"sagemaker:{region}/{name}", name, poll_s, submitted, aws.PassingError)
        self.region, self.name, self._prices = region, name, prices or price_list(region=region)
        self._groups: dict[str, str] = {}

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
        description = self.describe()
        lines = [f"{self.name}: {self.status_in(description)}"]
        billable_s = description.get("BillableTimeInSeconds")
        if billable_s is None and {"TrainingStartTime", "TrainingEndTime"} <= set(description):
            # SageMaker reports the billable time some seconds after the end.
            ran = description["TrainingEndTime"] - description["TrainingStartTime"]
            billable_s = round(ran.total_seconds())
        if billable_s is not None:
            lines.append(billed_table(described_groups(description), billable_s, self._prices))
        if artefact := description.get("ModelArtifacts", {}).get("S3ModelArtifacts"):
            lines.append(f"model: {artefact}")
        return "\n".join(lines)

    def entries(self, since_s: float) -> list[LogEntry]:
        client, prefix = aws.client("logs", self.region), f"{self.name}/"
        query = {
            "logGroupName": LOG_GROUP,
            "logStreamNamePrefix": prefix,
            "startTime": int(since_s * 1000),
        }
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
                event["eventId"],
                event["timestamp"] / 1000,
                stream.removeprefix(prefix),
                event["message"],
            )
            for event in events
            if (stream := event["logStreamName"]).startswith(prefix)
        ]

    def lines(self, entry: LogEntry, description: dict[str, Any]) -> Iterator[str]:
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


def described_groups(description: dict[str, Any]) -> tuple[HostGroup, ...]:
    resources = description.get("ResourceConfig", {})
    if listed := resources.get("InstanceGroups"):
        return tuple(
            group(one["InstanceGroupName"], one["InstanceType"], one["InstanceCount"])
            for one in listed
        )
    if "InstanceType" not in resources:
        raise UsageError(
            f"{description.get('TrainingJobName')}: SageMaker lists no hosts for this job"
        )
    return (group("all", resources["InstanceType"], resources.get("InstanceCount", 1)),)


def billed_table(groups: Sequence[HostGroup], billable_s: int, prices: PriceList) -> str:
    hours = billable_s / 3600
    rows = []
    for one in groups:
        price = one.usd_per_hour(prices)
        cost = dollars(price * hours if price is not None else None)
        rows.append((one.name, str(one.count), one.type, dollars(price, 3), cost))
    total = usd_per_hour(groups, prices)
    rows.append(
        ("total", "", "", dollars(total, 3), dollars(total * hours if total is not None else None))
    )
    head = ("group", "hosts", "type", "$/h", "$")
    left_out = without_price(groups, prices)
    return f"{table(head, rows)}\nbillable {duration(billable_s)}{left_out}; {prices.label}"


PLACE = Place(
    name="sagemaker",
    plan=lambda job, options, resume: plan(job, offline=options.offline),
    submit=submit,
    attach=attach,
    ids=("sagemaker:", "arn:"),
    options=("offline", "request"),
    checkpoints="s3",
)
