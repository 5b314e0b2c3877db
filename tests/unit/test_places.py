"""Places: their names, outputs and manifests."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import yaml

from stoker_launcher import job as launched
from stoker_launcher import run_directory
from stoker_launcher.job import Job
from stoker_launcher.places import names
from tests.clouds import WORDS
from tests.command_line import type_command
from tests.pages import DOCS
from tests.refusals import refused

JOB = """
name: same
params: {data: DATA, model: resnet18}
output_dir: RUNS
sagemaker:
  {gpu: {type: ml.g5.xlarge}, region: us-east-1, s3_uri: "s3://bucket/runs",
   role: "arn:aws:iam::123456789012:role/R"}
slurm: {gpu: {gpus: 1, cpus: 8}, cpu: {nodes: 2, partition: cpu}}
vertex:
  {gpu: {machine_type: g2-standard-8}, project: my-project, region: us-central1, gcs_uri: "gs://bucket/runs",
   image: "us-docker.pkg.dev/my-project/stoker/train:1"}
"""
"""Each place reads its own section and leaves the others alone."""
OPTIONS = {
    "ray": ["--offline", "--address", "http://localhost:8265"],
    "sagemaker": ["--offline"],
    "slurm": ["--offline"],
    "vertex": ["--offline"],
}


@pytest.mark.long
@pytest.mark.parametrize("place", names())
def test_one_job_file_is_planned_for_each(
    place: str,
    tmp_path: Path,
    digits: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "stoker_launcher.run_directory.kept_outside", lambda *_: pytest.fail("it may be S3")
    )
    job = tmp_path / "job.yaml"
    job.write_text(
        JOB.replace("DATA", str(digits / "images")).replace("RUNS", str(tmp_path / "runs"))
    )
    words = [str(job), "--on", place, "--dry-run", *OPTIONS.get(place, [])]
    code, errors, shown = type_command(words, capsys)
    assert (code, errors) == (0, []) and "same" in shown
    assert not (tmp_path / "runs").exists(), "a dry run leaves nothing"


@pytest.mark.parametrize("place", ["ray", "sagemaker", "vertex"])
def test_private_files_of_the_source_are_uploaded_nowhere(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code").mkdir()
    for name in (".env", "key.pem", "mine.py"):
        text = "from stoker.recipe import Recipe\nclass Mine(Recipe):\n    def model(self): ...\n"
        (tmp_path / "code" / name).write_text(text)
    (tmp_path / "job.yaml").write_text("recipe: mine:Mine\nname: flowers\noutput_dir: /mnt/runs\n")
    words = [
        *WORDS.get(place, []),
        *OPTIONS[place],
        "--dry-run",
        "--source-dir",
        str(tmp_path / "code"),
    ]
    code, errors, _ = type_command([str(tmp_path / "job.yaml"), "--on", place, *words], capsys)
    private = [line.partition(" looks private")[0] for line in errors]
    assert (code, private) == (2, [f"error: --source-dir: {name}" for name in (".env", "key.pem")])


@pytest.mark.parametrize("place", ["sagemaker", "vertex"])
def test_private_files_among_the_data_are_not_uploaded_either(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("data/.git/config", "data/.git/id_rsa", "data/a.jpg", "data/deep/.env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "job.yaml").write_text(f"name: flowers\nparams: {{data: {tmp_path}/data}}\n")
    words = [str(tmp_path / "job.yaml"), "--on", place, "--dry-run", *WORDS[place], *OPTIONS[place]]
    code, errors, _ = type_command(words, capsys)
    private = [line.partition(" looks private")[0] for line in errors]
    assert (code, private) == (2, ["error: params.data: deep/.env"])
    (tmp_path / "data/deep/.env").unlink()
    code, errors, shown = type_command(words, capsys)
    assert (code, errors) == (0, []) and re.search(r"data +1 +1 B ", shown), shown


@pytest.mark.parametrize("place", ["ray", "sagemaker", "vertex"])
def test_a_submit_loads_the_recipe_once_and_stages_the_source_once(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = mock.Mock(wraps=Job.stage)
    monkeypatch.setattr(Job, "stage", lambda *given, **more: stage(*given, **more))
    loaded = mock.Mock(wraps=launched.load_recipe)
    monkeypatch.setattr(launched, "load_recipe", loaded)
    words = [*WORDS.get(place, []), *OPTIONS[place], "--request", str(tmp_path / "job.json")]
    words += ["recipe=rows:Counting", f"output_dir={tmp_path}", "--source-dir", "tests/recipes"]
    monkeypatch.chdir(ROOT)
    (tmp_path / "job.yaml").write_text("name: flowers\n")
    code, errors, _ = type_command([str(tmp_path / "job.yaml"), "--on", place, *words], capsys)
    assert (code, errors) == (0, [])
    assert (stage.call_count, loaded.call_count) == (1, 1)


def test_the_page_has_every_place() -> None:
    page = (DOCS / "places.md").read_text()
    assert {*re.findall(r"--on (\w+)", page)} == {*names()} - {"local"}


ROOT = Path(__file__).resolve().parents[2]
HEADER, GPU, CPU = yaml.safe_load_all((ROOT / "docs/ray/sky.yaml").read_text())


def test_the_tasks_of_skypilot_agree_and_use_a_token() -> None:
    """The CPU hosts find the head by the name that SkyPilot gives the first host of a task."""
    assert CPU["envs"]["HEAD"] == f"{GPU['name']}-0.{HEADER['name']}"
    assert CPU["envs"]["PORT"] == GPU["envs"]["PORT"] and CPU["setup"] == GPU["setup"]
    assert GPU["envs"]["CPU_HOSTS"] == str(CPU["num_nodes"])
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (version,) = (line for line in pins if line.startswith("ray=="))
    assert version in GPU["setup"].replace("ray[default]", "ray")
    for task in (GPU, CPU):
        assert task["envs"]["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" in task["secrets"]


def test_a_disk_without_room_for_a_run_is_named(tmp_path: Path) -> None:
    full = mock.patch("shutil.disk_usage", return_value=mock.Mock(free=2**20))
    with full, refused("output_dir", code=2):
        run_directory.refuse_unwritable(tmp_path / "new" / "runs")
    assert not list(tmp_path.iterdir()), "looking leaves nothing behind"
