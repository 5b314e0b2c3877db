"""Wrong SageMaker jobs are refused before any upload, each in one line that holds its remedy."""

# One row of the table on one line reads better than five.
# ruff: noqa: E501

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

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

ECR = "763104351884.dkr.ecr.us-east-1.amazonaws.com"
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


def refusal(changes: dict[str, str], **options: Any) -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        sagemaker.plan(make_job(changes), offline=True, **options)
    return caught.value.problems


def test_the_first_refusal_names_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Region, host type and role, and also the credentials, and what to set to do without."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UsageError) as caught:
        sagemaker.plan(open_job(load(None, ["name=flowers"])))
    keys = [problem.partition(":")[0] for problem in caught.value.problems]
    assert {"sagemaker.region", "sagemaker.gpu.type", "sagemaker.role", "AWS"} <= {*keys}
    (aws,) = [
        problem for problem in caught.value.problems if problem.startswith("AWS: no credentials")
    ]
    assert "--offline needs none, but sagemaker.s3_uri" in aws


WRONG: list[tuple[str, str, str]] = [
    # hosts and groups
    (f"{NO_PAIR}", "gpu.type", "name an instance type"),
    ("gpu.type=ml.g5.3xlarge", "gpu.type", "did you mean ml.g5."),
    ("groups=[{name: x, type: ml.c5.xlarge}]", "groups", "keep one"),
    (f"{NO_PAIR}; groups={many('{name: gN, type: ml.c5.xlarge}', 6)}", "groups", "at most 5"),
    (f"{NO_PAIR}; groups=[{{name: {'a' * 65}, type: ml.g5.xlarge}}, {{name: b, type: ml.c5.xlarge}}]", "groups.0.name", "at most 64 characters"),
    (f"{NO_PAIR}; groups=[{{name: '', type: ml.g5.xlarge}}, {{name: b, type: ml.c5.xlarge}}]", "groups.0.name", "must not be empty"),
    (f"{NO_PAIR}; groups=[{{name: a, type: ml.c5.xlarge}}, {{name: b, type: ml.c5.xlarge}}]", "cluster.gpu_group", "name one of a, b"),
    ("cluster.gpu_group=trainers", "cluster.gpu_group", "the job has gpu, cpu"),
    ("cluster.min_cpu_hosts=3", "cluster.min_cpu_hosts", "raise sagemaker.cpu.count"),
    ("data.preprocess_on=[data_group]", "data.preprocess_on", "no such group"),
    ("train.workers=2", "train.workers", "one train worker per GPU"),
    ("checkpoint.dir=ckpt", "checkpoint.dir", "leave it out"),
    # times
    ("cpu.type=null; keep_alive_s=30000", "keep_alive_s", "at most 21,600"),
    ("max_retries=0", "max_retries", "at least 1"),
    ("max_retries=31", "max_retries", "at most 30"),
    ("request={RetryStrategy: {MaximumRetryAttempts: 3}}", "request.RetryStrategy", "sagemaker.max_retries"),
    ("max_runtime_s=300", "cluster.join_timeout_s", "not below sagemaker.max_runtime_s"),
    # disks, keys, network
    ("kms_key=my key", "kms_key", "key id"),
    ("subnets=[subnet-1]", "security_groups", "together"),
    ("security_groups=[sg-1]", "subnets", "together"),
    ("subnets=[subnet-a b]; security_groups=[sg-1]", "subnets", "has a form that SageMaker rejects"),
    ("subnets=[subnet-1]; security_groups=[sg-1, sg-2, sg-3, sg-4, sg-5, sg-6]", "security_groups", "at most 5"),
    ("network_isolation=true; params.data=s3://b/train", "params.data", "sagemaker.channels.data.uri"),
    ("network_isolation=true; entry=script-mode", "entry", "downloads the code from S3"),
    # what has no key of its own
    ("request={ResourceConfig: {TrainingPlan: x}}", "request.ResourceConfig.TrainingPlan", "did you mean TrainingPlanArn"),
    ("request={ResourceConfig: {TrainingPlanArn: mine}}", "request.ResourceConfig.TrainingPlanArn", "at least 50"),
    ("request={StoppingCondition: {MaxPendingTimeInSeconds: 60}}", "request.StoppingCondition.MaxPendingTimeInSeconds", "at least 1,800"),
    ("request={StoppingCondition: {MaxPendingTimeInSeconds: soon}}", "request.StoppingCondition.MaxPendingTimeInSeconds", "integer"),
    ("request={StoppingCondition: {MaxRuntimeInSeconds: 60}}", "request.StoppingCondition.MaxRuntimeInSeconds", "sagemaker.max_runtime_s"),
    ("request={StoppingCondition: 60}", "request.StoppingCondition", "remove"),
    ("request={Environment: {HF_TOKEN: x}}", "request.Environment", "sagemaker.environment"),
    ("request={OutputDataConfig: {KmsKeyId: x}}", "request.OutputDataConfig.KmsKeyId", "sagemaker.kms_key"),
    ("request={RoleArn: x}", "request.RoleArn", "sagemaker.role"),
    ("request={InputDataConfig: [{ChannelName: a}]}", "request.InputDataConfig", "is required"),
    # channels and parameters
    ("channels={code: {uri: 's3://b/x'}}", "channels.code", "carries the source"),
    ("channels={'my data': {uri: 's3://b/x'}}; params={my data: x}", "channels.my data", "letters, digits"),
    ("channels={data: {uri: /data/train}}", "channels.data.uri", "s3://"),
    ("channels={data: {uri: 'https://b.s3.amazonaws.com/x'}}", "channels.data.uri", "s3://"),
    (f"channels={many('cN: {uri: s3://b/N}', 20)}; params={many('cN: x', 20)}", "channels", "at most 20"),
    ("params.data=./no/such/folder", "params.data", "no such file or folder here"),
    ("params.data=/etc/host*", "params.data", "no such file or folder here"),
    ("params.data=/opt/ml/input/data/train", "params.data", "add sagemaker.channels.train"),
    ("tracking.mlflow.uri=sqlite:///x.db", "tracking.mlflow.uri", "name a server"),
    ("tracking.mlflow.uri=arn:aws:sagemaker:us-east-1:123456789012:model/x", "tracking.mlflow.uri", "tracking server"),
    ("request={MlflowConfig: {MlflowRunName: x}}", "request.MlflowConfig.MlflowRunName", "tracking.mlflow.run_name"),
    # what everyone may read
    ("environment={HF_TOKEN: abc}", "environment.HF_TOKEN", "Secrets Manager"),
    ("environment={ID: AKIAABCDEFGHIJKLMNOP}", "environment.ID", "secret"),
    ("environment={PIP_INDEX_URL: 'https://me:secret@host/packages'}", "environment.PIP_INDEX_URL", "secret"),
    ("environment={RAY_AUTH_MODE: disabled}", "environment.RAY_AUTH_MODE", "remove"),
    ("environment={MY-NAME: x}", "environment.MY-NAME", "letters, digits"),
    (f"environment={{LONG: {'x' * 513}}}", "environment.LONG", "at most 512"),
    ("hyperparameters={wandb_api_key: x}", "hyperparameters.wandb_api_key", "secret"),
    ("hyperparameters={train.epoch: 3}", "train.epoch", "did you mean epochs"),
    ("hyperparameters={train.epochs: 0}", "train.epochs", "greater than"),
    ("hyperparameters={sagemaker_program: x.py}", "hyperparameters.sagemaker_program", "remove"),
    ('hyperparameters={params.title: "it\'s"}', "hyperparameters.params.title", "single quote"),
    (f"hyperparameters={{params.words: {'x' * 2501}}}", "hyperparameters.params.words", "at most 2,500"),
    (f"hyperparameters={many('params.pN: 1', 100)}", "hyperparameters", "at most 100"),
    ("tags={team: 'a;b'}", "tags.team", "letters, digits"),
    (f"tags={many('tN: x', 50)}", "tags", "at most 50"),
    ("hyperparameters={train.epochs: 3, train__epochs: 4}", "hyperparameters.train__epochs", "set twice"),
    # names and images
    ("role=null", "role", "docs/iam/job-role.json"),
    ("role=StokerJob", "role", "arn:aws:iam"),
    ("region=us-east-9", "region", "no such region"),
    ("region=null", "region", "not set"),
    ("s3_uri=null", "s3_uri", "needed with --offline"),
    ("s3_uri=my-bucket/x", "s3_uri", "s3://bucket/prefix"),
    ("region=us-gov-west-1", "image", "name one"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "key", "remedy"), WRONG, ids=[f"{k}-{r}" for _, k, r in WRONG])
