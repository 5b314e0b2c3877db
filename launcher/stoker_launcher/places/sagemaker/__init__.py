"""Laptop: `--on sagemaker`: one CreateTrainingJob request, fully checked before anything is uploaded."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.errors import Problems, UsageError
from stoker.events.prices import PriceList, price_list
from stoker.figures import dollars, duration, table
from stoker.place import TOKEN_FILE
from stoker_launcher.job import Job, Staged
from stoker_launcher.places import Place
from stoker_launcher.places.remote import (
    CloudRun,
    HostGroup,
    LogEntry,
    Tell,
    UnansweredError,
    created_once,
    show,
    stamp,
    usd_per_hour,
    without_price,
)
from stoker_launcher.places.sagemaker import aws, sagemaker_rules
from stoker_launcher.places.sagemaker.training_job import (
    SageMakerRequest,
    group,
    request_of,
    requests_of,
)

OFFLINE_ACCOUNT = "000000000000"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
POLL_S = 5.0
_WORDS = {"InProgress": "running", "Completed": "succeeded", "Stopping": "running: stopping"}
_ORIGIN = re.compile(r"^\[(?P<group>.+) (?P<host>\S+) (?:head|worker|start)\] ?(?P<text>.*)$", re.S)


def plan(job: Job, *, offline: bool = False, written: bool = False) -> SageMakerRequest:
    """`written`: to a file, instead of being submitted."""
    settings = job.resolved.config.sagemaker
    problems = Problems()
    region = aws.region_of(settings.region) or ""
    known = region in aws.regions()
    if not region:
        problems.add(
            "sagemaker.region: not set, and the AWS profile has none; for example us-east-1"
        )
    elif not known:
        problems.add(f"sagemaker.region: AWS has no such region (got {region!r})")
    s3_uri = settings.s3_uri
    if s3_uri is None:
        account = OFFLINE_ACCOUNT
        if offline:
            problems.add("sagemaker.s3_uri: needed with --offline; set it to s3://bucket/prefix")
        elif known:
            with problems:
                account = aws.account_id(region)
        s3_uri = f"s3://sagemaker-{region or 'us-east-1'}-{account}/stoker"
    wanted, *others = requests_of(job, stamp(), region, s3_uri)
    for one in (wanted, *others):
        problems.add(*sagemaker_rules.problems(one))
    if others and (written or settings.queue is not None):
        with_what = "--request" if written else "sagemaker.queue, which waits for capacity itself"
        problems.add(f"sagemaker.gpu.type: name one type with {with_what}")
    staged = Staged(wanted.job, wanted.data_at)
    problems.add(*staged.problems())
    if not offline and not problems.about("AWS") and known:
        with problems:
            problems.add(*aws.existence_problems(wanted))
    problems.refuse()
    return replace(wanted, staged=staged, alternatives=tuple(others))


def write_source(job: Job, folder: Path) -> str:
    """Write a `source_dir` for SageMaker's SDKs, with its token; returns the channels that it reads."""
    if folder.exists():
        raise UsageError(f"--source: {folder} exists; remove it or choose another name")
    # Hosts, role and bucket are the estimator's: only the parameters are checked.
    request = request_of(job, job.name, "", "s3://bucket")
    problems = [one for one in sagemaker_rules.problems(request) if one.startswith("params.")]
    staged = Staged(job, request.data_at)
    problems += staged.problems()
    if problems:
        raise UsageError(*problems)
    shutil.copytree(staged.with_token(), folder)
    sources = {item.parameter: str(item.source) for item in request.data}
    sources |= {name: channel.uri for name, channel in request.settings.channels.items()}
    lines = [f"channel {name}: {sources.get(name, 'S3')}" for name in request.data_at]
    token = f"{folder / TOKEN_FILE} opens the job's Ray cluster: write a new folder for each job"
    return "\n".join([f"wrote {folder}", *lines, token])


def submit(request: SageMakerRequest, tell: Tell | None = None) -> SageMakerRun:
    run = run_of(request)
    run.left = [*request.alternatives]
    create(request, run, tell)
    return run


def run_of(request: SageMakerRequest) -> SageMakerRun:
    settings, region = request.settings, request.region
    known = price_list(settings.prices, region=region)
    if settings.queue is not None:
        queue = settings.queue.rpartition("/")[2]  # of an ARN
        return QueuedRun(region, queue, request.name, submitted=True, prices=known)
    return SageMakerRun(region, request.name, submitted=True, prices=known)


def create(request: SageMakerRequest, run: SageMakerRun, tell: Tell | None) -> None:
    region, queued = request.region, isinstance(run, QueuedRun)
    with aws.readable_errors("upload"):
        request.upload(aws.S3Store(request), tell)

    def ask_for_it() -> Any:
        if not queued:
            with aws.readable_errors("SageMaker"):
                return aws.client("sagemaker", region).create_training_job(**request.body)
        with aws.readable_errors("Batch"):
            return aws.client("batch", region).submit_service_job(**request.submission)

    doubt = f"the job may have been created all the same: stoker status {run.id}"
    try:
        created_once(ask_for_it, run.ask, doubt)
    except UnansweredError:
        raise
    except UsageError:
        # Batch refuses a call that boto3 has repeated as it refuses any other.
        with contextlib.suppress(UsageError):
            if queued and run.ask():
                return
        raise


