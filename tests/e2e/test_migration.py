"""docs/migrate.md: what stands there "before" and "after" runs, and gives the same loss in every step."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, submit
from pages import DOCS, change, examples

PAGE = "migrate.md"
SCRIPTS = ("train.py", "tar_shards.py", "lit_train.py")
SEEDED = {"tar_shards.py": (".shuffle(1000)", ".shuffle(1000, seed=0)")}
UNSHUFFLED = {
    "tar_shards.py": (".shuffle(1000)", ".shuffle(0)"),
    "lit_train.py": ("shuffle=True", "shuffle=False"),
}
"""What the page says to change in a script for the comparison with itself, and with a recipe."""
RECIPES = {
    "tar_recipe:TarShards": "tar_shards.py",
    "ray_recipe:RayDataset": "ray_train.py",
    "lit_recipe:LitDigits": "lit_train.py",
    "parquet_recipe:Rows": "by_pyarrow.py",
}
"""Recipe → the script that it replaces."""
BY_PYARROW = """
import io

import mine
import numpy as np
import pyarrow.parquet
import torch
from PIL import Image

table = pyarrow.parquet.read_table(".data/digits/parquet/train")
pictures = [Image.open(io.BytesIO(content)).convert("RGB") for content in table["image"].to_pylist()]
images = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2)
labels = torch.tensor(table["label"].to_pylist())
print(mine.train(zip(images.split(64), labels.split(64))))
"""
"""In place of Petastorm, which cannot be installed: the rows as pyarrow reads them."""


@pytest.fixture(scope="module")
def folder(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, with the data where they look for it."""
    folder = tmp_path_factory.mktemp("migration")
    for name, text in {**examples(PAGE), "by_pyarrow.py": BY_PYARROW}.items():
        (folder / name).write_text(text)
    (folder / ".data").mkdir()
    (folder / ".data" / "digits").symlink_to(digits)
    return folder


def python(folder: Path, *words: str, **variables: str) -> str:
    """What a program prints, in a clean environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "STOKER_"))}
    path = [folder, ROOT / "source_dir", ROOT / "tests" / "integration", ROOT]
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def losses(folder: Path, name: str, *changes: tuple[str, str], **variables: str) -> list[float]:
    """What a script of the page prints that is nothing but numbers, one for each of the 1,437 / 64 steps."""
    text = (folder / name).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{name}: {old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    (folder / f"changed_{name}").write_text(text)
    printed = python(folder, f"changed_{name}", **variables)
    lines = [line.strip("[]") for line in printed.splitlines() if re.fullmatch(r"[\d., \[\]]+", line)]
    found = [float(number) for line in lines for number in line.split(",")]
    assert len(found) == len(set(found)) == 23, printed
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_alike_with_the_other_import(folder: Path, name: str) -> None:
    """In the script's own process; that a cluster makes the same batches, the loader's tests hold."""
    seed = [SEEDED[name]] if name in SEEDED else []
    assert losses(folder, name, change(PAGE), *seed, STOKER_LOADER="process") == losses(folder, name, *seed)


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, list[float]]:
    """The losses of each recipe, and of the script that needs Ray: one process, one cluster."""
    python(folder, str(ROOT / "tests" / "scripts" / "jobs.py"), "ray_train.py", *RECIPES)
    return dict(json.loads((folder / "losses.json").read_text()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_like_the_script_that_it_replaces(
    recipe: str, folder: Path, trained: dict[str, list[float]]
) -> None:
    before = RECIPES[recipe]
    unshuffled = [UNSHUFFLED[before]] if before in UNSHUFFLED else []
    expected = trained.get(before) or losses(folder, before, *unshuffled)
    assert len(trained[recipe]) == 23
    assert trained[recipe] == expected


def test_the_job_in_place_of_a_data_service_has_both_instance_groups(folder: Path) -> None:
    [command] = re.findall(r"^```bash\n(.*?)^```", (DOCS / PAGE).read_text(), re.M | re.S)
    program, launcher, *words = shlex.split(command.replace("\\\n", " "))
    assert (program, launcher) == ("python", "launcher/submit.py")
    account = {
        "region": "us-east-1",
        "s3_uri": "s3://my-bucket/stoker",
        "role": "arn:aws:iam::123456789012:role/StokerJob",
    }
    settings = [f"sagemaker.{key}={value}" for key, value in account.items()]
    done = submit(*words, "--offline", *settings, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"InstanceGroups"' in done.stdout
    found = re.findall(r'"Instance(?:Type|Count)": "?([\w.]+)', done.stdout)
    assert found == ["ml.g5.2xlarge", "1", "ml.c5.9xlarge", "2"]
