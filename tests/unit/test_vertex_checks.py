"""Wrong Vertex AI jobs are refused before any upload, each in one line that holds its remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clouds import VERTEX, changes_of, full, job_of

from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.events import prices
from stoker_launcher.job import Job, open_job
from stoker_launcher.places import vertex
from stoker_launcher.places.vertex import custom_job, google_cloud
from stoker_launcher.places.vertex.custom_job import request_of

PREBUILT = "us-docker.pkg.dev/vertex-ai/training"
N1 = "gpu.machine_type=n1-standard-8"
NO_PAIR = "gpu.machine_type=null; cpu.machine_type=null"
KEY = "projects/p/locations/us-central1/keyRings/r/cryptoKeys/k"
BOARD = "projects/p/locations/us-central1/tensorboards/7"
ACCOUNT = "trainer@my-project.iam.gserviceaccount.com"


def pools(*kinds: str) -> str:
    listed = (f"{{name: {kind.split()[0]}, machine_type: {kind.split()[1]}}}" for kind in kinds)
    return f"{NO_PAIR}; pools=[{', '.join(listed)}]"


def make_job(changes: str, source_dir: Path | None = None) -> Job:
    return job_of(VERTEX | changes_of(changes, "vertex"), source_dir)


def problems_of(changes: str) -> list[str]:
    job = make_job(changes)
    settings = job.resolved.config.vertex
    return custom_job.problems(
        request_of(job, "flowers-1", settings.project or "", settings.gcs_uri or "gs://bucket")
    )


def refusal(changes: str, **options: Any) -> list[str]:
    with pytest.raises(UsageError) as caught:
        vertex.plan(make_job(changes, **options), offline=True)
    return [*caught.value.problems]


WRONG: list[tuple[str, str, str]] = [
    # pools
    (NO_PAIR, "gpu.machine_type", "name a machine type"),
    ("pools=[{name: x, machine_type: c2-standard-8}]", "pools", "keep one of the two forms"),
    (pools("gpu g2-standard-8", "gpu a2-highgpu-1g"), "pools", "differ in machine or GPUs"),
    # GPUs
    (f"{N1}; gpu.accelerator=NVIDIA_TESLA_T5", "gpu.accelerator", "did you mean NVIDIA_TESLA_"),
    # training
    (
        pools("a g2-standard-8", "b a2-highgpu-1g"),
        "cluster.gpu_group",
        "cannot tell which group trains",
    ),
    ("cluster.gpu_group=gpus", "cluster.gpu_group", "the job has gpu, cpu"),
    ("train.workers=3", "train.workers", "more than the 1 GPUs"),
    ("cluster.min_cpu_hosts=3", "cluster.min_cpu_hosts", "has 2 CPU hosts"),
    ("data.preprocess_on=[feeders]", "data.preprocess_on", "the job has gpu, cpu"),
    ("checkpoint.dir=ckpt", "checkpoint.dir", "leave it out"),
    # limits
    ("max_runtime_s=100", "cluster.join_timeout_s", "not below vertex.max_runtime_s"),
    # places and names
    ("project=null", "project", "set it"),
    ("gcs_uri=null", "gcs_uri", "gs://bucket/prefix"),
    ("gcs_uri=s3://my-bucket/x", "gcs_uri", "must be gs://bucket/prefix"),
    ("gcs_uri=gs://my-bucket/a b", "gcs_uri", "must be gs://bucket/prefix"),
    ("environment={AIP_MODEL_DIR: x}", "environment.AIP_MODEL_DIR", "remove it"),
    ("environment={CLUSTER_SPEC: x}", "environment.CLUSTER_SPEC", "remove it"),
    (
        "environment={HF_TOKEN: hf_abcdefghijklmnopqrstuvwxyz012345}",
        "environment.HF_TOKEN",
        "Secret Manager",
    ),
    ("prices={g2-standard-9: 1}", "prices.g2-standard-9", "did you mean g2-standard-"),
    ("params.data=/data/flowers", "params.data", "no such file or folder here"),
    # the image
    ("image=null", "image", "Python 3.11 to 3.13"),
]


@pytest.mark.parametrize(("changes", "key", "says"), WRONG)
def test_wrong_jobs_are_refused_in_one_line(changes: str, key: str, says: str) -> None:
    problems = problems_of(changes)
    (found,) = [problem for problem in problems if problem.startswith(f"{full(key, 'vertex')}: ")]
    assert says in found
    assert "\n" not in found
    assert len(problems) <= 2, problems


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        vertex.plan(open_job(load(None, ["name=flowers"])), offline=True)
    keys = {problem.partition(":")[0] for problem in caught.value.problems}
    assert keys == {"vertex.project", "vertex.gcs_uri", "vertex.image", "vertex.gpu.machine_type"}


def test_without_the_client_library_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    google_cloud._types.cache_clear()
    monkeypatch.setitem(sys.modules, "google.cloud.aiplatform_v1", None)
    assert refusal("") == [google_cloud.ABSENT]
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
        vertex.plan(make_job("project=null"))
    assert caught.value.problems == (google_cloud.NO_CREDENTIALS,)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        "",
        "gpu.replicas=4; spot=true",
        f"{N1}; gpu.accelerator=NVIDIA_TESLA_T4; gpu.count=2",
        "gpu.machine_type=a3-highgpu-8g; persistent_resource=mine",
        pools("cpu c2-standard-8", "gpu g2-standard-8"),
        "gpu.machine_type=null; cpu.machine_type=e2-standard-8",
        f"service_account={ACCOUNT}; tensorboard={BOARD}; kms_key={KEY}",
        "network=projects/123/global/networks/vpc; labels={team: vision}",
    ],
)
def test_the_clients_own_types_take_the_request_without_loss(changes: str) -> None:
    pytest.importorskip("google.cloud.aiplatform_v1", reason="the extra `vertex`")
    from google.cloud.aiplatform_v1.types import CustomJob
    from google.protobuf.json_format import MessageToDict

    request = vertex.plan(make_job(changes), offline=True)
    job = CustomJob.from_json(json.dumps(request.body))
    back = MessageToDict(CustomJob.pb(job))
    for sent, got in zip(
        request.body["jobSpec"]["workerPoolSpecs"], back["jobSpec"]["workerPoolSpecs"], strict=True
    ):
        assert got == {**sent, "replicaCount": str(sent["replicaCount"])}
    first = job.job_spec.worker_pool_specs[0]
    assert first.replica_count == 1, "Vertex AI's rule for the first pool"
    assert job.job_spec.base_output_directory.output_uri_prefix == request.base_uri


def test_the_dry_run_shows_the_request_pools_cost_and_uploads(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(b"x" * 1000)
    changes = f"gpu.replicas=2; params.data={tmp_path / 'images'}; max_runtime_s=3600"
    request = vertex.plan(make_job(changes), offline=True)
    shown = request.render()
    assert json.loads(shown[shown.index("{") : shown.index("\n}\n") + 2]) == request.body
    assert "gpu        2  g2-standard-8" in shown and "2×NVIDIA_L4  1.963" in shown
    assert "cpu        2  c2-standard-16" in shown
    assert (
        "at most $3.88 in 1 h (vertex.max_runtime_s); estimated, prices of 2025 (us-central1"
        in shown
    )
    (item,) = request.data
    assert item.uri.startswith("gs://my-bucket/stoker/data/")
    assert request.data_at == {"data": "/gcs/my-bucket/stoker/data/" + item.uri.split("/")[-2]}
    assert any(line.startswith("no service account") for line in request.warnings)


def test_the_shell_of_a_host_takes_the_bucket_s_folder_as_one_word() -> None:
    request = vertex.plan(make_job("gcs_uri=gs://my-bucket/a&b;c$(d)"), offline=True)
    *bash, line = request.body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["command"]
    fake = "rm() { :; }; python() { echo $4; exit; }; "
    done = subprocess.run(["bash", bash[-1], fake + line], capture_output=True, text=True)
    assert done.stdout == f"/gcs/my-bucket/a&b;c$(d)/{request.name}/code.tar.gz\n", done.stderr


def test_prices_of_attached_gpus_and_your_own() -> None:
    gpu = f"{N1}; gpu.accelerator=NVIDIA_TESLA_T4"
    assert "1×NVIDIA_TESLA_T4  0.840" in vertex.plan(make_job(gpu), offline=True).render()
    unknown = gpu.replace("T4", "P4")
    shown = vertex.plan(make_job(unknown), offline=True).render()
    assert "n1-standard-8, whose price is not known" in shown
    own = f"{unknown}; prices={{gpu: 2, c2-standard-16: 1}}"
    assert "at most $96.00 in 24 h" in vertex.plan(make_job(own), offline=True).render()
    assert prices.GOOGLE_MACHINES["n1-standard-4"].price_per_hour_usd == 0.2185, (
        "as Vertex AI lists it"
    )


def test_the_written_request_comes_with_the_commands_that_submit_it(tmp_path: Path) -> None:
    commands = vertex.plan(make_job(f"kms_key={KEY}"), offline=True).write(tmp_path / "job.json")
    assert json.loads((tmp_path / "job.json").read_text())["workerPoolSpecs"]
    assert (tmp_path / "job-code" / ".ray-token").stat().st_mode & 0o777 == 0o600
    upload, create = commands.splitlines()
    assert upload.startswith(
        f"gcloud storage cp {tmp_path}/job-code.tar.gz gs://my-bucket/stoker/flowers-"
    )
    assert create.startswith(
        "gcloud ai custom-jobs create --project=my-project --region=us-central1"
    )
    assert f"--config={tmp_path}/job.json" in create and f"--kms-key={KEY}" in create
    with pytest.raises(UsageError, match="exists; remove it"):
        vertex.plan(make_job(""), offline=True).write(tmp_path / "job.json")