def attach(run_id: str) -> SageMakerRun:
    """Find a run by `sagemaker:region/name`, training job name or ARN; UsageError without a region.

    `sagemaker:region/queue/name` is a job in a queue of AWS Batch.
    """
    text = run_id.removeprefix("sagemaker:")
    if text.startswith("arn:"):
        region, name = text.split(":")[3], text.rpartition("/")[2]
    elif "/" in text:
        region, _, name = text.partition("/")
    else:
        name, region = text, aws.region_of(None) or ""
    if not region:
        raise UsageError(f"{run_id}: the region is unknown; write sagemaker:<region>/{name}")
    queue, _, name = name.rpartition("/")
    return QueuedRun(region, queue, name) if queue else SageMakerRun(region, name)


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
        self.left: list[SageMakerRequest] = []
        """The same job with other types, of which the next is created once this one has ended without hosts."""
        self._groups: dict[str, str] = {}

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = super().describe()
        while self.left and had_no_capacity(found):
            before, request = self.name, self.left.pop(0)
            # First, so that it is known if creating the job is interrupted.
            self.name = self.label = request.name
            self.id = f"sagemaker:{self.region}/{self.name}"
            show(f"[{before}] ended without capacity; next: {self.id}")
            create(request, self, show)
            found = super().describe()
        return found

    def ask(self) -> dict[str, Any]:
        with aws.readable_errors(f"job {self.name}"):
            found: dict[str, Any] = aws.client("sagemaker", self.region).describe_training_job(
                TrainingJobName=self.name
            )
        return found

    def stop(self) -> None:
        """Send SIGTERM to every host; SIGKILL follows after 120 s, which leaves time for a checkpoint."""
        self.left = []
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

    def detached(self) -> str:
        types = ", ".join(str(one.settings.gpu.type) for one in self.left)
        more = f"; without capacity it ends, and nothing tries {types}" if types else ""
        return super().detached() + more

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
        return self.entries_of(self.name, since_s)

    def entries_of(self, name: str, since_s: float) -> list[LogEntry]:
        client, prefix = aws.client("logs", self.region), f"{name}/"
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


class QueuedRun(SageMakerRun):
    """A job in a queue of AWS Batch, which creates a training job of another name for each attempt."""

    def __init__(self, region: str, queue: str, name: str, **options: Any) -> None:
        super().__init__(region, name, **options)
        self.id, self.queue = f"sagemaker:{region}/{queue}/{name}", queue
        self._attempts: tuple[str, ...] = ()
        self._job_id = ""

    def ask(self) -> dict[str, Any]:
        batch = aws.client("batch", self.region)
        with aws.readable_errors(f"job {self.label}"):
            queued = batch.describe_service_job(jobId=self._find(batch))
        attempts = [*queued.get("attempts", []), queued.get("latestAttempt", {})]
        names = [
            attempt["serviceResourceId"]["value"].rpartition("/")[2]
            for attempt in attempts
            if "serviceResourceId" in attempt
        ]
        self._attempts = tuple(dict.fromkeys(names))
        if not self._attempts:
            return {"Queued": queued}
        self.name = self._attempts[-1]
        return super().ask() | {"Queued": queued}

    def _find(self, batch: Any) -> str:
        if not self._job_id:
            named = [{"name": "JOB_NAME", "values": [self.label]}]
            listed = batch.list_service_jobs(jobQueue=self.queue, filters=named)["jobSummaryList"]
            ids = [one["jobId"] for one in listed if one["jobName"] == self.label]
            if not ids:
                raise UsageError(f"{self.id}: no such job in queue {self.queue}")
            self._job_id = ids[0]
        return self._job_id

    def stop(self) -> None:
        """Take the job from the queue; a training job gets SIGTERM as from `StopTrainingJob`."""
        batch = aws.client("batch", self.region)
        with aws.readable_errors(f"job {self.label}"):
            batch.terminate_service_job(jobId=self._find(batch), reason="stoker stop")

    def status_in(self, description: dict[str, Any]) -> str:
        queued = description["Queued"]
        state = queued["status"]
        training = super().status_in(description) if self._attempts else ""
        if state == "SUCCEEDED":
            return "succeeded"
        if state != "FAILED":
            return training if state == "RUNNING" and training else f"running: {state} in queue"
        # The hosts of a job that was terminated are billed until they have stopped.
        if training.startswith(("running", "failed", "interrupted")):
            return training
        if queued.get("isTerminated"):
            return "interrupted"
        return f"failed: {' '.join(queued.get('statusReason', 'no reason given').split())}"

    def closing(self) -> str:
        text = super().closing()
        earlier = ", ".join(self._attempts[:-1])
        return f"{text}\nearlier attempts, billed besides: {earlier}" if earlier else text

    def entries(self, since_s: float) -> list[LogEntry]:
        return [entry for name in self._attempts for entry in self.entries_of(name, since_s)]


def had_no_capacity(found: dict[str, Any]) -> bool:
    """Whether a job has ended because no hosts came: it has had none, and none is billed."""
    ended = found["TrainingJobStatus"] in ("Failed", "Stopped")
    if not ended or "TrainingStartTime" in found or found.get("BillableTimeInSeconds"):
        return False
    limit_s = found["StoppingCondition"].get("MaxPendingTimeInSeconds", math.inf)
    waited_s = (found["LastModifiedTime"] - found["CreationTime"]).total_seconds()
    # Before the limit somebody has stopped it, unless SageMaker itself has given up.
    given_up = found.get("FailureReason", "").startswith("CapacityError")
    return bool(given_up or waited_s >= limit_s)


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
    plan=lambda job, options, resume: plan(
        job, offline=options.offline, written=options.request is not None
    ),
    submit=submit,
    attach=attach,
    ids=("sagemaker:", "arn:"),
    options=("dashboard", "offline", "request", "source"),
    checkpoints="s3",
)
