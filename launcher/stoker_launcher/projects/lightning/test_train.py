"""pytest test_train.py: the script's parts without a cluster, in seconds."""

from __future__ import annotations

from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader

from train import Curve, train


def test_a_record_depends_on_its_index_alone() -> None:
    data = Curve(8)
    assert len(data) == 8
    assert torch.equal(data[3][0], data[3][0]) and not torch.equal(data[3][0], data[4][0])


def test_a_second_call_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    lightning.seed_everything(0)
    loader = DataLoader(Curve(256), batch_size=32)
    train(loader, tmp_path, steps=8, every=4)
    model = train(loader, tmp_path, steps=12, every=4)
    assert model.global_step == 12
