"""pytest test_recipe.py: the recipe without a cluster, in seconds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipe import Reviews, Tokenize


def test_equal_words_get_equal_numbers() -> None:
    record = {"key": "a", "text": "so good SO bad", "label": 1}
    found = Tokenize(100)(record, np.random.default_rng(0))
    first, second, third, last = found["ids"]
    assert first == third and second != last and found["ids"].min() > 0 and found["label"] == 1


def test_a_text_without_a_word_is_refused() -> None:
    with pytest.raises(ValueError, match="no word"):
        Tokenize(100)({"key": "a", "text": " ", "label": 1}, np.random.default_rng(0))


def test_padding_does_not_change_an_answer() -> None:
    torch.manual_seed(0)
    recipe = Reviews(data="unused", vocabulary=50)
    model = recipe.model().eval()
    short, padded = torch.tensor([[3, 4, 5]]), torch.tensor([[3, 4, 5, 0, 0, 0, 0, 0]])
    assert torch.allclose(model(short), model(padded), atol=1e-5)
    loss = recipe.training_step(model, {"ids": padded, "label": torch.tensor([1])})["loss"]
    assert torch.isfinite(loss)
