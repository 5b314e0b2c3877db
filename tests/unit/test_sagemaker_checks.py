"""Wrong SageMaker jobs are refused before any upload, by key; right ones stand in `requests/`."""

# One row of the table on one line reads better than five.
# ruff: noqa: E501

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from clouds import SAGEMAKER, VERTEX, changes_of, full, job_of

from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.events import prices
from stoker.hosts.topology import has_gpu
from stoker_launcher.job import Job, open_job
from stoker_launcher.places import sagemaker, vertex
from stoker_launcher.places.remote import job_name
from stoker_launcher.places.sagemaker import sagemaker_rules
from stoker_launcher.places.sagemaker.training_job import default_image, request_of

NO_PAIR = "gpu.type=null; cpu.type=null"


@pytest.fixture(autouse=True)
def no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


def many(entry: str, count: int) -> str:
    """A list, or a mapping, of entries in which N is the number."""
    entries = ", ".join(entry.replace("N", str(number)) for number in range(count))
    return f"[{entries}]" if entry.startswith("{") else f"{{{entries}}}"


def make_job(changes: dict[str, str], source_dir: Path | None = None) -> Job:
    return job_of(SAGEMAKER | changes, source_dir)


def test_the_first_refusal_names_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Region, host type and role, and also the credentials, and what to set to do without."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UsageError) as caught:
        sagemaker.plan(open_job(load(None, ["name=flowers"])))
    keys = [problem.key for problem in caught.value.problems]
    assert {"sagemaker.region", "sagemaker.gpu.type", "sagemaker.role", "AWS"} <= {*keys}


WRONG: dict[str, list[str]] = {
    "gpu.type": [NO_PAIR, "gpu.type=ml.g5.3xlarge"],
    "groups": ["groups=[{name: x, type: ml.c5.xlarge}]", f"{NO_PAIR}; groups={many('{name: gN, type: ml.c5.xlarge}', 6)}"],
    "groups.0.name": [f"{NO_PAIR}; groups=[{{name: {'a' * 65}, type: ml.g5.xlarge}}, {{name: b, type: ml.c5.xlarge}}]"],
    "cluster.gpu_group": [f"{NO_PAIR}; groups=[{{name: a, type: ml.c5.xlarge}}, {{name: b, type: ml.c5.xlarge}}]", "cluster.gpu_group=trainers"],
    "cluster.min_cpu_hosts": ["cluster.min_cpu_hosts=3"],
    "data.preprocess_on": ["data.preprocess_on=[data_group]"],
    "train.workers": ["train.workers=2"],
    "checkpoint.dir": ["checkpoint.dir=ckpt"],
    "keep_alive_s": ["cpu.type=null; keep_alive_s=30000"],
    "max_retries": ["max_retries=0", "max_retries=31"],
    "cluster.join_timeout_s": ["max_runtime_s=300"],
    "kms_key": ["kms_key=my key"],
    "security_groups": ["subnets=[subnet-1]", "subnets=[subnet-1]; security_groups=[sg-1, sg-2, sg-3, sg-4, sg-5, sg-6]"],
    "subnets": ["security_groups=[sg-1]", "subnets=[subnet-a b]; security_groups=[sg-1]"],
    "entry": ["network_isolation=true; entry=script-mode"],
    # what has no key of its own, or has one
    "request.ResourceConfig.TrainingPlan": ["request={ResourceConfig: {TrainingPlan: x}}"],
    "request.ResourceConfig.TrainingPlanArn": ["request={ResourceConfig: {TrainingPlanArn: mine}}"],
    "request.StoppingCondition.MaxPendingTimeInSeconds": ["request={StoppingCondition: {MaxPendingTimeInSeconds: 60}}", "request={StoppingCondition: {MaxPendingTimeInSeconds: soon}}"],
    "request.StoppingCondition.MaxRuntimeInSeconds": ["request={StoppingCondition: {MaxRuntimeInSeconds: 60}}"],
    "request.StoppingCondition": ["request={StoppingCondition: 60}"],
    "request.RetryStrategy.MaximumRetryAttempts": ["request={RetryStrategy: {MaximumRetryAttempts: 3}}"],
    "request.Environment": ["request={Environment: {HF_TOKEN: x}}"],
    "request.OutputDataConfig.KmsKeyId": ["request={OutputDataConfig: {KmsKeyId: x}}"],
    "request.RoleArn": ["request={RoleArn: x}"],
    "request.MlflowConfig.MlflowRunName": ["request={MlflowConfig: {MlflowRunName: x}}"],
    "request.InputDataConfig": ["request={InputDataConfig: [{ChannelName: a}]}"],
    "queue_request": ["queue_request={schedulingPriority: 3}"],
    "queue_request.jobName": ["queue=q; queue_request={jobName: x}"],
    # channels and parameters
    "channels.code": ["channels={code: {uri: 's3://b/x'}}"],
    "channels.my data": ["channels={'my data': {uri: 's3://b/x'}}; params={my data: x}"],
    "channels.data.uri": ["channels={data: {uri: /data/train}}", "channels={data: {uri: 'https://b.s3.amazonaws.com/x'}}"],
    "channels": [f"channels={many('cN: {uri: s3://b/N}', 20)}; params={many('cN: x', 20)}"],
    "params.data": ["params.data=./no/such/folder", "params.data=/etc/host*", "params.data=/opt/ml/input/data/train", "network_isolation=true; params.data=s3://b/train"],
    "tracking.mlflow.uri": ["tracking.mlflow.uri=sqlite:///x.db", "tracking.mlflow.uri=arn:aws:sagemaker:us-east-1:123456789012:model/x"],
    # what everyone may read
    "environment.HF_TOKEN": ["environment={HF_TOKEN: abc}"],
    "environment.ID": ["environment={ID: AKIAABCDEFGHIJKLMNOP}"],
    "environment.PIP_INDEX_URL": ["environment={PIP_INDEX_URL: 'https://me:secret@host/packages'}"],
    "environment.RAY_AUTH_MODE": ["environment={RAY_AUTH_MODE: disabled}"],
    "environment.MY-NAME": ["environment={MY-NAME: x}"],
    "environment.LONG": [f"environment={{LONG: {'x' * 513}}}"],
    "hyperparameters.wandb_api_key": ["hyperparameters={wandb_api_key: x}"],
    "train.epoch": ["hyperparameters={train.epoch: 3}"],
    "train.epochs": ["hyperparameters={train.epochs: 0}"],
    "hyperparameters.sagemaker_program": ["hyperparameters={sagemaker_program: x.py}"],
    "hyperparameters.params.title": ['hyperparameters={params.title: "it\'s"}'],
    "hyperparameters.params.words": [f"hyperparameters={{params.words: {'x' * 2501}}}"],
    "hyperparameters.train__epochs": ["hyperparameters={train.epochs: 3, train__epochs: 4}"],
    "hyperparameters": [f"hyperparameters={many('params.pN: 1', 100)}"],
    "tags": [f"tags={many('tN: x', 50)}"],
    "role": ["role=null", "role=StokerJob"],
    "region": ["region=us-east-9", "region=null"],
    "s3_uri": ["s3_uri=null", "s3_uri=my-bucket/x"],
}  # fmt: skip


