"""Submitting, watching and stopping a Vertex AI job: Google's own clients against loopback servers."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.storage.filesystems import filesystem_of, list_files
from stoker_launcher.command_line import app
from stoker_launcher.job import Job, open_job
from stoker_launcher.places import attach, vertex
from stoker_launcher.places.vertex import VertexRun, google_cloud
from tests.fakes.google_cloud import BUCKET, JobService, cloud_storage, job_service

pytest.importorskip("google.cloud.aiplatform_v1", reason="the extra `vertex`")

ROOT = f"gs://{BUCKET}/stoker"
SETTINGS = (
    "name=flowers",
    "vertex.project=my-project",
    f"vertex.gcs_uri={ROOT}",
    "vertex.image=us-docker.pkg.dev/vertex-ai/training/pytorch-gpu.2-10.py312:latest",
    "vertex.gpu.machine_type=g2-standard-8",
    "vertex.cpu.machine_type=c2-standard-16",
)


def download(uri: str, folder: Path) -> Path:
    filesystem, path = filesystem_of(uri)
    with filesystem.open_input_stream(path) as stream:
        (folder / uri.rpartition("/")[2]).write_bytes(stream.read())
    return folder / uri.rpartition("/")[2]


@pytest.fixture(scope="module")
def storage() -> Iterator[None]:
    with cloud_storage() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def service(storage: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobService]:
    with job_service() as (found, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        google_cloud.jobs.cache_clear()
        yield found
    google_cloud.jobs.cache_clear()


def make_job(*overrides: str, data: Path | None = None) -> Job:
    params = [f"params.data={data}"] if data else []
    return open_job(load(None, [*SETTINGS, *params, *overrides]))


def submit(*overrides: str, data: Path | None = None) -> VertexRun:
    run = vertex.submit(vertex.plan(make_job(*overrides, data=data)), tell=lambda line: None)
    run.poll_s = 0.01
    return run


def write(uri: str, text: str) -> None:
    filesystem, path = filesystem_of(uri)
    with filesystem.open_output_stream(path) as stream:
        stream.write(text.encode())


def test_the_job_is_created_after_its_code_and_data(service: JobService, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a.jpg").write_bytes(b"jpeg")
    (tmp_path / "images" / "linked").symlink_to(tmp_path / "far")
    run = submit(data=tmp_path / "images")
    assert run.id == "vertex:projects/my-project/locations/us-central1/customJobs/1000"
    job = service.jobs[run.name]
    base = job["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"]
    assert base.startswith(f"{ROOT}/flowers-")
    command = job["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["command"][-1]
    mounted = f"/gcs/{base.removeprefix('gs://')}/code.tar.gz"
    assert (
        f"python -m tarfile -e {mounted} /tmp/stoker-code && cd /tmp/stoker-code && exec python"
        in command
    )
    with tarfile.open(download(f"{base}/code.tar.gz", tmp_path)) as tar:
        assert {"train.py", "job.yaml", "stoker/entry/driver.py", ".ray-token"} <= set(
            tar.getnames()
        )
        staged = tar.extractfile("job.yaml")
        assert staged is not None
        assert f"data: /gcs/{BUCKET}/stoker/data/" in staged.read().decode()
    (image,) = [file for file in list_files(f"{ROOT}/data") if file.path.endswith("/linked/a.jpg")]
    assert image.size == 4
    told: list[str] = []
    vertex.submit(vertex.plan(make_job(data=tmp_path / "images")), tell=told.append)
    assert told[0] == "data: 4 B already there", "the same data is uploaded once"


def test_the_states_of_a_job_are_those_of_every_run(service: JobService) -> None:
    run = submit()
    assert isinstance(attach(run.id), VertexRun)
    seen = []
    for state in ("QUEUED", "PENDING", "RUNNING", "CANCELLING", "SUCCEEDED", "EXPIRED"):
        service.jobs[run.name]["state"] = f"JOB_STATE_{state}"
        seen.append(attach(run.id).status())
    assert [text.partition(":")[0] for text in seen] == [*["running"] * 4, "succeeded", "failed"]
    assert seen[-1] == "failed: it took longer than vertex.max_runtime_s"
    service.jobs[run.name]["state"] = "JOB_STATE_RUNNING"
    run.stop()
    assert run.status() == "interrupted"
    assert run.wait() == 143
    with pytest.raises(UsageError, match="customJobs/77 is not found"):
        VertexRun(run.name.replace("1000", "77")).status()
    with pytest.raises(UsageError, match="write vertex:projects/<project>"):
        attach("vertex:77")


def test_a_failure_tells_the_heads_words_of_the_last_attempt(service: JobService) -> None:
    run = submit()
    job = service.jobs[run.name]
    job["state"] = "JOB_STATE_FAILED"
    job["error"] = {
        "code": 3,
        "message": "The replica workerpool0-0 exited with a non-zero status of 1.",
    }
    assert run.status() == "failed: The replica workerpool0-0 exited with a non-zero status of 1."
    base = job["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"]
    write(f"{base}/failures/20261123-100000-workerpool0-0", "an earlier attempt ran out of memory")
    write(f"{base}/failures/20261123-110000-workerpool0-0", "loss is NaN at step 12")
    write(f"{base}/failures/20261123-110001-workerpool1-0", "the head has ended with exit code 1")
    assert run.status() == "failed: loss is NaN at step 12"
    assert run.wait() == 1


def test_logs_come_from_cloud_logging_and_the_end_names_the_results(service: JobService) -> None:
    run = submit()
    job = service.jobs[run.name]

    def entry(number: int, host: str, **payload: object) -> dict[str, object]:
        labels = {"resource": {"labels": {"task_name": host}}}
        return {
            "insertId": str(number),
            "timestamp": f"2026-11-23T10:00:0{number}Z",
            **labels,
            **payload,
        }

    service.entries = [entry(1, "workerpool0-0", textPayload="[gpu host head] step 1  loss 2.3")]

    def end(job: dict[str, object]) -> None:
        if len([call for call in service.requests if call[0] == "GET"]) == 3:
            service.entries.append(entry(2, "workerpool1-0", jsonPayload={"message": "done"}))
            job["state"] = "JOB_STATE_SUCCEEDED"

    service.requests.clear()
    service.on_get = end
    lines = list(run.logs(follow=True))
    assert [line for line in lines if line.startswith("[workerpool")] == [
        "[workerpool0-0] [gpu host head] step 1  loss 2.3",
        "[workerpool1-0] done",
    ]
    assert lines[0].endswith("running: waiting for hosts") and any(
        line.endswith("succeeded") for line in lines
    )
    base = job["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"]
    cost = {"usd": 1.234, "prices_as_of": "2026-09", "prices_region": "us-central1"}
    write(f"{base}/run/summary.json", json.dumps({"cost": cost}))
    closing = run.closing().splitlines()
    assert closing[0].endswith(": succeeded")
    assert closing[1] == "cost: $1.23 (estimated, prices of 2026-09 in us-central1)"
    assert closing[2] == f"model: {base}/model/"
    assert CliRunner().invoke(app, ["status", run.id]).output.startswith("succeeded")


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        ((403, "PERMISSION_DENIED", "Permission denied."), "docs/iam/vertex-launcher.yaml"),
        ((429, "RESOURCE_EXHAUSTED", "Quota of NVIDIA_L4 exceeded."), "request the quota"),
        (
            (400, "INVALID_ARGUMENT", "Machine type is not supported."),
            "Machine type is not supported.",
        ),
    ],
)
def test_a_refusal_of_the_service_is_one_line(
    service: JobService, refusal: tuple[int, str, str], says: str
) -> None:
    service.refusal = refusal
    with pytest.raises(UsageError) as caught:
        submit()
    (line,) = caught.value.problems
    assert line.startswith("Vertex AI job: ") and says in line and "\n" not in line


def test_a_lost_answer_costs_no_second_job(service: JobService) -> None:
    submit()
    service.loses_created = True
    run = submit()
    assert [*service.jobs][1:] == [run.name] and run.status() == "running: waiting for hosts"


def test_a_bucket_that_is_not_there_ends_the_upload_and_creates_no_job(service: JobService) -> None:
    with pytest.raises(UsageError, match=r"^upload to Cloud Storage: "):
        submit("vertex.gcs_uri=gs://elsewhere/stoker")
    assert not service.requests
