"""The wheel works by itself: in an environment of its own, away from the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from commands import ROOT

pytestmark = pytest.mark.long

CLEAN = ("PYTHONPATH", "STOKER_", "RAY_")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("stoker-*.whl")
    venv.create(folder / "env", with_pip=False)
    (site,) = folder.glob("env/lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "env/bin/python"), "install", "-q"]
    done = subprocess.run(
        [*pip, "--no-deps", "--no-index", "--ignore-installed", str(wheel)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder / "env" / "bin"


def run(installed: Path, folder: Path, *words: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(CLEAN)}
    command = [str(installed / words[0]), *words[1:]]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_project_trains_without_the_checkout_and_finds_the_examples(
    installed: Path, tmp_path: Path
) -> None:
    where = "import stoker_launcher, stoker, sys; print(stoker.__file__, stoker_launcher.__file__, *sys.path)"
    assert str(ROOT / "source_dir") not in run(installed, tmp_path, "python", "-c", where)
    assert run(installed, tmp_path, "stoker", "--version").split()[-1][0].isdigit()
    run(installed, tmp_path, "stoker", "init", "homes", "--kind", "tabular")
    before = {path.name for path in (tmp_path / "homes").iterdir()}
    run(
        installed,
        tmp_path,
        "stoker",
        "homes/job.yaml",
        "train.epochs=1",
        "tracking.tensorboard=false",
    )
    summary = json.loads((tmp_path / "runs/latest/summary.json").read_text())
    assert summary["status"] == "succeeded"
    assert summary["records"]["trained"] == summary["records"]["read"] == 6000
    assert summary["metrics"]["last"]["val/mae"] < 0.5
    assert {path.name for path in (tmp_path / "homes").iterdir()} - {"__pycache__"} == before
    assert "digits/webdataset" in run(installed, tmp_path, "stoker", "example:digits", "--dry-run")
    staged = {path.name for path in (tmp_path / "runs/latest/code").iterdir()}
    assert {"stoker", "train.py"} <= staged
