"""What `--on ray` would send, without a cluster."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from launcher import ray_jobs
from launcher.backends import attach
from launcher.backends import ray as ray_backend
from launcher.job import open_job
from stoker.config import load
from stoker.errors import UsageError

ADDRESS = "http://head.example.com:8265"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def plan(**options: bool) -> ray_backend.RayRequest:
    job = open_job(load(None, ["name=probe", "output_dir=/mnt/shared/runs"]))
    return ray_backend.plan(job, address=ADDRESS, offline=True, **options)


def test_written_source_is_a_zip_with_files_at_the_root(tmp_path: Path) -> None:
    request = plan()
    text = request.write(tmp_path / "job.zip")
    with zipfile.ZipFile(tmp_path / "job.zip") as archive:
        assert {"train.py", "job.yaml", "stoker/config.py"} <= set(archive.namelist())
    assert "STOKER_BACKEND" in text and request.run_dir in text and "job.zip" in text


def test_same_source_is_the_same_package() -> None:
    job = open_job(load(None, ["name=probe", "output_dir=/mnt/shared/runs"]))
    first, second = (ray_backend.plan(job, address=ADDRESS, offline=True).package() for _ in range(2))
    assert first == second and len(first) < ray_jobs.PACKAGE_LIMIT_BYTES
    assert zipfile.ZipFile(io.BytesIO(first)).testzip() is None


def test_install_lets_ray_install_all_but_itself() -> None:
    pip = plan(install=True).body("gcs://x")["runtime_env"]["pip"]
    assert any(line.startswith("timm") for line in pip)
    assert not any(line.startswith("ray") for line in pip)
    assert "pip" not in plan().body("gcs://x")["runtime_env"]


def test_an_open_cluster_and_an_open_token_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "anyone who can reach this cluster" in plan().render()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 64)
    shown = plan().render()
    assert "travels unencrypted" in shown and "t" * 64 not in shown + repr(plan())


def test_run_ids_lead_to_their_backend() -> None:
    found = attach(f"ray:{ADDRESS}/probe-1")
    assert found.id == f"ray:{ADDRESS}/probe-1"
    found = attach("arn:aws:sagemaker:eu-west-1:123456789012:training-job/probe-1")
    assert found.id == "sagemaker:eu-west-1/probe-1"
    with pytest.raises(UsageError, match="write ray:"):
        attach("ray:probe")


def test_private_files_are_not_uploaded(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    for name in ("recipe.py", ".env", "key.pem"):
        (tmp_path / "code" / name).write_text("")
    job = open_job(load(None, ["name=probe", "output_dir=/mnt/shared/runs"]), tmp_path / "code")
    with pytest.raises(UsageError) as refused:
        ray_backend.plan(job, address=ADDRESS, offline=True)
    assert [line.partition(" looks private")[0] for line in refused.value.problems] == [
        "--source-dir: .env",
        "--source-dir: key.pem",
    ]
