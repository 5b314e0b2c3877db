"""`submit.py doctor`: a line for each thing that is looked at, its remedy, and the exit code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from stoker.config.loading import load
from stoker_launcher import doctor
from stoker_launcher.places.sagemaker import aws
from tests.command_line import type_command
from tests.fakes.aws import moto_server, service_quotas

CONFIG = load(None).config
JOB = """
name: flowers
sagemaker:
  region: us-east-1
  gpu: {type: ml.g5.2xlarge, count: 2}
  cpu: {type: ml.c5.4xlarge, count: 4}
"""
QUOTAS = {
    "ml.c5.4xlarge for endpoint usage": 9.0,
    "ml.g5.2xlarge for spot training job usage": 1.0,
    "ml.c5.4xlarge for spot training job usage": 9.0,
    "ml.g5.2xlarge for training job usage": 2.0,
    "ml.c5.4xlarge for training job usage": 3.0,
}


def only(findings: Iterator[doctor.Finding]) -> doctor.Finding:
    (found,) = findings
    return found


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No AWS credentials, and none to be had from the network."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    aws.client.cache_clear()


@pytest.mark.usefixtures("nobody")
def test_a_machine_that_runs_these_tests_is_sound(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, errors, out = type_command(["doctor"], capsys)
    assert (code, errors) == (0, []), out
    for what in ("Python", "Ray", "torch", "results", "rehearsal", "AWS"):
        assert sum(line[6:].startswith(f"{what} ") for line in out.splitlines()) == 1, out
    assert "FAIL" not in out and not list(tmp_path.iterdir()), "looking leaves nothing behind"


@pytest.mark.parametrize(
    ("needs", "mark", "remedy"),
    [
        (["ray[data]==1.0.0", "pyyaml>=6"], "FAIL", "pip install 'ray[data]==1.0.0'; all hosts"),
        (["pyyaml>=999", "no-such-package"], "FAIL", "pip install 'pyyaml>=999' 'no-such-package'"),
        (["pyyaml>=6"], "ok", ""),
    ],
)
def test_packages_that_are_absent_or_too_old(needs: list[str], mark: str, remedy: str) -> None:
    with mock.patch("importlib.metadata.requires", return_value=needs):
        *_, found = doctor.packages(CONFIG)
    assert found.mark == mark and found.remedy.startswith(remedy)


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("torchvision.py", "raise RuntimeError('built for another torch')", "for another torch"),
        ("nvidia-smi", "#!/bin/sh", ""),
    ],
)
def test_torch_that_cannot_use_torchvision_or_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: str, said: str
) -> None:
    """There is a driver's program, but no GPU: torch itself says what is wrong."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch can use this machine's GPU")
    (tmp_path / file).write_text(content)
    (tmp_path / file).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = only(doctor.torch(CONFIG))
    gpu = "NVIDIA" if torch.version.cuda else "CUDA enabled"
    assert found.mark == "FAIL" and (said or gpu) in found.found


def test_a_small_shared_memory_a_full_disk_and_a_folder_that_cannot_be_written(
    tmp_path: Path,
) -> None:
    usage = mock.Mock(total=64 * 2**20, free=100 * 2**20, used=9 * 2**30)
    with mock.patch("shutil.disk_usage", return_value=usage):
        small = only(doctor.shared_memory(CONFIG, tmp_path))
        results, _ = doctor.disk(load(None, [f"output_dir={tmp_path}"]).config)
    assert (small.mark, small.remedy) == ("FAIL", "start the container with --shm-size=2g or more")
    assert (results.mark, results.remedy[-12:]) == ("FAIL", "output_dir=…")
    results, _ = doctor.disk(load(None, ["output_dir=/proc/runs"]).config)
    assert results.mark == "FAIL" and "/proc/runs cannot be written" in results.found


@pytest.mark.usefixtures("nobody")
def test_a_job_for_sagemaker_without_credentials_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    found = only(doctor.aws(load(tmp_path / "job.yaml").config))
    assert found.line().startswith("FAIL  AWS            no credentials found; run `aws configure`")


@pytest.mark.usefixtures("nobody")
@pytest.mark.long
def test_identity_and_quotas_of_the_jobs_instance_types(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    command = ["doctor", str(tmp_path / "job.yaml"), f"output_dir={tmp_path}"]
    # The server imports what it needs at the first request.
    monkeypatch.setattr(aws, "TIMEOUT_S", 60.0)
    with moto_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with service_quotas(QUOTAS):
            code, _, out = type_command(command, capsys)
            identity, gpu, cpu = out.splitlines()[-3:]
            assert identity.startswith("ok    AWS            arn:aws:sts::123456789012:")
            assert (
                gpu[:5] == "ok   "
                and "ml.g5.2xlarge for training job usage: 2, the job needs 2" in gpu
            )
            assert (
                cpu[:5] == "FAIL "
                and "ml.c5.4xlarge for training job usage: 3, the job needs 4" in cpu
            )
            assert "Service Quotas" in cpu and code == 1
            _, _, out = type_command([*command, "sagemaker.spot=true"], capsys)
            assert [line[:5] for line in out.splitlines()[-2:]] == ["FAIL ", "ok   "], out
        with service_quotas({}):
            code, _, out = type_command(command, capsys)
            assert (code, out.count("AWS lists none in us-east-1")) == (0, 2), out
    aws.client.cache_clear()


@pytest.mark.usefixtures("nobody")
@pytest.mark.long
def test_aws_that_does_not_answer_is_not_awaited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that takes connections and says nothing: one try, of `TIMEOUT_S`, and a line."""
    import socket

    monkeypatch.setattr(aws, "TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        ((mark, what, found, _),) = aws.findings(CONFIG)
        assert (mark, what) == ("note", "AWS") and "Read timeout" in found
        silent.settimeout(0)
        silent.accept()
        with pytest.raises(BlockingIOError):
            silent.accept()
    aws.client.cache_clear()
