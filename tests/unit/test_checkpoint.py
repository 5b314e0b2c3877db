"""A checkpoint is whole or not there, and a damaged one is passed over with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.training import checkpoint


def save(folder: Path, step: int) -> checkpoint.Checkpoint:
    weights = {"w": torch.full((64,), float(step))}
    return checkpoint.save(folder, step, weights, {"optimizer": {"lr": 0.1}}, {"step": step, "epoch": step})


def test_the_newest_comes_back_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    found = checkpoint.newest_valid(tmp_path)
    assert found is not None
    assert found.meta["step"] == 2
    weights, state = checkpoint.load(found)
    assert torch.equal(weights["w"], torch.full((64,), 2.0))
    assert state["optimizer"] == {"lr": 0.1}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "unfinished"])
def test_a_damaged_one_is_passed_over_and_named(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2).path
    file = newest / "model.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[:-40])
    elif damage == "remove":
        file.unlink()
    else:
        (newest / checkpoint.MANIFEST).unlink()
    said: list[str] = []
    found = checkpoint.newest_valid(tmp_path, said.append)
    assert found is not None
    assert found.meta["step"] == 1
    assert len(said) == 1
    assert "step-00000002 is passed over" in said[0]


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    saved = [save(tmp_path, step) for step in range(1, 6)]
    checkpoint.mark_best(tmp_path, saved[0], "val/acc1", 0.9)
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == [saved[i].path.name for i in (0, 3, 4)]
