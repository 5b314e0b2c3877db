"""SageMaker jobs that wait: in a queue of AWS Batch, or for the first instance type that has capacity.

Batch and the states of jobs, which moto does not have, are played where AWS would answer; S3 is moto's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from clouds import SAGEMAKER, job_of

from stoker.errors import UsageError
from stoker_launcher.places import remote, sagemaker
from stoker_launcher.places.sagemaker import aws
from stoker_launcher.places.sagemaker.training_job import SageMakerRequest
from tests.fakes.aws import REGION, moto, served
from tests.fakes.aws import training_job as training
from tests.refusals import refused

BUCKET = "stoker-test"
TYPES = ["ml.g5.2xlarge", "ml.g6.2xlarge", "ml.g4dn.2xlarge"]
ARN = f"arn:aws:sagemaker:{REGION}:123456789012:training-job/AWSBatchflowers-1"


def plan(offline: bool = True, **changes: str) -> SageMakerRequest:
    keys = {"sagemaker.s3_uri": f"s3://{BUCKET}/stoker"}
    keys |= {f"sagemaker.{key}": value for key, value in changes.items()}
    return sagemaker.plan(job_of(SAGEMAKER | keys), offline=offline)


class Aws:
    """SageMaker and Batch as far as a waiting job sees them, before moto. Lost: their first answers."""

    def __init__(self) -> None:
        self.moto = moto()
        self.jobs: dict[str, dict[str, Any]] = {}
        self.played: dict[str, list[dict[str, Any]]] = {}
        """By instance type, what each description of its job says; the last one stays."""
        self.submitted: list[dict[str, Any]] = []
        self.lost = 0
        self.together = 0
        """How many jobs were not known to have ended when another was created."""

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        name = environ.get("HTTP_X_AMZ_TARGET", "").partition(".")[2] or environ["PATH_INFO"][4:]
        answer = getattr(self, name, None)
        if answer is None:
            return self.moto(environ, start)
        asked = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        status, found = answer(asked)
        if self.lost and name in ("CreateTrainingJob", "submitservicejob"):
            self.lost, status, found = self.lost - 1, "500 Lost", {}
        start(status, [("Content-Type", "application/x-amz-json-1.1")])
        return [json.dumps(found).encode()]

    def CreateTrainingJob(self, asked: dict[str, Any]) -> tuple[str, Any]:  # noqa: N802 - AWS's name
        name, arn = asked["TrainingJobName"], f"arn:aws:sagemaker:{REGION}:1:training-job/j"
        if name in self.jobs:
            return "400 Refused", {"__type": "ResourceInUse", "message": name}
        seen = [job["TrainingJobStatus"] for job in self.jobs.values()]
        self.together += sum(state in ("InProgress", "Stopping") for state in seen)
        self.jobs[name] = {**asked, "TrainingJobStatus": "InProgress", "CreationTime": 0}
        return "200 OK", {"TrainingJobArn": arn}

    def DescribeTrainingJob(self, asked: dict[str, Any]) -> tuple[str, Any]:  # noqa: N802
        job = self.jobs.get(asked["TrainingJobName"])
        if job is None:
            return "400 Refused", {"__type": "ValidationException", "message": "no such job"}
        groups = job["ResourceConfig"]["InstanceGroups"]
        played = self.played[groups[0]["InstanceType"]]
        job |= played.pop(0) if len(played) > 1 else played[0]
        return "200 OK", job

    def submitservicejob(self, asked: dict[str, Any]) -> tuple[str, Any]:
        if any(one["clientToken"] == asked["clientToken"] for one in self.submitted):
            return "400 Refused", {"__type": "ClientException", "message": "the token was used"}
        if asked["jobQueue"] == "absent":
            return "404 Absent", {"__type": "ClientException", "message": "no such queue"}
        self.submitted.append(asked)
        return "200 OK", {"jobName": asked["jobName"], "jobId": "id-1"}

    def listservicejobs(self, asked: dict[str, Any]) -> tuple[str, Any]:
        (wanted,) = asked["filters"][0]["values"]
        names = [one["jobName"] for one in self.submitted if one["jobName"] == wanted]
        found = [{"jobId": "id-1", "jobName": name, "serviceJobType": "S"} for name in names]
        return "200 OK", {"jobSummaryList": found}

    def describeservicejob(self, asked: dict[str, Any]) -> tuple[str, Any]:
        return "200 OK", {"jobId": asked["jobId"], "status": "RUNNABLE"}


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    application = Aws()
    monkeypatch.setattr(sagemaker, "POLL_S", 0.01)
    monkeypatch.setattr(sagemaker.SageMakerRun.__init__, "__defaults__", (0.01, False, None))
    monkeypatch.setattr(remote, "DRAIN_S", 0.01)
    with served(application) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        aws.client.cache_clear()
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield application
    aws.client.cache_clear()


PENDING = {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Pending", "LastModifiedTime": 9}
EXPIRED = {"TrainingJobStatus": "Stopped", "SecondaryStatus": "Stopped", "LastModifiedTime": 1801}
NO_CAPACITY = {
    "TrainingJobStatus": "Failed",
    "LastModifiedTime": 60,
    "FailureReason": "CapacityError: Unable to provision requested ML compute capacity.",
}
BROKEN = {
    "TrainingJobStatus": "Failed",
    "LastModifiedTime": 60,
    "FailureReason": "ClientError: image",
}
STOPPED = {"TrainingJobStatus": "Stopped", "SecondaryStatus": "Stopped", "LastModifiedTime": 60}
RAN = {"TrainingStartTime": 100, "TrainingEndTime": 3700, "LastModifiedTime": 3700}
DONE = RAN | {"TrainingJobStatus": "Completed", "SecondaryStatus": "Completed"}
FAILED = RAN | {"TrainingJobStatus": "Failed", "FailureReason": "AlgorithmError: exit code 1"}
INTERRUPTED = RAN | {"TrainingJobStatus": "Stopped", "SecondaryStatus": "MaxRuntimeExceeded"}


@pytest.mark.parametrize(
    ("first", "second", "created", "code"),
    [
        ([PENDING, PENDING, DONE], [], 1, 0),
        ([PENDING, EXPIRED], [PENDING, DONE], 2, 0),
        ([NO_CAPACITY], [NO_CAPACITY], 3, 0),
        ([NO_CAPACITY], [FAILED], 2, 1),
        ([BROKEN], [], 1, 1),
        ([PENDING, STOPPED], [], 1, 143),
        ([FAILED], [], 1, 1),
        ([INTERRUPTED], [], 1, 143),
    ],
)  # fmt: skip
def test_the_next_type_is_tried_only_after_a_job_has_ended_without_hosts(
    cloud: Aws, first: list[Any], second: list[Any], created: int, code: int
) -> None:
    cloud.played = dict(zip(TYPES, ([*first], [*second], [DONE]), strict=True))
    run = sagemaker.submit(plan(**{"gpu.type": json.dumps(TYPES)}), str)
    lines: list[str] = []
    assert remote.follow(run, lines.append) == code
    groups = [job["ResourceConfig"]["InstanceGroups"] for job in cloud.jobs.values()]
    assert [one[0]["InstanceType"] for one in groups] == TYPES[:created]
    assert cloud.together == 0
    assert run.id == f"sagemaker:{REGION}/{[*cloud.jobs][-1]}"


def test_a_lost_answer_costs_no_second_job_of_the_next_type(cloud: Aws) -> None:
    cloud.played = {TYPES[0]: [PENDING, EXPIRED], TYPES[1]: [PENDING, DONE]}
    run = sagemaker.submit(plan(**{"gpu.type": json.dumps(TYPES[:2])}), str)
    cloud.lost = 2
    assert run.wait() == 0 and len(cloud.jobs) == 2 and cloud.together == 0


def test_watching_again_or_leaving_creates_no_other_job(cloud: Aws) -> None:
    cloud.played = {TYPES[0]: [PENDING, EXPIRED], TYPES[1]: [DONE]}
    run = sagemaker.submit(plan(**{"gpu.type": json.dumps(TYPES[:2])}), str)
    assert TYPES[1] in run.detached()
    assert sagemaker.attach(run.id).wait() == 143
    assert len(cloud.jobs) == 1


def test_each_type_has_its_request_its_limit_and_its_price() -> None:
    request = plan(**{"gpu.type": json.dumps(TYPES)})
    every = [request, *request.alternatives]
    limits = [one.body["StoppingCondition"].get("MaxPendingTimeInSeconds") for one in every]
    assert limits == [1800, 1800, None] and len({one.name for one in every}) == 3
    shown = request.render()
    assert [shown.count(f"1  {type_} ") for type_ in TYPES] == [1, 1, 1]
    assert shown.count("at most $") == 3 and "$?" not in shown
    own = "{StoppingCondition: {MaxPendingTimeInSeconds: 7200}}"
    request = plan(**{"gpu.type": json.dumps(TYPES), "request": own})
    assert request.body["StoppingCondition"]["MaxPendingTimeInSeconds"] == 7200


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"gpu.type": "[ml.g5.2xlarge, ml.g55.2xlarge]"}, "sagemaker.gpu.type"),
        ({"gpu.type": "[ml.g5.2xlarge, ml.g6.2xlarge]", "queue": "q"}, "sagemaker.gpu.type"),
        ({"queue": "q", "max_retries": "50"}, "sagemaker.max_retries"),
    ],
)
def test_what_the_types_or_the_queue_rule_out_is_refused_before_upload(
    changes: dict[str, str], key: str
) -> None:
    with refused(key, code=2):
        plan(**changes)
    types = SAGEMAKER | {"sagemaker.gpu.type": json.dumps(TYPES)}
    with refused("sagemaker.gpu.type", code=2):
        sagemaker.plan(job_of(types), offline=True, written=True)


@pytest.mark.parametrize("more", ["{shareName: a}", "{schedulingPriority: high}"])
def test_what_the_client_of_batch_does_not_send_is_no_lost_answer(cloud: Aws, more: str) -> None:
    with pytest.raises(UsageError, match="Parameter validation failed") as raised:
        sagemaker.submit(plan(queue="vision", queue_request=more), str)
    assert not isinstance(raised.value, remote.UnansweredError) and not cloud.submitted


QUEUE = {"queue": "vision", "queue_request": "{schedulingPriority: 10}"}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_job_is_submitted_to_its_queue_once(cloud: Aws, lost: int) -> None:
    """boto3 repeats a lost call, which Batch refuses by its token."""
    cloud.lost = lost
    request = plan(**QUEUE)
    run = sagemaker.submit(request, str)
    (sent,) = cloud.submitted
    assert (sent["jobQueue"], sent["schedulingPriority"]) == ("vision", 10)
    payload = json.loads(sent["serviceRequestPayload"])
    assert payload == request.body and not cloud.jobs
    assert payload["Environment"]["STOKER_SERVICE_JOB"] == request.name
    assert run.id == f"sagemaker:{REGION}/vision/{request.name}"
    assert sagemaker.attach(run.id).status() == "running: RUNNABLE in queue"
    assert list(run.logs()) == []


def test_a_queue_that_does_not_exist_is_one_line(cloud: Aws) -> None:
    with pytest.raises(UsageError) as raised:
        sagemaker.submit(plan(queue="absent"), str)
    assert len(raised.value.problems) == 1 and not cloud.submitted


def described(status: str, *attempts: str, **more: Any) -> dict[str, Any]:
    resources = [{"serviceResourceId": {"name": "TrainingJobArn", "value": a}} for a in attempts]
    latest = {"latestAttempt": resources[-1]} if resources else {}
    required = {"jobId": "id-1", "jobName": "j", "jobQueue": "q", "startedAt": 0}
    kind = {"serviceJobType": "SAGEMAKER_TRAINING", "status": status}
    return {**required, **kind, "attempts": resources[:-1], **latest, **more}


@pytest.mark.parametrize(
    ("queued", "job", "text"),
    [
        (described("SUBMITTED"), None, "running: SUBMITTED in queue"),
        (described("RUNNABLE"), None, "running: RUNNABLE in queue"),
        (described("SCHEDULED", ARN), training("InProgress", "Pending"), "running: SCHEDULED in queue"),
        (described("RUNNING", ARN), training("InProgress", "Training"), "running: Training"),
        (described("RUNNABLE", ARN), training("Failed", "Failed"), "running: RUNNABLE in queue"),
        (described("SUCCEEDED", ARN), training("Completed", "Completed"), "succeeded"),
        (described("FAILED", ARN), training("Failed", "Failed", FailureReason="disk"), "failed: disk"),
        (described("FAILED", ARN), training("Stopped", "Stopped"), "interrupted"),
        (described("FAILED", ARN, isTerminated=True), training("InProgress", "Stopping"), "running: Stopping"),
        (described("FAILED", ARN, statusReason="late"), training("Completed", "Completed"), "failed: late"),
        (described("FAILED", isTerminated=True), None, "interrupted"),
        (described("FAILED", statusReason="RoleArn is invalid"), None, "failed: RoleArn is invalid"),
    ],
)  # fmt: skip
def test_states_in_a_queue(
    monkeypatch: pytest.MonkeyPatch, queued: dict[str, Any], job: dict[str, Any] | None, text: str
) -> None:
    run = stubbed_run(monkeypatch, [queued], [job] if job else [])
    assert run.status() == text


def stubbed_run(
    monkeypatch: pytest.MonkeyPatch, queued: list[dict[str, Any]], jobs: list[dict[str, Any]]
) -> sagemaker.SageMakerRun:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    aws.client.cache_clear()
    batch, service = (Stubber(aws.client(name, REGION)) for name in ("batch", "sagemaker"))
    listed = {"jobId": "id-1", "jobName": "j", "serviceJobType": "SAGEMAKER_TRAINING"}
    other = listed | {"jobId": "id-2", "jobName": "J"}  # the filter ignores case
    wanted = {"jobQueue": "q", "filters": [{"name": "JOB_NAME", "values": ["j"]}]}
    batch.add_response("list_service_jobs", {"jobSummaryList": [other, listed]}, wanted)
    for one in queued:
        batch.add_response("describe_service_job", one, {"jobId": "id-1"})
    stop = {"jobId": "id-1", "reason": "stoker stop"}
    batch.add_response("terminate_service_job", {}, stop)
    for one in jobs:
        service.add_response("describe_training_job", one)
    batch.activate()
    service.activate()
    return sagemaker.attach(f"sagemaker:{REGION}/q/j")


def test_a_retried_job_ends_with_its_last_attempt_and_names_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    retried = described("SUCCEEDED", f"{ARN}0", ARN)
    done = training("Completed", "Completed", BillableTimeInSeconds=3600)
    run = stubbed_run(monkeypatch, [retried] * 2, [done] * 2)
    assert run.wait() == 0
    assert run.closing().endswith("billed besides: AWSBatchflowers-10")


def test_stop_ends_the_queues_job(monkeypatch: pytest.MonkeyPatch) -> None:
    run = stubbed_run(monkeypatch, [described("RUNNABLE")], [])
    assert run.status().startswith("running")
    run.stop()
