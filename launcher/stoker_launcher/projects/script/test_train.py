"""pytest test_train.py: the script's parts without a cluster, in seconds."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from train import Curve, network, train


def test_a_record_depends_on_its_index_alone() -> None:
    data = Curve(8)
    assert len(data) == 8
    assert torch.equal(data[3][0], data[3][0]) and not torch.equal(data[3][0], data[4][0])


def test_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    model, loader = network(), DataLoader(Curve(256), batch_size=32)
    assert train(loader, model, epochs=20, lr=0.01) < train(loader, network(), epochs=1, lr=0.0) / 4
