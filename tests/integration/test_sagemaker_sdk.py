"""The SageMaker SDK's trainer asks for the job that `--on sagemaker` asks for."""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from stoker.config.loading import load
from stoker_launcher.job import open_job
from stoker_launcher.places import sagemaker
from stoker_launcher.places.sagemaker import aws
from stoker_launcher.places.sagemaker.sdk import model_trainer
from tests.fakes.aws import REGION, ROLE, moto, served
from tests.fakes.sagemaker_sdk import V3, in_sdk
from tests.refusals import refused

BUCKET = "stoker-sdk"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "console.md"


@pytest.fixture
def requests() -> list[dict[str, Any]]:
    """The CreateTrainingJob requests that arrive."""
    return []


@pytest.fixture
def environment(
    requests: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    answer = moto()

    def noting(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        if environ.get("HTTP_X_AMZ_TARGET") == "SageMaker.CreateTrainingJob":
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            requests.append(json.loads(body))
            environ["wsgi.input"] = io.BytesIO(body)
        return answer(environ, start)

    with served(noting) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        aws.client.cache_clear()
        boto3.client("s3", region_name=REGION).create_bucket(Bucket=BUCKET)
        yield variables
        bucket = boto3.resource("s3", region_name=REGION).Bucket(BUCKET)
        bucket.objects.all().delete()
        bucket.delete()
        aws.client.cache_clear()


@pytest.fixture
def recipe(environment: dict[str, str], tmp_path: Path) -> list[str]:
    """A job in which every part of a request occurs."""
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "0.tar").write_bytes(b"x" * 100)
    boto3.client("s3", region_name=REGION).put_object(Bucket=BUCKET, Key="val/0.tar", Body=b"y")
    return [
        *BASE,
        "name=flowers",
        "sagemaker.spot=true",
        "sagemaker.max_retries=2",
        "sagemaker.volume_gb=50",
        "sagemaker.encrypt_traffic=true",
        "sagemaker.subnets=[subnet-1]",
        "sagemaker.security_groups=[sg-1]",
        "sagemaker.environment={LEVEL: debug}",
        "sagemaker.hyperparameters={train.lr: 0.1}",
        "sagemaker.tags={team: vision}",
        f"sagemaker.channels={{val: {{uri: 's3://{BUCKET}/val/', groups: [gpu]}}}}",
        "sagemaker.request={StoppingCondition: {MaxPendingTimeInSeconds: 7200},"
        " RemoteDebugConfig: {EnableRemoteDebug: true}}",
        f"params.data={tmp_path / 'shards'}",
    ]


BASE = [
    f"sagemaker.region={REGION}",
    f"sagemaker.role={ROLE}",
    f"sagemaker.s3_uri=s3://{BUCKET}/stoker",
    "sagemaker.gpu.type=ml.g5.2xlarge",
    "sagemaker.cpu.type=ml.c5.4xlarge",
    "sagemaker.cpu.count=2",
]
START = """
import json, sys
from pathlib import Path
from stoker.config.loading import load
from stoker_launcher.job import open_job
from stoker_launcher.places.sagemaker.sdk import model_trainer
file = Path(sys.argv[1]) if sys.argv[1] else None
job = open_job(load(file, sys.argv[2:]))
"""
TRAIN = (
    START
    + """
trainer = model_trainer(job)
trainer.train(wait=False, logs=False)
try:
    trainer.train(wait=False, logs=False)
except Exception as error:
    print(json.dumps({"again": type(error).__name__}))
"""
)
STEP = (
    START
    + """
from sagemaker.mlops.workflow.pipeline import Pipeline
from sagemaker.mlops.workflow.steps import TrainingStep
trainer = model_trainer(job, pipeline=True)
step = TrainingStep(name="Train", step_args=trainer.train())
pipeline = Pipeline(name="stoker", steps=[step], sagemaker_session=trainer.sagemaker_session)
print(pipeline.definition())
"""
)
REFUSED = (
    START
    + """
try:
    model_trainer(job)
except Exception as error:
    print(json.dumps([line.key for line in error.problems]))
"""
)
SERVER = "arn:aws:sagemaker:us-east-1:123456789012:mlflow-tracking-server/team"


def without_names(request: dict[str, Any]) -> dict[str, Any]:
    """A request as text would compare: no time stamps, channels in one order, and not the SDK's way to start."""
    text = re.sub(r"-\d{8}-\d{6}-[0-9a-f]{4}", "-STAMP", json.dumps(request))
    found: dict[str, Any] = copy.deepcopy(json.loads(text))
    found.pop("TrainingJobName", None)
    for name in ("ContainerEntrypoint", "ContainerArguments", "EnableSageMakerMetricsTimeSeries"):
        found["AlgorithmSpecification"].pop(name, None)
    channels = {each["ChannelName"]: each for each in found["InputDataConfig"]}
    channels.pop("sm_drivers", None)
    return found | {"InputDataConfig": channels}


@pytest.mark.long
@pytest.mark.timeout(1800)  # the SDK is installed the first time, 1 GB
@pytest.mark.parametrize("kind", ["recipe", "script", "script-mode"])
def test_a_model_trainer_asks_for_our_job(
    kind: str,
    recipe: list[str],
    requests: list[dict[str, Any]],
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    file, settings = None, recipe
    if kind == "script":
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "train.py").write_text("print('trained')\n")
        file = tmp_path / "code" / "job.yaml"
        file.write_text("name: own\nscript: train.py\nargs: ['--lr', '0.1']\n")
        settings = BASE
    if kind == "script-mode":
        settings = [*recipe, "sagemaker.entry=script-mode"]
    sagemaker.submit(sagemaker.plan(open_job(load(file, settings))), lambda _: None)
    again = in_sdk(V3, TRAIN, environment, str(file or ""), *settings)
    ours, theirs = requests  # no third: a second train() would read the first one's checkpoints
    assert again == {"again": "UsageError"}
    assert without_names(theirs) == without_names(ours)
    sources = [each.get("DataSource") for each in theirs["InputDataConfig"]]
    code = f"s3://{BUCKET}/stoker/"
    for source in sources:
        assert source["S3DataSource"]["S3Uri"].startswith((code, f"s3://{BUCKET}/val"))
    if kind == "script-mode":
        assert "ContainerEntrypoint" not in theirs["AlgorithmSpecification"]
        return
    # What the container runs: the SDK's script, which becomes Python, so that SIGTERM reaches it.
    (drivers,) = [
        each["DataSource"]["S3DataSource"]["S3Uri"]
        for each in theirs["InputDataConfig"]
        if each["ChannelName"] == "sm_drivers"
    ]
    key = drivers.removeprefix(f"s3://{BUCKET}/").rstrip("/") + "/sm_train.sh"
    body = boto3.client("s3", region_name=REGION).get_object(Bucket=BUCKET, Key=key)["Body"]
    assert b"\nexec python train.py --config job.yaml\n" in body.read()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_each_execution_of_a_pipeline_has_its_own_checkpoints(
    recipe: list[str], environment: dict[str, str]
) -> None:
    definition = in_sdk(V3, STEP, environment, "", *recipe)
    (step,) = definition["Steps"]
    asked = without_names(step["Arguments"])
    ours = without_names(sagemaker.plan(open_job(load(None, recipe))).body)
    base = ours["CheckpointConfig"].pop("S3Uri")
    joined = asked["CheckpointConfig"].pop("S3Uri")
    assert asked == ours
    assert joined == {
        "Std:Join": {"On": "/", "Values": [base, {"Get": "Execution.PipelineExecutionId"}]}
    }


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("more", "key"),
    [
        (
            "sagemaker.request={ProfilerConfig: {S3OutputPath: 's3://b/x'}}",
            "sagemaker.request.ProfilerConfig",
        ),
        (
            "sagemaker.request={AlgorithmSpecification: {ContainerArguments: [x]}}",
            "sagemaker.request.AlgorithmSpecification.ContainerArguments",
        ),
        (f"tracking.mlflow.uri={SERVER}", "sagemaker.request.MlflowConfig"),
        ("sagemaker.gpu.type=[ml.g5.xlarge, ml.g6.xlarge]", "sagemaker.gpu.type"),
        ("sagemaker.queue=gpus", "sagemaker.queue"),
    ],
)
def test_what_has_no_place_in_the_sdk_is_refused(
    recipe: list[str], environment: dict[str, str], more: str, key: str
) -> None:
    plain = [one for one in recipe if not one.startswith("sagemaker.request")]
    assert in_sdk(V3, REFUSED, environment, "", *plain, more) == [key]
    listed = boto3.client("s3", region_name=REGION).list_objects_v2(Bucket=BUCKET)
    assert [one["Key"] for one in listed["Contents"]] == ["val/0.tar"], "refused before the upload"


def test_without_the_sdk_it_says_what_to_install(recipe: list[str]) -> None:
    with refused("model_trainer", code=2):
        model_trainer(open_job(load(None, recipe)))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_examples_of_the_page_run(
    environment: dict[str, str],
    requests: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(None, [*BASE, "params.data=s3://b/x"]).config.sagemaker
    content = {"name": "flowers", "params": {"data": f"s3://{BUCKET}/x"}}
    content["sagemaker"] = settings.model_dump(mode="json", exclude_defaults=True)
    Path("job.yaml").write_text(json.dumps(content))
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    script = "\n".join(one for one in examples if "PyTorch(" not in one)
    end = "import json, boto3\nprint(json.dumps(boto3.client('sagemaker').list_pipelines(), default=str))"
    made = in_sdk(V3, f"role = '{ROLE}'\n{script}\n{end}", environment)
    assert [one["PipelineName"] for one in made["PipelineSummaries"]] == ["flowers"]
    assert [one["EnableManagedSpotTraining"] for one in requests] == [True]