@pytest.mark.long
def test_wrong_request_is_refused_in_one_line(changes: str, key: str, remedy: str) -> None:
    problems = refusal(changes_of(changes, "sagemaker"))
    matching = [line for line in problems if full(key, "sagemaker") in line and remedy in line]
    assert matching, problems
    assert all("\n" not in line and len(line) < 260 for line in problems), problems
    assert len(problems) <= 2, f"one mistake, many complaints: {problems}"


SERVER = "arn:aws:sagemaker:us-east-1:123456789012:mlflow-tracking-server/team"


def test_right_request_field_by_field() -> None:
    job = make_job(
        {
            "sagemaker.spot": "true",
            "sagemaker.subnets": "[subnet-1]",
            "sagemaker.security_groups": "[sg-1]",
            "sagemaker.encrypt_traffic": "true",
            "sagemaker.kms_key": "alias/mine",
            "sagemaker.max_retries": "3",
            "sagemaker.hyperparameters": "{train.lr: 0.1, train.epochs: 3}",
            "sagemaker.channels": "{train: {uri: 's3://b/train/', groups: [gpu], input_mode: FastFile}}",
            "params.train": "anything",
            "tracking.mlflow.uri": SERVER,
            "cluster.dashboard": "true",
        }
    )
    request = sagemaker.plan(job, offline=True)
    body = request.body
    assert body["RemoteDebugConfig"] == {"EnableRemoteDebug": True}
    assert body["MlflowConfig"] == {
        "MlflowResourceArn": SERVER,
        "MlflowExperimentName": "flowers",
    }
    assert body["TrainingJobName"] == request.name
    assert body["HyperParameters"] == {
        "config": "job.yaml",
        "train__lr": "0.1",
        "train__epochs": "3",
    }
    assert body["AlgorithmSpecification"]["ContainerEntrypoint"][-1].endswith(
        "exec python train.py --config job.yaml"
    )
    code, train = body["InputDataConfig"]
    assert code["ChannelName"] == "code"
    assert code["DataSource"]["S3DataSource"]["InstanceGroupNames"] == ["gpu", "cpu"]
    assert train["DataSource"]["S3DataSource"]["InstanceGroupNames"] == ["gpu"]
    assert train["InputMode"] == "FastFile"
    assert body["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 86_400,
        "MaxWaitTimeInSeconds": 172_800,
    }
    assert body["EnableManagedSpotTraining"] and body["EnableInterContainerTrafficEncryption"]
    assert body["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert body["OutputDataConfig"] == {
        "S3OutputPath": "s3://my-bucket/stoker",
        "KmsKeyId": "alias/mine",
    }
    assert body["RetryStrategy"] == {"MaximumRetryAttempts": 3}
    assert request.data_at == {"train": "/opt/ml/input/data/train"}
    assert request.job.resolved.config.cluster.gpu_group == "gpu"
    assert "token" not in str(request.body).lower()


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
    job = job_of(SAGEMAKER | {"script": str(tmp_path / "train.py")} | params)
    request = sagemaker.plan(job, offline=True)
    uris = {
        one["ChannelName"]: one["DataSource"]["S3DataSource"]["S3Uri"]
        for one in request.body["InputDataConfig"]
    }
    assert [*uris] == ["code", "own", "training"] and uris["training"] == given["training"]
    assert request.data_at == {name: f"/opt/ml/input/data/{name}" for name in ("training", "own")}
    request.job.stage(tmp_path / "staged", request.data_at)
    staged = load(tmp_path / "staged/job.yaml").config.params
    assert staged == given | request.data_at
    gpu = {name: VERTEX[name] for name in VERTEX}
    request = vertex.plan(
        job_of(
            gpu | {"script": str(tmp_path / "train.py")} | params | {"params.fsx": "/gcs/bucket/x"}
        ),
        offline=True,
    )
    assert request.data_at["far"] == "/gcs/bucket/train" and "training" not in request.data_at


