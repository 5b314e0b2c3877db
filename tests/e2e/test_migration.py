"""docs/migrate.md: what stands there "before" and "after" runs, and gives the same loss in every step."""

from __future__ import annotations

import json
import os
import re
import runpy
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
UNSHUFFLED = {"tar_shards.py": (".shuffle(1000)", ".shuffle(0)")}
"""What the page says to change in a script for the comparison with itself, and with a recipe."""
RECIPES = {
    "tar_recipe:TarShards": "unshuffled_tar_shards.py",
    "ray_recipe:RayDataset": "ray_train.py",
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
    folder = tmp_path_factory.mktemp("migration")
    for name, text in {**examples(PAGE), "by_pyarrow.py": BY_PYARROW}.items():
        (folder / name).write_text(text)
    (folder / ".data").mkdir()
    (folder / ".data" / "digits").symlink_to(digits)
    return folder


Losses = dict[str, list[float]]
"""Of every step, by script and recipe."""


def run(folder: Path, *words: str, **variables: str) -> Losses:
    """Scripts and recipes in one process, for imports take longest, in a clean environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "STOKER_"))}
    path = [folder, ROOT / "source_dir", ROOT / "tests" / "integration", ROOT]
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "jobs.py"), *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: Losses = json.loads((folder / "losses.json").read_text())
    for name, losses in found.items():
        assert len(losses) == len(set(losses)) == 23, (
            f"{name}: not one for each of the 1,437 / 64 steps"
        )
    return found


def rewritten(folder: Path, kind: str, name: str, *changes: tuple[str, str]) -> str:
    """A script of the page with parts of it replaced that it must have exactly once."""
    text = (folder / name).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{name}: {old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    (folder / f"{kind}_{name}").write_text(text)
    return f"{kind}_{name}"


@pytest.fixture(scope="module")
def scripts(folder: Path) -> Losses:
    """As they are, with the import changed, and unshuffled.

    Stoker's loader makes the batches in the script's process: that a cluster makes the same ones, the
    loader's tests hold.
    """
    names = ["by_pyarrow.py"]
    for name in SCRIPTS:
        seed = [SEEDED[name]] if name in SEEDED else []
        names += [rewritten(folder, "before", name, *seed)]
        names += [rewritten(folder, "after", name, change(PAGE), *seed)]
    names += [rewritten(folder, "unshuffled", name, how) for name, how in UNSHUFFLED.items()]
    return run(folder, "losses.json", *names, STOKER_LOADER="process")


@pytest.fixture(scope="module")
def on_cluster(folder: Path) -> Losses:
    return run(folder, "--cluster", "losses.json", "ray_train.py", *RECIPES)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_alike_with_the_other_import(name: str, scripts: Losses) -> None:
    assert scripts[f"after_{name}"] == scripts[f"before_{name}"]


def test_ddp_in_place_of_horovod_trains_like_one_process(folder: Path, tmp_path: Path) -> None:
    """Two ranks with averaged gradients and the learning rate × 2, against their batches joined."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    for name in ("mine.py", "ddp_train.py"):
        text = (folder / name).read_text()
        (tmp_path / name).write_text(text.replace(".data/", f"{folder}/.data/"))
    script = str(tmp_path / "ddp_train.py")
    done = submit(script, "train.workers=2", f"output_dir={tmp_path}/runs", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = (tmp_path / "runs").glob("ddp*/checkpoints/model.pt")
    found = torch.load(path, weights_only=True)

    mine = runpy.run_path(str(folder / "mine.py"))
    net = mine["model"]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    data = ImageFolder(str(folder / ".data/digits/images/train"), v2.PILToTensor())
    samplers = [DistributedSampler(data, 2, rank) for rank in range(2)]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        ranks = [DataLoader(data, batch_size=32, sampler=sampler) for sampler in samplers]
        for batches in zip(*ranks, strict=True):
            images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
            optimizer.zero_grad()
            mine["loss_of"](net, images, labels).backward()
            optimizer.step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_like_the_script_that_it_replaces(
    recipe: str, scripts: Losses, on_cluster: Losses
) -> None:
    assert on_cluster[recipe] == (scripts | on_cluster)[RECIPES[recipe]]


def test_the_job_in_place_of_a_data_service_has_both_instance_groups(folder: Path) -> None:
    [command] = re.findall(r"^```bash\n(.*?)^```", (DOCS / PAGE).read_text(), re.M | re.S)
    program, *words = shlex.split(command.replace("\\\n", " "))
    assert program == "stoker"
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
