"""Jobs of SageMaker and Vertex AI before anything is uploaded: data, costs, credentials.

Whole requests stand in `requests/`, and wrong jobs in `test_refused_commands.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from clouds import SAGEMAKER, VERTEX, job_of

from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.events import prices
from stoker.hosts.topology import has_gpu
from stoker_launcher.places import sagemaker, vertex
from stoker_launcher.places.remote import job_name
from stoker_launcher.places.sagemaker.sagemaker_rules import shapes
from stoker_launcher.places.sagemaker.training_job import default_image, request_of
from stoker_launcher.places.vertex import google_cloud


def test_a_channel_sets_the_parameter_of_its_name_unless_it_is_in_place() -> None:
    def data_at(**keys: str) -> dict[str, str]:
        channels = {"sagemaker.channels": "{data: {uri: 's3://b/x'}}"}
        return request_of(job_of(keys | channels), "n", "us-east-1", "s3://bucket/p").data_at

    mounted = {"data": "/opt/ml/input/data/data"}
    assert data_at(name="a") == data_at(**{"params.data": "here"}) == mounted
    assert data_at(script=__file__) == data_at(recipe="absent:Mine") == {}
    assert data_at(**{"params.data": "/opt/ml/input/data/data/x"}) == {}


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
        job = job_of(SAGEMAKER | changes | {"params.data": str(data)})
        return sagemaker.plan(job, offline=True).data[0].uri

    places = [place(), place(kms_key="alias/a"), place(kms_key="alias/b")]
    assert places[:2] == [place(), place(kms_key="alias/a")]
    (data / "a.tar").write_bytes(b"xy")
    assert len({*places, place()}) == 4


N1 = {"vertex.gpu.machine_type": "n1-standard-8", "vertex.gpu.accelerator": "NVIDIA_TESLA_T4"}
P4 = N1 | {"vertex.gpu.accelerator": "NVIDIA_TESLA_P4"}
COSTS: list[tuple[dict[str, str], str]] = [
    (
        SAGEMAKER | {"sagemaker.cpu.type": "null", "sagemaker.keep_alive_s": "600"},
        "at most $36.61 in 24.1667 h (sagemaker.max_runtime_s + sagemaker.keep_alive_s)",
    ),
    (
        VERTEX | {"vertex.gpu.replicas": "2", "vertex.max_runtime_s": "3600"},
        "at most $3.88 in 1 h (vertex.max_runtime_s); estimated, prices of 2025 (us-central1",
    ),
    (VERTEX | N1, "1×NVIDIA_TESLA_T4  0.840"),
    (VERTEX | P4, "n1-standard-8, whose price is not known"),
    (VERTEX | P4 | {"vertex.prices": "{gpu: 2, c2-standard-16: 1}"}, "at most $96.00 in 24 h"),
]


@pytest.mark.parametrize(("keys", "shown"), COSTS)
def test_a_plan_shows_what_the_job_costs_at_most(keys: dict[str, str], shown: str) -> None:
    place = vertex if "vertex.project" in keys else sagemaker
    assert shown in place.plan(job_of(keys), offline=True).render()


def test_without_the_client_library_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    google_cloud._types.cache_clear()
    monkeypatch.setitem(sys.modules, "google.cloud.aiplatform_v1", None)
    with pytest.raises(UsageError) as caught:
        vertex.plan(job_of(VERTEX), offline=True)
    assert caught.value.problems == (google_cloud.ABSENT,)
    google_cloud._types.cache_clear()


def test_without_credentials_one_line_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    google_cloud.credentials.cache_clear()
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(UsageError) as caught:
        vertex.plan(job_of(VERTEX | {"vertex.project": "null"}))
    assert caught.value.problems == (google_cloud.NO_CREDENTIALS,)


def test_the_shell_of_a_host_takes_the_bucket_s_folder_as_one_word() -> None:
    request = vertex.plan(
        job_of(VERTEX | {"vertex.gcs_uri": "gs://my-bucket/a&b;c$(d)"}), offline=True
    )
    *bash, line = request.body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["command"]
    fake = "rm() { :; }; python() { echo $4; exit; }; "
    done = subprocess.run(["bash", bash[-1], fake + line], capture_output=True, text=True)
    assert done.stdout == f"/gcs/my-bucket/a&b;c$(d)/{request.name}/code.tar.gz\n", done.stderr


def test_names_images_and_prices() -> None:
    assert job_name("my_job.v2", "20260101-000000-abcd") == "my-job-v2-20260101-000000-abcd"
    assert len(job_name("x" * 63, "20260101-000000-abcd")) == 63
    assert default_image("cn-north-1") is None
    assert {*prices.MACHINES} <= {*shapes()["TrainingInstanceType"]["enum"]}
    for entry in prices.MACHINES.values():
        assert (entry.gpus > 0) == has_gpu(entry.type)
    assert prices.GOOGLE_MACHINES["n1-standard-4"].price_per_hour_usd == 0.2185
