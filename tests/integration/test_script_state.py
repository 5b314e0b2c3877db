"""What a script sets in its own modules and in the environment reaches the processes that make its batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = """
import argparse, collections, dataclasses, enum, random, threading

class CfgNode(dict):
    "As that of yacs: attributes are items, and a frozen one refuses to be changed."
    def __getattr__(self, name):
        if name not in self: raise AttributeError(name)
        return self[name]
    def __init__(self, **items): super().__init__(items); self.__dict__["frozen"] = True
    def __setattr__(self, name, value): raise AttributeError("frozen")

class Options:
    def __init__(self): self.crop = 8

@dataclasses.dataclass
class Model:
    width: int = 1

class Mode(enum.Enum):
    FIT = 1
    TEST = 2

SIZE, MODE, MISSING, PAIR = 8, Mode.FIT, object(), (1, 2)
SCALE, NESTED, NAMES, SEEN = {"by": 1}, {"a": {"b": [1]}}, ["a"], {1}
CFG, OPTIONS, MODEL = CfgNode(SOLVER=CfgNode(LR=1)), Options(), Model()
opt, ORDER = None, collections.OrderedDict(a=1)
RNG, LOCK, COUNT, WRITER = random.Random(3), threading.Lock(), 0, None

def scaled(value, by=SCALE, missing=MISSING):
    return value * by["by"], missing is MISSING
"""
ROWS = """
import os, sys
import torch
import settings
from PIL import Image, ImageFile
from settings import CFG, NAMES
from tools.augment import crop
import tools.augment

load = crop

class Rows:
    classes, table = 0, {"x": 1}

    class Inner:
        depth = 1

    def __len__(self):
        return 8

    def __getitem__(self, index):
        import lazily
        settings.COUNT += 0
        opt = vars(settings.opt) if settings.opt else None
        return repr([
            settings.SIZE, settings.MODE.name, settings.PAIR, settings.SCALE, settings.NESTED, NAMES,
            settings.SEEN,
            CFG, CFG.frozen, settings.OPTIONS.crop, settings.MODEL, opt, settings.ORDER, settings.scaled(2),
            settings.COUNT, self.classes, self.table, self.Inner.depth, load(1), tools.augment.SIDE,
            tools.augment.PARTS, lazily.LATE, torch.tensor(0.1).dtype,
            ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS, os.environ.get("DATA_ROOT"),
            os.environ.get("GONE"), sys.argv,
        ])
"""
AUGMENT = """
SIDE, PARTS = 1, []
def crop(value): return value + SIDE
def flip(value): return -value
"""
SCRIPT = """
import argparse, os, sys, threading, warnings
import lazily, rows, settings, tools.augment
import torch.utils.data
from PIL import Image, ImageFile
import stoker

def first(n):
    settings.SIZE, settings.MODE, settings.PAIR = 32 + n, settings.Mode.TEST, (n, (n,))
    settings.SCALE["by"], settings.NESTED["a"]["b"] = 5 + n, [n, {"c": n}]
    settings.NAMES[:] = ["b", "c"][: n + 1]
    settings.SEEN.add(7 + n)
    dict.__setitem__(settings.CFG.SOLVER, "LR", 0.5 + n)
    settings.OPTIONS.crop, settings.MODEL.width = 4 + n, 9 + n
    settings.opt = argparse.Namespace(lr=0.1, n=n)
    settings.ORDER["z"] = n
    settings.COUNT += 1
    rows.Rows.classes, rows.Rows.table["x"], rows.Rows.Inner.depth = n + 3, n, n + 2
    rows.load = tools.augment.flip if n else tools.augment.crop
    tools.augment.SIDE = 2 + n
    tools.augment.PARTS.append(n)
    lazily.LATE = n
    torch.set_default_dtype((torch.float32, torch.float64, torch.float16)[n])
    ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = n > 0, 7 + n
    os.environ["DATA_ROOT"] = f"/data/{n}"
    os.environ.pop("GONE", None)

OWN = {"value": 1}

class Main(rows.Rows):
    def __getitem__(self, index):
        return super().__getitem__(index), OWN["value"]

def batches(of):
    return [list(batch) for batch in of(Main(), batch_size=2, num_workers=2, collate_fn=list)]

before = of_stoker = None
for n in range(3):
    first(n)
    OWN["value"] = n
    expected, found = (batches(each) for each in (torch.utils.data.DataLoader, stoker.DataLoader))
    assert expected == found, (n, expected[0], found[0])
    if n == 0:
        early, want = iter(stoker.DataLoader(Main(), 2, num_workers=2, collate_fn=list)), expected
        next(early)
assert [*early] == want[1:], "a pass keeps the values with which it began while others run"
settings.WRITER, settings.LOCK = threading.Thread(), threading.Lock()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert batches(stoker.DataLoader) == found
texts = {str(each.message) for each in told}
assert len(texts) == 1 and "settings.WRITER (threading.Thread)" in texts.pop(), texts
print("done")
"""


@pytest.mark.usefixtures("ray_cluster")
def test_what_a_script_sets_reaches_its_batches_as_with_torch(tmp_path: Path) -> None:
    import os

    import ray

    files = {
        "settings": SETTINGS,
        "rows": ROWS,
        "tools/augment": AUGMENT,
        "lazily": "LATE = -1",
        "script": SCRIPT,
    }
    (tmp_path / "tools").mkdir()
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    env = {**os.environ, "GONE": "1", "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "script.py", "--size", "3"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stderr[-3000:]
