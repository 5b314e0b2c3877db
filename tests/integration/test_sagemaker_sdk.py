"""`model_trainer(job)` and our own request ask SageMaker for the same job."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from launcher.job import open_job
from launcher.places import sagemaker
from launcher.places.sagemaker import aws
from stoker.config.loading import load
from stoker.errors import UsageError
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


FIELDS = (
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
)
RECORD = ROOT / "tests/fakes/model_trainer.json"
"""What the SDK asked for; `STOKER_RECORD=1 make soak` writes it anew."""


def asked_for(described: dict[str, Any]) -> dict[str, Any]:
    """A training job as it was asked for, without what is each side's own affair."""
    found = {channel["ChannelName"]: copy.deepcopy(channel) for channel in described["InputDataConfig"]}
    found.pop("sm_drivers", None)
    found["code"]["DataSource"]["S3DataSource"].pop("S3Uri")
    for channel in found.values():
        where = channel["DataSource"]["S3DataSource"]
        if "S3Uri" in where:  # uploaded data lies below a digest of its names and times
            where["S3Uri"] = re.sub(r"/[0-9a-f]{8,}/$", "/DIGEST/", where["S3Uri"])
    client = boto3.session.Session().client("sagemaker", region_name=REGION)
    tags = client.list_tags(ResourceArn=described["TrainingJobArn"])["Tags"]
    return {
        **{field: described.get(field) for field in FIELDS},
        "TrainingImage": described["AlgorithmSpecification"]["TrainingImage"],
        "channels": found,
        "tags": {tag["Key"]: tag["Value"] for tag in tags},
    }


@pytest.fixture
def overrides(environment: dict[str, str], tmp_path: Path) -> list[str]:
    """A job in which every part of a request occurs."""
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "0.tar").write_bytes(b"x" * 100)
    boto3.session.Session().client("s3").put_object(Bucket=BUCKET, Key="val/0.tar", Body=b"y")
    return [
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
        f"sagemaker.channels={{val: {{uri: 's3://{BUCKET}/val/', groups: [gpu]}}}}",
        f"params.data={tmp_path / 'shards'}",
    ]


def ours(overrides: list[str]) -> dict[str, Any]:
    return sagemaker.submit(sagemaker.plan(open_job(load(None, overrides))), lambda _: None).describe()


def test_our_request_is_the_one_that_the_sdk_made_when_it_was_recorded(overrides: list[str]) -> None:
    assert asked_for(ours(overrides)) == json.loads(RECORD.read_text())


@pytest.mark.soak
def test_both_ask_for_the_same_job(overrides: list[str], environment: dict[str, str]) -> None:
    """The SDK is installed for it: 1.5 GB."""
    name = train_through_sdk(overrides, environment, ROOT)
    client = boto3.session.Session().client("sagemaker", region_name=REGION)
    theirs = client.describe_training_job(TrainingJobName=name)
    if os.environ.get("STOKER_RECORD"):
        RECORD.write_text(json.dumps(asked_for(theirs), indent=1, sort_keys=True) + "\n")
    assert asked_for(theirs) == asked_for(ours(overrides)) == json.loads(RECORD.read_text())
    assert asked_for(theirs)["tags"] == {"stoker-job": "flowers", "team": "vision"}

    by_name = {channel["ChannelName"]: channel for channel in theirs["InputDataConfig"]}
    source = by_name["code"]["DataSource"]["S3DataSource"]["S3Uri"]
    prefix = source.removeprefix(f"s3://{BUCKET}/")
    listed = boto3.session.Session().client("s3").list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    names = {entry["Key"].removeprefix(prefix).lstrip("/") for entry in listed["Contents"]}
    assert {"train.py", "job.yaml", ".ray-token", "stoker/config/loading.py"} <= names
    assert "token" not in json.dumps(theirs, default=str).lower()


def test_what_a_model_trainer_cannot_carry_is_refused(overrides: list[str]) -> None:
    more = "{ProfilerConfig: {S3OutputPath: 's3://b/x'}, StoppingCondition: {MaxPendingTimeInSeconds: 7200}}"
    with pytest.raises(UsageError, match=r"no place for sagemaker\.request\.ProfilerConfig; use --on"):
        sagemaker.model_trainer(open_job(load(None, [*overrides, f"sagemaker.request={more}"])))


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
        sagemaker.model_trainer(job)
    assert len(caught.value.problems) == 1
