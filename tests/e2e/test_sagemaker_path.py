"""Laptop → S3 → hosts → model: what is uploaded is the staged source, and it trains on emulated hosts."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import pytest

from stoker.config.loading import load
from stoker_launcher.job import Job, Project, open_job
from stoker_launcher.places import rehearsal, sagemaker
from stoker_launcher.places.sagemaker import aws
from stoker_launcher.places.sagemaker.aws import split_uri
from stoker_launcher.rehearsal import sagemaker_hosts
from stoker_launcher.rehearsal.running import RehearsalRun
from tests.command_line import type_command
from tests.fakes.aws import REGION, ROLE, moto_server
from tests.fakes.sagemaker_sdk import V2, in_sdk
from tests.summaries import EVERYWHERE, fields

pytestmark = pytest.mark.timeout(1200)

BUCKET = "stoker-path"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "console.md"
PYTHON = re.compile(r"```python\n(.*?)```", re.S)


class Downloaded(Job):
    """A job whose staged source is what lies in S3, not what lies here."""

    source: Path

    def stage(self, folder: Path, data_at: dict[str, str] | None = None) -> None:
        shutil.copytree(self.source, folder)
        (folder / ".ray-token").unlink()  # the rehearsal gives each of its clusters one


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with moto_server() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        aws.client.cache_clear()
        s3.cache_clear()
        s3().create_bucket(Bucket=BUCKET)
        yield variables
        aws.client.cache_clear()


@cache
def s3() -> Any:
    return boto3.session.Session().client("s3", region_name=REGION)


def overrides(digits: Path) -> list[str]:
    return [
        "name=digits",
        "recipe=recipes.digits:Digits",
        f"params.data={digits / 'webdataset'}",
        "train.epochs=1",
        "train.lr=0.05",
        "data.order=exact",  # the accuracy differs more otherwise
        "cluster.object_store_mb=128",
        f"sagemaker.region={REGION}",
        f"sagemaker.role={ROLE}",
        f"sagemaker.s3_uri=s3://{BUCKET}/stoker",
        "sagemaker.gpu.type=ml.g5.2xlarge",
        "sagemaker.cpu.type=ml.c5.4xlarge",
    ]


def download(uri: str, folder: Path) -> Path:
    bucket, prefix = split_uri(uri.rstrip("/") + "/")
    for page in s3().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page["Contents"]:
            target = folder / entry["Key"].removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            s3().download_file(bucket, entry["Key"], str(target))
    return folder


def channels(described: dict[str, Any], folder: Path) -> dict[str, Path]:
    return {
        channel["ChannelName"]: download(
            channel["DataSource"]["S3DataSource"]["S3Uri"], folder / channel["ChannelName"]
        )
        for channel in described.get("InputDataConfig", [])
    }


def rehearse(
    source: Path,
    data: dict[str, Path],
    output: Path,
    entry: str,
    groups: tuple[str, str] = ("gpu", "cpu"),
) -> tuple[RehearsalRun, dict[str, Any]]:
    sizes = f"{groups[0]}=1:ml.g5.xlarge,{groups[1]}=1:ml.c5.xlarge"
    hosts = [f"rehearsal.hosts={sizes}", f"rehearsal.entry={entry}", "rehearsal.shm_mb=200"]
    settings = [f"output_dir={output}", "name=digits", "cluster.object_store_mb=128"]
    settings += [f"data.preprocess_on=[{groups[1]}]"]
    settings += [
        "sagemaker.environment={RAY_worker_niceness: '0'}"
    ]  # beside what else computes here
    resolved = load(None, [*hosts, *settings, "rehearsal.timeout_s=900"])
    job = Downloaded(
        resolved, Project(resolved.config), {name: str(path) for name, path in data.items()}
    )
    object.__setattr__(job, "source", source)
    run = rehearsal.submit(rehearsal.plan(job), show=False)
    code = run.wait()
    logs = "".join(
        path.read_text()[-3000:] for path in sorted((run.run_dir / "logs").glob("*.log"))
    )
    assert code == 0, logs
    (summary,) = run.run_dir.rglob("summary.json")
    return run, dict(json.loads(summary.read_text()))


def check(
    run: RehearsalRun, summary: dict[str, Any], named: tuple[str, str] = ("gpu", "cpu")
) -> None:
    """Every record, preprocessed on the CPU host, trained on the GPU host; every host left by itself."""
    assert summary["status"] == "succeeded" and summary["place"] == "rehearsal"
    assert fields(summary) == EVERYWHERE
    groups = {host["host"]: host["group"] for host in summary["cluster"]["hosts"]}
    assert groups == {"algo-1": named[0], "algo-2": named[1]}
    types = {host["host"]: host["type"] for host in summary["cluster"]["hosts"]}
    assert types == {"algo-1": "ml.g5.xlarge", "algo-2": "ml.c5.xlarge"}
    assert summary["cost"]["usd_per_hour"] == 1.612
    assert summary["metrics"]["best"]["val/acc1"] > 0.1
    assert summary["records"]["read"] == summary["records"]["trained"] == 1437
    assert set(summary["chain_tasks_by_host"]) == {"algo-2"}
    assert summary["train_workers_by_host"] == {"algo-1": 1}, "the training only on the GPU host"
    assert [host["exit_code"] for host in run.report()["hosts"]] == [0, 0]
    assert list(run.run_dir.rglob("model.safetensors"))
    assert "epoch 1/1 done" in (run.run_dir / "logs" / "algo-1.log").read_text()


def test_what_is_uploaded_is_the_staged_source_and_the_data_as_files_and_in_an_archive(
    environment: dict[str, str], digits: Path, tmp_path: Path
) -> None:
    """That hosts train with such source: tests/rehearsal/test_digits.py, and from S3 the soak test below."""
    sagemaker.plan(open_job(load(None, overrides(digits)))).write(tmp_path / "planned.json")
    code, data = uploaded(digits, tmp_path)
    assert files(code) == files(tmp_path / "planned-code") and "train.py" in files(code)
    archive, again = archived(digits, tmp_path)
    assert files(archive).keys() == files(code).keys()
    for found in (data, again):
        assert {name: files(folder) for name, folder in found.items()} == {
            "data": files(digits / "webdataset")
        }


def uploaded(digits: Path, folder: Path) -> tuple[Path, dict[str, Path]]:
    job = open_job(load(None, overrides(digits)))
    described = sagemaker.submit(sagemaker.plan(job), lambda _: None).describe()
    found = channels(described, folder / "in")
    return found.pop("code"), found


def archived(digits: Path, folder: Path) -> tuple[Path, dict[str, Path]]:
    job = open_job(load(None, [*overrides(digits), "sagemaker.entry=script-mode"]))
    described = sagemaker.submit(sagemaker.plan(job), lambda _: None).describe()
    bucket, key = split_uri(described["HyperParameters"]["sagemaker_submit_directory"])
    body = s3().get_object(Bucket=bucket, Key=key)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(body), mode="r:gz") as tar:
        assert tar.getmember(".ray-token").mode & 0o777 == 0o600
        tar.extractall(folder / "code", filter="data")
    return folder / "code", channels(described, folder / "script-mode")


def files(folder: Path) -> dict[str, bytes]:
    """Contents by name, without the token that each upload gets."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != ".ray-token"}


