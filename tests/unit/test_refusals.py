"""What a job is refused for before a cluster forms is told at once, each problem on a line of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from PIL import Image
from pyarrow import parquet

from stoker.config.loading import Resolved
from stoker.config.schema import Config
from stoker.errors import Problems, UsageError
from stoker.image_classification import ImageClassification
from stoker_launcher.commands import check_recipe
from stoker_launcher.job import Job, Project

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "tests/recipes"


REFUSE = """
import contextlib, io, json, os, sys
from stoker.entry.main import run
found = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    with contextlib.redirect_stderr(told := io.StringIO()):
        code = run(["--config", "job.yaml"])
    loaded = [name for name in ("ray", "torch", "timm") if name in sys.modules]
    found.append([code, loaded, told.getvalue().splitlines()])
print(json.dumps(found))
"""
BUILT_IN, DIGITS = {"recipe": "ImageClassification"}, {"recipe": "recipes.digits:Digits"}
LARGE = "train.batch_size: 9 records × 1 train worker exceed the 8 training records; lower it"
AT_ONCE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "all of the built-in recipe's": (
        BUILT_IN
        | {"params": {"data": "nowhere", "model": "resnet_18"}}
        | {
            "checkpoint": {"monitor": "val/losss", "resume": "/nowhere/run"},
        },
        [
            "checkpoint.resume: /nowhere/run: no checkpoint there",
            "params.model: timm has no model 'resnet_18'; did you mean resnet18?",
            "nowhere: no such file or folder",
            "checkpoint.monitor: no metric 'val/losss'; did you mean val/loss?",
        ],
    ),
    "too large a batch": (
        BUILT_IN | {"params": {"data": "images"}, "train": {"batch_size": 9}},
        [LARGE],
    ),
    "too large a batch of rows": (
        BUILT_IN | {"params": {"data": "rows"}, "train": {"batch_size": 9}},
        [LARGE],
    ),
    "a parameter of a recipe in a file": (
        DIGITS | {"params": {"data": "images", "colour": "L"}},
        ["params.colour: unknown key; did you mean color?"],
    ),
    "too large a batch of a recipe in a file": (
        DIGITS | {"params": {"data": "images"}, "train": {"batch_size": 9}},
        [LARGE],
    ),
    "a parameter of a recipe whose chain is torchvision's": (
        {"recipe": "recipes.synthetic_vit:SyntheticViT", "params": {"records": "many"}},
        ["params.records: input should be a valid integer"],
    ),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Exit code, modules and lines of each case, one after the other in one process."""
    folders = [tmp_path_factory.mktemp("refused") for _ in AT_ONCE]
    for folder, (job, _) in zip(folders, AT_ONCE.values(), strict=True):
        for split in ("train", "val"):
            (folder / "rows" / split).mkdir(parents=True)
            table = pa.table({"image": [b""] * 8, "label": [0, 1] * 4})
            parquet.write_table(table, folder / "rows" / split / "a.parquet", row_group_size=4)
            for number in range(8):
                images = folder / "images" / split / f"class{number % 2}"
                images.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.zeros((8, 8), np.uint8)).save(images / f"{number}.png")
        (folder / "job.yaml").write_text(yaml.safe_dump({"name": "wrong", **job}))
    environment = os.environ | {"STOKER_PLACE": "local", "PYTHONPATH": str(ROOT / "source_dir")}
    command = [sys.executable, "-c", REFUSE, *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(AT_ONCE, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", AT_ONCE)
@pytest.mark.long
def test_a_mistake_is_told_before_ray_loads(case: str, refused: dict[str, Any]) -> None:
    """It takes seconds to load; timm, and with it PyTorch, loads only if it is asked for a name."""
    code, loaded, told = refused[case]
    assert code == 2 and "ray" not in loaded, told
    assert len(told) == len(AT_ONCE[case][1]), told
    for line, begins in zip(told, AT_ONCE[case][1], strict=True):
        assert line.startswith(f"error: {begins}")


@pytest.mark.long
@pytest.mark.parametrize("how", ["local run", "job on a cluster", "notebook", "loader"])
def test_another_ray_is_refused_before_it_forms_a_cluster(how: str, tmp_path: Path) -> None:
    """An older one has no authentication by token, and forms a cluster without any."""
    other = tmp_path / "packages/ray-2.49.2.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.49.2\n")
    (tmp_path / "job.yaml").write_text("recipe: rows:Counting\ntrain: {epochs: 1}\n")
    code = "from stoker.entry.main import main; main(['--config', 'job.yaml'])"
    if how == "notebook":
        code = (
            f"import stoker; stoker.run('job.yaml', address='local', source_dir={str(RECIPES)!r})"
        )
    if how == "loader":
        code = "from stoker import DataLoader; next(iter(DataLoader([1, 2])))"
    if how == "local run":
        command = [str(ROOT / "launcher/submit.py"), "job.yaml", "--source-dir", str(RECIPES)]
    else:
        command = ["-c", code]
    variables = {
        "PYTHONPATH": os.pathsep.join(
            map(str, (other.parent, ROOT / "source_dir", ROOT / "launcher", RECIPES))
        ),
        "TMPDIR": str(tmp_path),
        "STOKER_PLACE": "ray" if how == "job on a cluster" else "local",
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    said = "Ray 2.49.2 of " + sys.executable + ": Stoker requires 2."
    assert said in done.stdout + done.stderr
    assert done.returncode == (2 if how in ("local run", "job on a cluster") else 1)
    assert not list(tmp_path.glob("sray-*")) and not list(tmp_path.glob("runs/*"))


def test_a_plan_for_other_hosts_refuses_a_metric_that_the_recipe_does_not_have() -> None:
    config = {
        "recipe": "rows:Regression",
        "params": {"data": ""},
        "checkpoint": {"monitor": "val/losss"},
    }
    resolved = Resolved(Config.model_validate(config), {})
    job = Job(resolved, Project(resolved.config))
    with pytest.raises(
        UsageError, match=r"checkpoint.monitor: no metric 'val/losss'; did you mean val/loss\?"
    ):
        check_recipe(job)


class OwnModel(ImageClassification):
    def model(self) -> Any:
        return None


def test_a_model_that_timm_does_not_have_is_refused_unless_the_recipe_makes_its_own(
    tmp_path: Path,
) -> None:
    resolved, data = Resolved(Config(), {}), str(tmp_path)
    for name in ("resnet18", "resnet50.a1_in1k", "vit_base_resnet50_384", "hf-hub:timm/resnet18"):
        ImageClassification(data=data, model=name).check(resolved)
    with pytest.raises(
        UsageError, match=r"^params.model: timm has no model 'resnet_18'; did you mean resnet18\?$"
    ):
        ImageClassification(data=data, model="resnet_18").check(resolved)
    OwnModel(data="x", model="resnet_18").check(resolved)


def test_a_problem_that_two_checks_find_is_told_once_and_its_consequences_are_not() -> None:
    problems = Problems()
    for error in (UsageError("a", "b"), UsageError("b", "c"), KeyError("a consequence")):
        with problems:
            raise error
    with pytest.raises(UsageError) as refused:
        problems.refuse()
    assert refused.value.problems == ("a", "b", "c")
    with pytest.raises(KeyError), Problems():
        raise KeyError("not a refusal")
    Problems().refuse()
