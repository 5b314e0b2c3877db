"""Which libraries a recipe imports, found in its file without importing it."""

from __future__ import annotations

from pathlib import Path

from stoker.config.schema import Config
from stoker.hosts.forks import libraries_of

RECIPE = """
from typing import TYPE_CHECKING
import ray
import torch.nn.functional as F
from torchvision.transforms import v2
import torchmetrics
import cv2, boto3
if TYPE_CHECKING:
    import scipy

class Mine:
    def model(self):
        import timm
"""


def test_what_a_recipe_imports_before_anything_runs_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "cats.py").write_text(RECIPE)
    found = libraries_of(Config(recipe="mine.cats:Mine"), tmp_path)
    assert {
        "torch.nn.functional",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "cv2",
    } <= {*found}
    others = {name.split(".")[0] for name in found} - {"torch", "torchvision", "cv2"}
    assert not others, "CPU hosts may never need a model's library"


def test_the_built_in_recipe_needs_what_its_chain_imports(tmp_path: Path) -> None:
    (tmp_path / "stoker").mkdir()
    (tmp_path / "stoker" / "image_classification.py").touch()
    for name in ("ImageClassification", "stoker.image_classification:ImageClassification"):
        assert libraries_of(Config(recipe=name), tmp_path) == ["torchvision.transforms.v2"]


def test_a_script_and_an_absent_file_have_none_and_broken_files_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_bytes(b"import torch\ndef (:\n\xff\n")
    assert libraries_of(Config(script="train.py"), tmp_path) == []
    for recipe in ("absent:Recipe", "/"):
        assert libraries_of(Config(recipe=recipe), tmp_path) == []
    assert libraries_of(Config(recipe="broken:Recipe"), tmp_path) == ["torch"]
