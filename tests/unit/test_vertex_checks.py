"""Wrong Vertex AI jobs are refused before any upload, each in one line that holds its remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from clouds import VERTEX, changes_of, full, job_of

from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.events import prices
from stoker_launcher.job import Job, open_job
from stoker_launcher.places import vertex
from stoker_launcher.places.vertex import google_cloud
from tests.refusals import refused

N1 = "gpu.machine_type=n1-standard-8"
NO_PAIR = "gpu.machine_type=null; cpu.machine_type=null"
KEY = "projects/p/locations/us-central1/keyRings/r/cryptoKeys/k"


def pools(*kinds: str) -> str:
    listed = (f"{{name: {kind.split()[0]}, machine_type: {kind.split()[1]}}}" for kind in kinds)
    return f"{NO_PAIR}; pools=[{', '.join(listed)}]"


def make_job(changes: str, source_dir: Path | None = None) -> Job:
    return job_of(VERTEX | changes_of(changes, "vertex"), source_dir)


WRONG: dict[str, list[str]] = {
    "gpu.machine_type": [NO_PAIR],
    "pools": [
        "pools=[{name: x, machine_type: c2-standard-8}]",
        pools("gpu g2-standard-8", "gpu a2-highgpu-1g"),
    ],
    "": [f"{N1}; gpu.accelerator=NVIDIA_TESLA_T5"],
    "cluster.gpu_group": [pools("a g2-standard-8", "b a2-highgpu-1g"), "cluster.gpu_group=gpus"],
    "train.workers": ["train.workers=3"],
    "cluster.min_cpu_hosts": ["cluster.min_cpu_hosts=3"],
    "data.preprocess_on": ["data.preprocess_on=[feeders]"],
    "checkpoint.dir": ["checkpoint.dir=ckpt"],
    "cluster.join_timeout_s": ["max_runtime_s=100"],
    "project": ["project=null"],
    "gcs_uri": ["gcs_uri=null", "gcs_uri=s3://my-bucket/x", "gcs_uri=gs://my-bucket/a b"],
    "environment.AIP_MODEL_DIR": ["environment={AIP_MODEL_DIR: x}"],
    "environment.CLUSTER_SPEC": ["environment={CLUSTER_SPEC: x}"],
    "environment.HF_TOKEN": ["environment={HF_TOKEN: hf_abcdefghijklmnopqrstuvwxyz012345}"],
    "prices.g2-standard-9": ["prices={g2-standard-9: 1}"],
    "params.data": ["params.data=/data/flowers"],
    "image": ["image=null"],
}


@pytest.mark.parametrize(("key", "wrong"), WRONG.items(), ids=WRONG)
def test_a_wrong_job_is_refused_by_its_key(key: str, wrong: list[str]) -> None:
    for changes in wrong:
        with refused(full(key, "vertex").rstrip("."), code=2):
            vertex.plan(make_job(changes), offline=True)


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
    with pytest.raises(UsageError) as caught:
        vertex.plan(make_job(""), offline=True)
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
        vertex.plan(make_job("project=null"))
    assert caught.value.problems == (google_cloud.NO_CREDENTIALS,)


def test_the_dry_run_shows_pools_cost_and_uploads(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"x" * 1000)
    changes = f"gpu.replicas=2; params.data={tmp_path}; max_runtime_s=3600"
    request = vertex.plan(make_job(changes), offline=True)
    shown = request.render()
    assert "2×NVIDIA_L4  1.963" in shown and "cpu        2  c2-standard-16" in shown
    limit = "at most $3.88 in 1 h (vertex.max_runtime_s); estimated, prices of 2025 (us-central1"
    assert limit in shown and "1.0 kB" in shown
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
