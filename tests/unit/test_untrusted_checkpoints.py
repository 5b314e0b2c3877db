"""A checkpoint is data: whoever can write one cannot run code with it."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import Attack

from stoker.checkpoints import format as checkpoint
from stoker.checkpoints.format import Content
from stoker.storage.checkpoint_store import MANIFEST, open_store, sha256, verify

ROOT = Path(__file__).resolve().parents[2]

SAFE_LOADERS = ("UniqueKeys", "yaml.BaseLoader", "yaml.SafeLoader")
ARGUED = {
    "source_dir/stoker/config/values.py": (1, "YAML, by loaders derived from SafeLoader and BaseLoader"),
    "source_dir/stoker/serve/shards.py": (1, "chains, pickled by the head of this run"),
    "source_dir/stoker/read/host_cache.py": (1, "records in a folder that only this user may enter"),
    "source_dir/stoker/chain/collating.py": (2, "records and a recipe's name, by this run"),
    "source_dir/stoker/serve/blocks/packing.py": (1, "by chain workers of this script's own job"),
    "source_dir/stoker/train/export.py": (1, "a copy of an object of this very process"),
    "source_dir/stoker/read/identity.py": (1, "a copy of an object of this very process"),
    "source_dir/stoker/chain/probing.py": (1, "of the head of this run"),
    "launcher/advise/peek/peek_run.py": (1, "a copy of an object of this very process"),
}
"""Where pickles are read, how often, and why nobody else can have written them."""

READERS = {"pickle", "cloudpickle", "cPickle", "dill", "joblib", "marshal", "shelve"}


def forge(folder: Path, state: Any) -> checkpoint.Checkpoint:
    """A checkpoint whose state an attacker wrote, with a manifest that fits."""
    saved = checkpoint.save(
        open_store(str(folder)), Content({"w": torch.zeros(3)}, {}, {"step": 5, "monitored": None})
    )
    torch.save(state, folder / saved.name / checkpoint.STATE)
    sums = json.loads((folder / saved.name / MANIFEST).read_text())
    sums[checkpoint.STATE] = sha256(folder / saved.name / checkpoint.STATE)
    (folder / saved.name / MANIFEST).write_text(json.dumps(sums))
    assert verify(saved.store, saved.name) is None
    return saved


@pytest.mark.parametrize("where", ["optimizer", "ranks"])
def test_a_forged_state_is_refused_and_nothing_of_it_runs(tmp_path: Path, where: str) -> None:
    mark = tmp_path / "executed"
    saved = forge(tmp_path / "kept", {where: [Attack(mark)]})
    with pytest.raises(OSError, match="could run code") as caught:
        checkpoint.load_checkpoint(saved)
    assert not mark.exists()
    text = str(caught.value)
    assert saved.path in text and "system" in text and "\n" not in text


def test_a_plain_pickle_in_its_place_is_refused_too(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    saved = forge(tmp_path / "kept", {})
    file = Path(saved.path) / checkpoint.STATE
    file.write_bytes(pickle.dumps(Attack(mark)))
    with pytest.raises(OSError, match="could run code"):
        checkpoint.load_checkpoint(saved)
    assert not mark.exists()


def unsafe_reads(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in READERS:
            names = [alias.name for alias in node.names if "load" in alias.name.lower()]
            found += [f"line {node.lineno}: from {node.module} import {name}" for name in names]
        if not isinstance(node, ast.Call):
            continue
        words = ast.unparse(node.func).split(".")
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        unsafe = (
            given.get("weights_only") == "False"
            or given.get("allow_pickle", "False") != "False"
            or (words == ["torch", "load"] and given.get("weights_only") != "True")
            or (len(words) > 1 and words[-2] in READERS and words[-1] in ("load", "loads", "open"))
            or (words == ["yaml", "load"] and given.get("Loader") not in SAFE_LOADERS)
            or words in (["eval"], ["exec"], ["yaml", "unsafe_load"], ["yaml", "full_load"])
            or words[-1] == "Unpickler"
        )
        found += [f"line {node.lineno}: {ast.unparse(node)}"] if unsafe else []
    return found


@pytest.mark.long
def test_no_source_file_reads_pickles_but_those_that_are_argued() -> None:
    files = [
        path
        for folder in ("source_dir", "launcher", "benchmarks", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): unsafe_reads(path) for path in files}
    counts = {name: len(calls) for name, calls in found.items() if calls}
    assert counts == {name: count for name, (count, _) in ARGUED.items()}, found


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "trainer.fit(m, weights_only=False)",
        "pickle.loads(b)",
        "ray.cloudpickle.load(f)",
        "from pickle import loads",
        "np.load(f, allow_pickle=True)",
        "yaml.load(t, Loader=yaml.Loader)",
    ],
)
def test_the_scan_sees_what_it_looks_for(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.py").write_text(line)
    assert len(unsafe_reads(tmp_path / "x.py")) == 1
