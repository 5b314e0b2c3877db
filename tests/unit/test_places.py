"""The same job in every place: one job file is planned for each, and docs/places.md has them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.places import names
from tests.command_line import type_command
from tests.pages import DOCS

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
    place: str, tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB.replace("DATA", str(digits / "images")).replace("RUNS", str(tmp_path / "runs")))
    words = [str(job), "--on", place, "--dry-run", *OPTIONS.get(place, [])]
    code, errors, shown = type_command(words, capsys)
    assert (code, errors) == (0, []) and "same" in shown
    assert not (tmp_path / "runs").exists(), "a dry run leaves nothing"


def test_the_page_has_every_place() -> None:
    page = (DOCS / "places.md").read_text()
    assert {*re.findall(r"--on (\w+)", page)} == {*names()} - {"local"}
