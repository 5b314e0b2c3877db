"""`model_trainer(job)` and our own request ask SageMaker for the same job."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from launcher.backends import sagemaker as backend
from launcher.job import open_job
from launcher.sagemaker import aws
from stoker.config import UsageError, load
from tests.fakes.aws import REGION, ROLE, moto_server
from tests.fakes.sagemaker_sdk import train_through_sdk

pytestmark = pytest.mark.timeout(1200)  # the SDK is installed the first time

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "stoker-sdk"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with moto_server() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        aws.client.cache_clear()
        boto3.session.Session().client("s3").create_bucket(Bucket=BUCKET)
        yield variables
        aws.client.cache_clear()


def channels(described: dict[str, Any]) -> dict[str, Any]:
    """Channels by name, without those whose address or presence is each side's own affair."""
    found = {channel["ChannelName"]: copy.deepcopy(channel) for channel in described["InputDataConfig"]}
    found.pop("sm_drivers", None)
    found["code"]["DataSource"]["S3DataSource"].pop("S3Uri")
    return found


def test_both_ask_for_the_same_job(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "0.tar").write_bytes(b"x" * 100)
    boto3.session.Session().client("s3").put_object(Bucket=BUCKET, Key="val/0.tar", Body=b"y")
    overrides = [
        "name=flowers",
        f"sagemaker.region={REGION}",
        f"sagemaker.role={ROLE}",
        f"sagemaker.s3_uri=s3://{BUCKET}/stoker",
        "sagemaker.gpu.type=ml.g5.2xlarge",
        "sagemaker.cpu.type=ml.c5.4xlarge",
        "sagemaker.cpu.count=2",
        "sagemaker.spot=true",
        "sagemaker.max_runtime_s=7200",
        "sagemaker.volume_gb=50",
        "sagemaker.encrypt_traffic=true",
        "sagemaker.subnets=[subnet-1]",
        "sagemaker.security_groups=[sg-1]",
        "sagemaker.environment={LEVEL: debug}",
        "sagemaker.hyperparameters={train.lr: 0.1}",
        "sagemaker.tags={team: vision}",
        f"sagemaker.channels={{val: {{uri: 's3://{BUCKET}/val/', groups: [cpu]}}}}",
        f"params.data={tmp_path / 'shards'}",
    ]
    name = train_through_sdk(overrides, environment, ROOT)
    ours = backend.submit(backend.plan(open_job(load(None, overrides))), lambda _: None).describe()
    client = boto3.session.Session().client("sagemaker", region_name=REGION)
    theirs = client.describe_training_job(TrainingJobName=name)
    for field in (
        "RoleArn",
        "HyperParameters",
        "Environment",
        "ResourceConfig",
        "StoppingCondition",
        "VpcConfig",
        "OutputDataConfig",
        "EnableManagedSpotTraining",
        "EnableInterContainerTrafficEncryption",
        "EnableNetworkIsolation",
    ):
        assert theirs.get(field) == ours.get(field), field
    assert channels(theirs) == channels(ours)
    image = "TrainingImage"
    assert theirs["AlgorithmSpecification"][image] == ours["AlgorithmSpecification"][image]
    tags = [
        {tag["Key"]: tag["Value"] for tag in client.list_tags(ResourceArn=arn)["Tags"]}
        for arn in (theirs["TrainingJobArn"], ours["TrainingJobArn"])
    ]
    assert tags[0] == tags[1] == {"stoker-job": "flowers", "team": "vision"}

    by_name = {channel["ChannelName"]: channel for channel in theirs["InputDataConfig"]}
    source = by_name["code"]["DataSource"]["S3DataSource"]["S3Uri"]
    prefix = source.removeprefix(f"s3://{BUCKET}/")
    listed = boto3.session.Session().client("s3").list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    names = {entry["Key"].removeprefix(prefix).lstrip("/") for entry in listed["Contents"]}
    assert {"train.py", "job.yaml", ".ray-token", "stoker/config.py"} <= names
    assert "token" not in json.dumps(theirs, default=str).lower()


def test_without_the_sdk_it_says_what_to_install(environment: dict[str, str]) -> None:
    job = open_job(
        load(
            None,
            [
                f"sagemaker.region={REGION}",
                f"sagemaker.role={ROLE}",
                f"sagemaker.s3_uri=s3://{BUCKET}/x",
                "sagemaker.gpu.type=ml.g5.xlarge",
            ],
        )
    )
    with pytest.raises(UsageError, match="pip install") as caught:
        backend.model_trainer(job)
    assert len(caught.value.problems) == 1