def test_what_has_no_key_is_added_to_the_request_and_checked_like_the_rest() -> None:
    """A training plan, a limit on waiting, a file system and an image of a private registry."""
    plan = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/mine-0123456789"
    lustre = {
        "FileSystemId": "fs-0123456789abcdef0",
        "FileSystemType": "FSxLustre",
        "FileSystemAccessMode": "ro",
        "DirectoryPath": "/mount/flowers",
    }
    more = {
        "ResourceConfig": {"TrainingPlanArn": plan},
        "StoppingCondition": {"MaxPendingTimeInSeconds": 7200},
        "InputDataConfig": [{"ChannelName": "fsx", "DataSource": {"FileSystemDataSource": lustre}}],
        "AlgorithmSpecification": {"TrainingImageConfig": {"TrainingRepositoryAccessMode": "Vpc"}},
    }
    changes = {
        "sagemaker.request": json.dumps(more),
        "sagemaker.image": "registry.example.com/me/train:1",
        "params.data": "/opt/ml/input/data/fsx",
    }
    plain = sagemaker.plan(make_job({}), offline=True).body
    body = sagemaker.plan(make_job(changes), offline=True).body
    assert body["ResourceConfig"] == plain["ResourceConfig"] | more["ResourceConfig"]
    assert body["StoppingCondition"] == plain["StoppingCondition"] | more["StoppingCondition"]
    assert [channel["ChannelName"] for channel in body["InputDataConfig"]] == ["code", "fsx"]
    assert body["InputDataConfig"][1] == more["InputDataConfig"][0]
    assert body["AlgorithmSpecification"]["TrainingImageConfig"] == {
        "TrainingRepositoryAccessMode": "Vpc"
    }
    assert body["AlgorithmSpecification"]["TrainingImage"] == "registry.example.com/me/train:1"