@pytest.mark.soak
@pytest.mark.parametrize(("upload", "entry"), [(uploaded, "container"), (archived, "toolkit")])
def test_what_is_uploaded_trains(
    environment: dict[str, str], digits: Path, tmp_path: Path, upload: Any, entry: str
) -> None:
    check(*rehearse(*upload(digits, tmp_path), tmp_path / "out", entry))


ESTIMATE = """
import json, sys
role, image = sys.argv[1:3]
{example}
print(json.dumps("started"))
"""


def names_of_jobs(client: Any) -> set[str]:
    return {job["TrainingJobName"] for job in client.list_training_jobs()["TrainingJobSummaries"]}


@pytest.mark.long
def test_the_estimator_of_the_page_trains_under_the_toolkit_in_groups_of_other_names(
    environment: dict[str, str],
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [one for one in overrides(digits) if not one.startswith("sagemaker.")]
    settings += ["data.preprocess_on=[feeders]"]
    Path("job.yaml").write_text("name: digits\nrecipe: recipes.digits:Digits\n")
    words = ["job.yaml", *settings[2:], "--on", "sagemaker", "--source", "build/source"]
    code, lines, shown = type_command(words, capsys)
    assert code == 0, lines
    assert "channel data: " in shown
    s3().create_bucket(Bucket="my-bucket")
    for name, content in files(digits / "webdataset").items():
        s3().put_object(Bucket="my-bucket", Key=f"flowers/{name}", Body=content)
    image = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.6"
    (example,) = (one for one in PYTHON.findall(PAGE.read_text()) if "PyTorch(" in one)
    client = boto3.client("sagemaker", region_name=REGION)
    before = names_of_jobs(client)  # of other tests, with the same server
    in_sdk(V2, ESTIMATE.replace("{example}", example), environment, ROLE, image)

    (name,) = names_of_jobs(client) - before
    described = client.describe_training_job(TrainingJobName=name)
    assert described["CheckpointConfig"]["S3Uri"].endswith("/flowers-1/checkpoints")
    assert "DebugHookConfig" not in described
    given = described["HyperParameters"]
    bucket, key = split_uri(json.loads(given["sagemaker_submit_directory"]))
    body = s3().get_object(Bucket=bucket, Key=key)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(body), mode="r:gz") as tar:
        tar.extractall(tmp_path / "code", filter="data")
    assert files(tmp_path / "code") == files(Path("build/source"))
    source = (Path("build/source") / ".ray-token").read_bytes()
    assert (tmp_path / "code" / ".ray-token").read_bytes() == source and len(source) == 64

    def as_sent(job: Job, entry: str) -> dict[str, str]:
        ours = rehearsed(job, entry)
        return given | {"sagemaker_submit_directory": ours["sagemaker_submit_directory"]}

    rehearsed = sagemaker_hosts.hyperparameters
    monkeypatch.setattr(sagemaker_hosts, "hyperparameters", as_sent)
    groups = ("trainers", "feeders")
    data = channels(described, tmp_path / "in")
    check(*rehearse(tmp_path / "code", data, tmp_path / "out", "toolkit", groups), groups)
