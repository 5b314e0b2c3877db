"""Which libraries a recipe imports, found in its files without importing them."""

from __future__ import annotations

from pathlib import Path

from stoker.config.schema import Config
from stoker.hosts.forks import libraries_of

RECIPE = """
from typing import TYPE_CHECKING
import ray
import torch.nn.functional as F
from torchvision.transforms import v2
from helping import crop
if TYPE_CHECKING:
    import timm
try:
    import scipy.ndimage
except ImportError:
    scipy = None

class Mine:
    def model(self):
        import timm
    def __call__(self, record):
        import cv2
"""


def test_imports_of_the_recipe_and_of_modules_beside_it_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "cats.py").write_text(RECIPE)
    (tmp_path / "helping.py").write_text("import pandas\nimport mine.cats\nimport boto3\n")
    found = libraries_of(Config(recipe="mine.cats:Mine"), tmp_path)
    names = ["torch.nn.functional", "torchvision.transforms", "torchvision.transforms.v2", "scipy.ndimage"]
    assert {*names, "pandas", "cv2"} <= {*found}
    assert not any(name.split(".")[0] in ("timm", "ray", "boto3") for name in found), (
        "CPU hosts may never need a model's library"
    )


def test_the_built_in_recipe_needs_what_its_chain_imports(tmp_path: Path) -> None:
    for name in ("ImageClassification", "stoker.image_classification:ImageClassification"):
        assert libraries_of(Config(recipe=name), tmp_path) == ("torchvision.transforms.v2",)


def test_a_script_and_a_file_that_cannot_be_parsed_have_none(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import torch\ndef (:\n")
    assert libraries_of(Config(script="train.py"), tmp_path) == ()
    assert libraries_of(Config(recipe="broken:Recipe"), tmp_path) == ()
    assert libraries_of(Config(recipe="absent:Recipe"), tmp_path) == ()