def test_data_under_another_key_are_uploaded_again(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()

    def place(**keys: str) -> str:
        changes = {
            "params.data": str(tmp_path),
            **{f"sagemaker.{key}": value for key, value in keys.items()},
        }
        return sagemaker.plan(make_job(changes), offline=True).data[0].uri

    places = [place(), place(kms_key="alias/a"), place(kms_key="alias/b")]
    assert len({*places}) == 3 and places[1] == place(kms_key="alias/a")


def test_one_group_is_a_homogeneous_job() -> None:
    request = sagemaker.plan(
        make_job(
            {
                "sagemaker.cpu.type": "null",
                "sagemaker.keep_alive_s": "600",
                "sagemaker.channels": "{data: {uri: 's3://b/x', groups: [gpu]}}",
                "cluster.gpu_group": "gpu",
            }
        ),
        offline=True,
    )
    resources = request.body["ResourceConfig"]
    assert (resources["InstanceType"], resources["InstanceCount"]) == ("ml.g5.2xlarge", 1)
    assert "InstanceGroups" not in resources
    assert resources["KeepAlivePeriodInSeconds"] == 600
    limit = "at most $36.61 in 24.1667 h (sagemaker.max_runtime_s + sagemaker.keep_alive_s)"
    assert limit in request.costs(), "a warm instance that idles is billed"
    assert "InstanceGroupNames" not in json.dumps(request.body), "a single group has no name"
    # In the container its only group is called homogeneousCluster.
    assert request.job.resolved.config.cluster.gpu_group is None


def test_cpu_hosts_alone_may_train() -> None:
    request = sagemaker.plan(make_job({"sagemaker.gpu.type": "null"}), offline=True)
    assert request.body["ResourceConfig"]["InstanceType"] == "ml.c5.4xlarge"


def test_script_mode_form() -> None:
    request = sagemaker.plan(make_job({"sagemaker.entry": "script-mode"}), offline=True)
    parameters = request.body["HyperParameters"]
    assert parameters["config"] == "job.yaml"
    assert parameters["sagemaker_program"] == "train.py"
    assert parameters["sagemaker_submit_directory"].endswith("/code/sourcedir.tar.gz")
    assert "ContainerEntrypoint" not in request.body["AlgorithmSpecification"]
    assert "InputDataConfig" not in request.body


def test_local_data_becomes_a_channel_with_its_size(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "0.tar").write_bytes(b"x" * 1500)
    single = tmp_path / "rows.parquet"
    single.write_bytes(b"y" * 10)
    request = sagemaker.plan(
        make_job({"script": __file__, "params.data": str(folder), "params.rows": str(single)}),
        offline=True,
    )
    assert request.data_at == {
        "data": "/opt/ml/input/data/data",
        "rows": "/opt/ml/input/data/rows/rows.parquet",
    }
    assert "1.5 kB" in request.render()
    again = sagemaker.plan(make_job({"params.data": str(folder)}), offline=True)
    assert again.data[0].uri == request.data[0].uri, "unchanged data keeps its address"
    (folder / "a" / "0.tar").write_bytes(b"x" * 1501)
    changed = sagemaker.plan(make_job({"params.data": str(folder)}), offline=True)
    assert changed.data[0].uri != request.data[0].uri


def test_data_that_is_already_in_s3_is_left_alone() -> None:
    request = sagemaker.plan(make_job({"params.data": "s3://b/train"}), offline=True)
    assert request.data == () and request.data_at == {}


def test_a_list_of_paths_is_refused_and_one_of_uris_is_not() -> None:
    for paths, refused in ((["s3://b/x", "here"], True), (["s3://b/x", "s3://b/y"], False)):
        job = open_job(
            load({"params": {"data": paths}}, [f"{k}={v}" for k, v in SAGEMAKER.items()])
        )
        found = sagemaker_rules.problems(request_of(job, "n", "us-east-1", "s3://my-bucket/p"))
        assert [line.partition(":")[0] for line in found] == ["params.data"] * refused


def test_empty_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert any(
        "holds no files" in line for line in refusal({"params.data": str(tmp_path / "empty")})
    )


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


def test_no_request_holds_more_than_the_model_allows() -> None:
    """Each limit of the facts, broken in the finished request itself."""
    good = request_of(make_job({}), "flowers-1", "us-east-1", "s3://my-bucket/x")
    assert sagemaker_rules.problems(good) == []
    breaks: list[tuple[str, Any]] = [
        ("TrainingJobName", "a_b"),
        ("TrainingJobName", "x" * 64),
        ("TrainingJobName", "-x"),
        ("AlgorithmSpecification.TrainingImage", "x" * 256),
        ("AlgorithmSpecification.ContainerEntrypoint", ["x" * 257]),
        ("AlgorithmSpecification.ContainerEntrypoint", ["x"] * 101),
        ("AlgorithmSpecification.MetricDefinitions", [{"Name": "a", "Regex": "b"}] * 41),
        ("HyperParameters", {"k" * 257: "v"}),
        ("OutputDataConfig.S3OutputPath", "file:///x"),
        ("CheckpointConfig.S3Uri", "s3://b/" + "x" * 1024),
        ("Environment", {"A": "x" * 513}),
        ("Tags", [{"Key": "x" * 129, "Value": ""}]),
    ]
    for path, value in breaks:
        body = copy.deepcopy(good.body)
        *sections, last = path.split(".")
        place = body
        for section in sections:
            place = place[section]
        place[last] = value
        found = list(sagemaker_rules.limit_problems(body, good.keys))
        assert len(found) == 1, (path, found)


def test_names_and_images() -> None:
    assert job_name("my_job.v2", "20260101-000000-abcd") == "my-job-v2-20260101-000000-abcd"
    assert len(job_name("x" * 63, "20260101-000000-abcd")) == 63
    assert job_name("a" + "." * 5, "s") == "a-s"
    image = default_image("eu-west-1")
    assert image and image.startswith("763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch:")
    assert default_image("cn-north-1") is None


def test_prices_name_only_types_that_exist() -> None:
    known = set(sagemaker_rules.instance_types())
    assert set(prices.MACHINES) <= known
    for entry in prices.MACHINES.values():
        assert (entry.gpus > 0) == has_gpu(entry.type)
