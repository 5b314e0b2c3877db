"""The wheel works by itself: in an environment of its own, away from the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from commands import ROOT
from recorded import record

from tests.clouds import WORDS

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


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(CLEAN)}


def run(installed: Path, folder: Path, *words: str) -> str:
    command = [str(installed / words[0]), *words[1:]]
    done = subprocess.run(
        command, cwd=folder, env=clean(), capture_output=True, text=True, timeout=500
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


START = "from stoker_launcher.command_line import main; main()"
HEAVY = (
    "torch ray numpy pyarrow pandas torchvision timm torchmetrics safetensors tensorboard PIL cv2"
)


@pytest.fixture
def light(installed: Path, tmp_path: Path) -> Path:
    """An environment with the base dependencies alone: the others cannot be imported."""
    shutil.copytree(installed.parent, tmp_path / "light", symlinks=True)
    (site,) = tmp_path.glob("light/lib/python*/site-packages")
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {HEAVY.split()}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    return tmp_path / "light/bin/python"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--version", "stoker 0."),
        ("--help", "doctor"),
        ("init project --kind script", "wrote job.yaml"),
        ("script.py --on sagemaker --dry-run --offline SAGEMAKER", "total      3"),
        (
            "recipe.yaml --on sagemaker --dry-run --offline SAGEMAKER",
            "warning: .*stoker\\[train\\]",
        ),
        ("status RUN", "succeeded"),
        ("logs RUN", "step 1"),
        ("report RUN", "report.html"),
        (
            "size recipe.yaml --from RUN --gpu-samples-per-s A10G=3000 sagemaker.gpu.type=ml.g5.xlarge",
            "recommended: ",
        ),
        ("compare RUN", "error: .*stoker\\[train\\]"),
        ("peek recipe.yaml", "error: .*stoker\\[train\\]"),
    ],
)
def test_the_launcher_needs_neither_torch_nor_ray(
    words: str, shown: str, light: Path, tmp_path: Path
) -> None:
    (here := tmp_path / "here").mkdir()
    (here / "script.py").write_text("import torch\n")
    (here / "recipe.py").write_text("import torch\nfrom stoker.recipe import Recipe\n")
    (here / "recipe.yaml").write_text("name: flowers\nrecipe: recipe:Flowers\n")
    (record(here / "run", 200) / "logs").mkdir()
    (here / "run/logs/console.log").write_text("step 1\n")
    typed = words.replace("RUN", "run").replace("SAGEMAKER", " ".join(WORDS["sagemaker"]))
    command = [str(light), "-c", START, *typed.split()]
    done = subprocess.run(command, cwd=here, env=clean(), capture_output=True, text=True)
    assert re.search(shown, done.stdout + done.stderr), done.stdout + done.stderr
    assert done.returncode == (2 if shown.startswith("error") else 0)
