"""Which libraries a recipe imports, found in its files without importing them."""

from __future__ import annotations

from pathlib import Path

from stoker.config.schema import Config
from stoker.entry.libraries import libraries_of

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
    assert list(found.at_once) == [*names, "pandas"], "no Ray, which must be imported after forking"
    assert "cv2" in found.in_functions
    assert not found.quick
    assert not any("timm" in name for name in found.all()), "CPU hosts may never need a model's library"


def test_a_recipe_is_quick_if_neither_it_nor_its_modules_import_what_may_load_pytorch(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "cats.py").write_text("import json\nimport numpy as np\nfrom helping import crop\n")
    helping, recipe = tmp_path / "helping.py", Config(recipe="mine.cats:Mine")
    for text, quick in {
        "from stoker.data import read_images\ndef model():\n    import torch\n": True,
        "import transformers\n": False,
        "def read():\n    import ray.data\n": False,
    }.items():
        helping.write_text(text)
        assert libraries_of(recipe, tmp_path).quick == quick, text
    assert libraries_of(Config(), tmp_path).quick and libraries_of(Config(script="train.py"), tmp_path).quick
    assert not libraries_of(Config(recipe="installed.package:Recipe"), tmp_path).quick


def test_the_built_in_recipe_needs_what_its_chain_imports(tmp_path: Path) -> None:
    for name in ("ImageClassification", "stoker.image_classification:ImageClassification"):
        assert libraries_of(Config(recipe=name), tmp_path).all() == ("torchvision.transforms.v2",)


def test_a_script_and_a_file_that_cannot_be_parsed_have_none(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import torch\ndef (:\n")
    assert libraries_of(Config(script="train.py"), tmp_path).all() == ()
    assert libraries_of(Config(recipe="broken:Recipe"), tmp_path).all() == ()
    assert libraries_of(Config(recipe="absent:Recipe"), tmp_path).all() == ()
