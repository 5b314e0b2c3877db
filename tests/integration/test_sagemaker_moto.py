"""The place `sagemaker` against a moto server: what arrives in S3, SageMaker and CloudWatch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.client import BaseClient
from botocore.stub import Stubber
from clouds import SAGEMAKER, job_of
from moto.server import ThreadedMotoServer

from stoker.errors import UsageError
from stoker_launcher.job import Job
from stoker_launcher.places import remote, sagemaker
from stoker_launcher.places.sagemaker import aws
from tests.fakes.aws import REGION, moto, moto_server, served, training_job
from tests.refusals import refused

BUCKET = "stoker-test"
BASE = SAGEMAKER | {"sagemaker.s3_uri": f"s3://{BUCKET}/stoker"}


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with moto_server() as environment:
        yield environment


@pytest.fixture(autouse=True)
def cloud(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    aws.client.cache_clear()
    boto3.client("s3", region_name=REGION).create_bucket(Bucket=BUCKET)
    yield
    bucket = boto3.resource("s3", region_name=REGION).Bucket(BUCKET)
    bucket.objects.all().delete()
    bucket.delete()
    aws.client.cache_clear()


def make_job(changes: dict[str, str] | None = None) -> Job:
    return job_of(BASE | (changes or {}))


def keys_below(prefix: str) -> list[str]:
    listed = boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    return [entry["Key"] for entry in listed.get("Contents", [])]


def quiet(line: str) -> None:
    del line


def test_what_is_submitted_is_what_was_planned(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "0.tar").write_bytes(b"x" * 100)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "1.tar").write_bytes(b"x" * 100)
    (tmp_path / "shards" / "linked").symlink_to(tmp_path / "far")
    job = make_job({"params.data": str(tmp_path / "shards"), "sagemaker.max_retries": "2"})
    request = sagemaker.plan(job)
    submitted = sagemaker.submit(request, quiet)
    described = submitted.describe()
    for field in (
        "TrainingJobName",
        "RoleArn",
        "HyperParameters",
        "InputDataConfig",
        "ResourceConfig",
        "StoppingCondition",
        "OutputDataConfig",
        "CheckpointConfig",
        "EnableManagedSpotTraining",
    ):
        assert described[field] == request.body[field], field
    sent = dict(request.body["AlgorithmSpecification"])
    sent.pop("MetricDefinitions")  # moto answers with definitions of its own
    assert {key: described["AlgorithmSpecification"].get(key) for key in sent} == sent
    key, data = (
        f"stoker/{request.name}/code/.ray-token",
        request.data[0].uri.partition("stoker/")[2],
    )
    token = boto3.client("s3").get_object(Bucket=BUCKET, Key=key)["Body"].read().decode()
    assert len(token) == 64 and token not in json.dumps(described, default=str)
    assert keys_below(f"stoker/{data}") == [
        f"stoker/{data}{name}" for name in ("0.tar", "linked/1.tar")
    ]


def test_unchanged_data_is_uploaded_once_and_a_broken_upload_again(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"rows")
    told: list[str] = []
    for _ in range(2):
        request = sagemaker.plan(make_job({"params.data": str(tmp_path / "rows.parquet")}))
        sagemaker.submit(request, told.append)
    assert [line for line in told if line.startswith("data:")] == [
        "data: 4 B uploaded",
        "data: 4 B already there",
    ]
    manifest = request.data[0].uri.removeprefix(f"s3://{BUCKET}/").rstrip("/") + ".json"
    boto3.client("s3").delete_object(Bucket=BUCKET, Key=manifest)
    sagemaker.submit(
        sagemaker.plan(make_job({"params.data": str(tmp_path / "rows.parquet")})), told.append
    )
    assert "data: 4 B uploaded" in told[-2]


def test_kms_key_encrypts_every_object(tmp_path: Path) -> None:
    key = boto3.client("kms", region_name=REGION).create_key()["KeyMetadata"]["KeyId"]
    (tmp_path / "x.bin").write_bytes(b"1")
    request = sagemaker.plan(
        make_job({"sagemaker.kms_key": key, "params.data": str(tmp_path / "x.bin")})
    )
    sagemaker.submit(request, quiet)
    client = boto3.client("s3")
    for name in keys_below("stoker/"):
        head = client.head_object(Bucket=BUCKET, Key=name)
        assert (head["ServerSideEncryption"], head["SSEKMSKeyId"].endswith(key)) == (
            "aws:kms",
            True,
        )


def test_absent_buckets_and_prefixes_are_named_together() -> None:
    changes = {
        "sagemaker.s3_uri": "s3://no-such-bucket-here/x",
        "sagemaker.channels": f"{{data: {{uri: 's3://{BUCKET}/nothing'}}}}",
        "sagemaker.max_retries": "50",
    }
    keys = ("sagemaker.max_retries", "sagemaker.s3_uri", "sagemaker.channels.data.uri")
    with refused(*keys, code=2):
        sagemaker.plan(make_job(changes))


def test_an_unknown_job_is_one_line() -> None:
    with pytest.raises(UsageError, match="no-such-job") as caught:
        sagemaker.attach(f"sagemaker:{REGION}/no-such-job").status()
    assert len(caught.value.problems) == 1


def write_logs(name: str, lines: list[tuple[str, str, int]]) -> None:
    logs = boto3.client("logs", region_name=REGION)
    with_groups = {group["logGroupName"] for group in logs.describe_log_groups()["logGroups"]}
    if sagemaker.LOG_GROUP not in with_groups:
        logs.create_log_group(logGroupName=sagemaker.LOG_GROUP)
    start = int(time.time() * 1000) - 60_000
    for host in sorted({host for host, _, _ in lines}):
        stream = f"{name}/{host}-1700000000"
        logs.create_log_stream(logGroupName=sagemaker.LOG_GROUP, logStreamName=stream)
        events = [{"timestamp": start + at, "message": text} for h, text, at in lines if h == host]
        logs.put_log_events(
            logGroupName=sagemaker.LOG_GROUP, logStreamName=stream, logEvents=events
        )


def test_logs_are_merged_by_time_and_name_group_and_host() -> None:
    submitted = sagemaker.submit(sagemaker.plan(make_job()), quiet)
    write_logs(
        submitted.name,
        [
            ("algo-1", "pip notice", 0),
            ("algo-2", "[cpu algo-2 worker] joined", 10),
            ("algo-1", "[gpu algo-1 head] cluster formed", 20),
            ("algo-2", "plain line", 25),
            ("algo-1", "[gpu algo-1 head] epoch 1", 30),
        ],
    )
    other = sagemaker.submit(sagemaker.plan(make_job()), quiet)
    write_logs(other.name, [("algo-1", "of another job", 15)])
    assert list(submitted.logs()) == [
        "[algo-1] pip notice",
        "[cpu/algo-2] joined",
        "[gpu/algo-1] cluster formed",
        "[cpu/algo-2] plain line",
        "[gpu/algo-1] epoch 1",
    ]


def test_following_shows_late_lines_once_and_ends_with_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submitted = sagemaker.submit(sagemaker.plan(make_job()), quiet)
    write_logs(submitted.name, [("algo-1", "first", 1000)])
    followed = sagemaker.SageMakerRun(submitted.region, submitted.name, poll_s=0.2)
    real = sagemaker.SageMakerRun.describe
    answers = iter(["InProgress", "InProgress", "InProgress"])

    def describe(self: sagemaker.SageMakerRun) -> dict[str, Any]:
        # moto ends every job at once: the state alone is played here.
        found = real(self)
        state = next(answers, "Completed")
        return found | {"TrainingJobStatus": state, "SecondaryStatus": "Training"}

    monkeypatch.setattr(sagemaker.SageMakerRun, "describe", describe)
    lines = []
    for line in followed.logs(follow=True):
        lines.append(line)
        if line.endswith("first"):  # a line of an earlier time that arrives later
            write_logs(submitted.name, [("algo-3", "late", 500)])
    assert lines.count("[algo-1] first") == 1
    assert lines.count("[algo-3] late") == 1
    assert lines[0].startswith(f"[{submitted.name}] running")
    assert lines[-1].startswith("[") and any("succeeded" in line for line in lines)


def test_status_wait_and_closing_with_cost() -> None:
    job = make_job({"sagemaker.prices": "{ml.g5.2xlarge: 0.123}"})
    submitted = sagemaker.submit(sagemaker.plan(job), quiet)
    assert list(submitted.logs()) == []
    assert submitted.status() == "succeeded"
    assert submitted.wait() == 0
    assert submitted.id == f"sagemaker:{REGION}/{submitted.name}"
    again = sagemaker.attach(submitted.id)
    assert (again.region, again.name) == (REGION, submitted.name)
    assert sagemaker.attach(submitted.describe()["TrainingJobArn"]).name == submitted.name
    closing = submitted.closing()
    assert ["gpu", "1", "ml.g5.2xlarge", "0.123"] in [
        line.split()[:4] for line in closing.splitlines()
    ]
    assert "ml.c5.4xlarge" in closing and "model: s3://" in closing


@pytest.fixture
def stubbed() -> Iterator[Stubber]:
    """SageMaker's client with answers of the service's own shape, where moto has no method."""
    client = aws.client("sagemaker", REGION)
    with Stubber(client) as stubber:
        yield stubber


def test_a_denied_request_is_not_asked_again(
    stubbed: Stubber, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "UNREACHABLE_S", 0.2)
    stubbed.add_response("describe_training_job", training_job("InProgress", "Training"))
    stubbed.add_client_error("describe_training_job", "AccessDeniedException")
    with pytest.raises(remote.LostError, match=r"launcher\.json"):
        sagemaker.SageMakerRun(REGION, "j", poll_s=0.01).wait()
    assert "asking again" not in capsys.readouterr().err


def test_a_watcher_survives_an_unreachable_service(
    server: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aws, "ATTEMPTS", 1)
    with moto_server() as leaving:
        monkeypatch.setenv("AWS_ENDPOINT_URL", leaving["AWS_ENDPOINT_URL"])
        aws.client.cache_clear()
        submitted = sagemaker.submit(sagemaker.plan(make_job()), quiet)
    port = int(leaving["AWS_ENDPOINT_URL"].rpartition(":")[2])
    returning = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    ask, failures = submitted.ask, list[UsageError]()

    def ask_until_it_fails_twice() -> Any:
        try:
            return ask()
        except UsageError as error:
            failures.append(error)
            if len(failures) == 2:
                returning.start()
            raise

    monkeypatch.setattr(submitted, "ask", ask_until_it_fails_twice)
    try:
        submitted.patiently.poll_s = 0.05
        assert submitted.wait() == 0
        assert len(failures) >= 2
        assert "asking again for up to 600 s" in capsys.readouterr().err
    finally:
        returning.stop()
        monkeypatch.setenv("AWS_ENDPOINT_URL", server["AWS_ENDPOINT_URL"])


def test_stop_asks_the_service_by_name(stubbed: Stubber) -> None:
    stubbed.add_response("stop_training_job", {}, {"TrainingJobName": "j"})
    sagemaker.SageMakerRun(REGION, "j").stop()
    stubbed.assert_no_pending_responses()


def test_cost_by_group_from_billable_seconds(stubbed: Stubber) -> None:
    stubbed.add_response(
        "describe_training_job",
        training_job(
            "Completed", "Completed", BillableTimeInSeconds=7200, TrainingTimeInSeconds=7300
        ),
    )
    closing = sagemaker.SageMakerRun(REGION, "j").closing()
    rows = [line.split() for line in closing.splitlines()]
    assert ["gpu", "1", "ml.g5.2xlarge", "1.515", "3.03"] in rows
    assert ["cpu", "2", "ml.c5.4xlarge", "1.632", "3.26"] in rows
    assert ["total", "3.147", "6.29"] in rows
    assert "billable 2 h 0 min; estimated" in closing


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("ResourceLimitExceeded", "Service Quotas"),
        ("AccessDeniedException", "docs/iam/launcher.json"),
        ("ExpiredTokenException", "sign in again"),
    ],
)
def test_refusals_of_the_service_are_one_line(stubbed: Stubber, code: str, remedy: str) -> None:
    stubbed.add_client_error("create_training_job", code, "no")
    with pytest.raises(UsageError) as caught:
        sagemaker.submit(sagemaker.plan(make_job(), offline=True), quiet)
    assert len(caught.value.problems) == 1
    assert code in caught.value.problems[0] and remedy in caught.value.problems[0]


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_lost_answer_costs_no_second_job(monkeypatch: pytest.MonkeyPatch, attempts: int) -> None:
    """boto3 may repeat the call, which the service then refuses: the name is in use."""
    service, lost = moto(), list[str]()

    def losing(environ: dict[str, Any], start: Any) -> Any:
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        if target.endswith(".CreateTrainingJob") and not lost:
            lost.append(target)
            b"".join(service(environ, lambda *_: None))
            start("500 Internal Server Error", [])
            return [b""]
        return service(environ, start)

    def jobs() -> set[str]:
        listed = boto3.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
        return {job["TrainingJobName"] for job in listed}

    monkeypatch.setattr(aws, "ATTEMPTS", attempts)
    before = jobs()
    with served(losing) as cloud, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", cloud["AWS_ENDPOINT_URL"])
        aws.client.cache_clear()
        run = sagemaker.submit(sagemaker.plan(make_job()), quiet)
        assert lost and jobs() - before == {run.name}
        assert run.wait() == 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    real = BaseClient._make_api_call

    def record(self: BaseClient, operation: str, arguments: dict[str, Any]) -> Any:
        seen.append(f"{self.meta.service_model.service_name}:{operation}")
        return real(self, operation, arguments)

    monkeypatch.setattr(BaseClient, "_make_api_call", record)
    return seen


def test_dry_run_asks_only_whether_things_exist(calls: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"1")
    boto3.client("s3").create_bucket(Bucket=f"sagemaker-{REGION}-123456789012")
    boto3.client("s3").put_object(Bucket=BUCKET, Key="train/0.tar", Body=b"x")
    calls.clear()
    channels = f"{{labels: {{uri: 's3://{BUCKET}/train/'}}}}"
    changes = {"params.data": str(tmp_path / "x.bin"), "sagemaker.channels": channels}
    sagemaker.plan(make_job(changes), offline=True).render()
    assert calls == []
    sagemaker.plan(make_job({**changes, "sagemaker.s3_uri": "null"})).render()
    assert calls == ["sts:GetCallerIdentity", "s3:ListObjectsV2", "s3:ListObjectsV2"]


def test_leaving_the_logs_leaves_the_job(calls: list[str]) -> None:
    submitted = sagemaker.submit(sagemaker.plan(make_job()), quiet)
    told: list[str] = []

    def until_interrupted(line: str) -> None:
        told.append(line)
        if len(told) == 2:  # the user presses Ctrl-C
            raise KeyboardInterrupt

    assert remote.follow(submitted, until_interrupted) == 130
    assert "sagemaker:StopTrainingJob" not in calls
    assert f"logs -f {submitted.id}" in told[-1] and f"stop {submitted.id}" in told[-1]
