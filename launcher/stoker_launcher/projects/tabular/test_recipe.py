"""pytest test_recipe.py: the recipe without a cluster, in seconds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipe import Features, Table

ROW = {"key": "a", "size": 60.0, "rooms": 3, "price": 300.0}


def test_a_row_becomes_features_and_a_target() -> None:
    found = Features()(ROW, np.random.default_rng(0))
    assert found["features"].tolist() == pytest.approx([0.6, 0.6, 1.0])
    assert found["price"] == pytest.approx(0.3)


def test_an_impossible_row_is_refused() -> None:
    with pytest.raises(ValueError, match="no home has 0 rooms"):
        Features()({**ROW, "rooms": 0}, np.random.default_rng(0))


def test_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    recipe = Table(data="unused")
    features = torch.rand(64, 3)
    batch = {"features": features, "price": features.sum(1)}
    model = recipe.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(50):
        loss = recipe.training_step(model, batch)["loss"]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