@pytest.mark.parametrize(("key", "wrong"), WRONG.items(), ids=WRONG)
@pytest.mark.long
def test_a_wrong_job_is_refused_by_its_key(key: str, wrong: list[str]) -> None:
    for changes in wrong:
        with pytest.raises(UsageError) as caught:
            sagemaker.plan(make_job(changes_of(changes, "sagemaker")), offline=True)
        problems = caught.value.problems
        assert any(f"{full(key, 'sagemaker')}: " in line for line in problems), problems
        assert all("\n" not in line and len(line) < 260 for line in problems), problems
        assert len(problems) <= 2, f"one mistake, many complaints: {problems}"


def test_the_command_line_wins_over_hyperparameters(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    given = {"train__epochs": 3, "train.lr": 0.1, "params.size.x": 1, "params.sizes": 2}
    file.write_text(json.dumps({"name": "a", "sagemaker": {"hyperparameters": given}}))
    job = open_job(load(file, ["train.epochs=5", "params.size={x: 2}"]))
    sent = request_of(job, "n", "us-east-1", "s3://bucket/p").body["HyperParameters"]
    assert sent == {"config": "job.yaml", "train__lr": "0.1", "params__sizes": "2"}


def test_a_channel_sets_the_parameter_of_its_name_unless_it_is_in_place() -> None:
    def data_at(*keys: str) -> dict[str, str]:
        job = open_job(load(None, [*keys, "sagemaker.channels={data: {uri: 's3://b/x'}}"]))
        return request_of(job, "n", "us-east-1", "s3://bucket/p").data_at

    mounted = {"data": "/opt/ml/input/data/data"}
    assert data_at("name=a") == data_at("params.data=here") == mounted
    assert data_at(f"script={__file__}") == data_at("recipe=absent:Mine") == {}
    assert data_at("params.data=/opt/ml/input/data/data/x") == {}


def test_parameters_that_are_no_paths_are_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    texts = {"split": "train", "layers": "**", "folder": "/no/such", "routes": ["/etc/hosts", "~1"]}
    keys = SAGEMAKER | {f"params.{name}": json.dumps(value) for name, value in texts.items()}
    request = sagemaker.plan(job_of(keys | {"recipe": "absent:Mine"}), offline=True)
    assert request.data == () and request.data_at == {}


def test_the_data_of_a_script_are_input_channels_wherever_they_are(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "flowers").mkdir()
    (tmp_path / "flowers/a").touch()
    given = {
        "training": "s3://bucket/train",
        "own": str(tmp_path / "flowers"),
        "far": "gs://bucket/train",
        "fsx": "/opt/ml/input/data/own",
    }
    params = {f"params.{name}": value for name, value in given.items()}
    script = {"script": str(tmp_path / "train.py")} | params
    request = sagemaker.plan(job_of(SAGEMAKER | script), offline=True)
    assert request.data_at == {name: f"/opt/ml/input/data/{name}" for name in ("training", "own")}
    request.job.stage(tmp_path / "staged", request.data_at)
    assert load(tmp_path / "staged/job.yaml").config.params == given | request.data_at
    job = job_of(VERTEX | script | {"params.fsx": "/gcs/bucket/x"})
    data_at = vertex.plan(job, offline=True).data_at
    assert data_at["far"] == "/gcs/bucket/train" and "training" not in data_at


def test_data_keep_their_address_until_they_or_their_key_change(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.tar").write_bytes(b"x")

    def place(**keys: str) -> str:
        changes = {f"sagemaker.{key}": value for key, value in keys.items()}
        job = make_job(changes | {"params.data": str(data)})
        return sagemaker.plan(job, offline=True).data[0].uri

    places = [place(), place(kms_key="alias/a"), place(kms_key="alias/b")]
    assert places[:2] == [place(), place(kms_key="alias/a")]
    (data / "a.tar").write_bytes(b"xy")
    assert len({*places, place()}) == 4


def test_a_single_group_has_no_name_and_its_idle_instances_are_billed() -> None:
    keys = {"sagemaker.cpu.type": "null", "sagemaker.keep_alive_s": "600"}
    request = sagemaker.plan(make_job(keys), offline=True)
    limit = "at most $36.61 in 24.1667 h (sagemaker.max_runtime_s + sagemaker.keep_alive_s)"
    assert limit in request.costs()
    # In the container its only group is called homogeneousCluster.
    assert request.job.resolved.config.cluster.gpu_group is None


def test_a_list_of_paths_is_refused_and_one_of_uris_is_not() -> None:
    for paths, refused in ((["s3://b/x", "here"], True), (["s3://b/x", "s3://b/y"], False)):
        job = open_job(
            load({"params": {"data": paths}}, [f"{k}={v}" for k, v in SAGEMAKER.items()])
        )
        found = sagemaker_rules.problems(request_of(job, "n", "us-east-1", "s3://my-bucket/p"))
        assert [line.partition(":")[0] for line in found] == ["params.data"] * refused


def test_written_request_and_source_are_what_is_submitted(tmp_path: Path) -> None:
    request = sagemaker.plan(make_job({}), offline=True)
    commands = request.write(tmp_path / "job.json")
    assert json.loads((tmp_path / "job.json").read_text()) == request.body
    assert (tmp_path / "job.json").stat().st_mode & 0o777 == 0o600, (
        "its environment may hold secrets"
    )
    assert (tmp_path / "job-code" / "train.py").is_file()
    token = tmp_path / "job-code" / ".ray-token"
    assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) == 64
    assert "create-training-job" in commands and request.code_uri in commands
    with pytest.raises(UsageError, match="exists"):
        request.write(tmp_path / "job.json")


def test_names_images_and_prices() -> None:
    assert job_name("my_job.v2", "20260101-000000-abcd") == "my-job-v2-20260101-000000-abcd"
    assert len(job_name("x" * 63, "20260101-000000-abcd")) == 63
    assert default_image("cn-north-1") is None
    assert {*prices.MACHINES} <= {*sagemaker_rules.instance_types()}
    for entry in prices.MACHINES.values():
        assert (entry.gpus > 0) == has_gpu(entry.type)
