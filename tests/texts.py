"""A small model of texts and batches of any length, for tests of batches that are divided."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stoker.config.schema import Config
from stoker.data import Pad
from stoker.recipe import Recipe
from stoker.train.build import build
from stoker.train.state import Worker
from stoker.train.step import Step

BATCH, WORDS = 12, 50


class Reader(nn.Module):
    """Attention over a text's words and a class for each; keeps the shapes that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, WORDS)
        self.shapes: list[tuple[int, int]] = []

    def forward(self, ids: Any) -> Any:
        self.shapes.append(tuple(ids.shape))
        return self.head(self.layer(self.words(ids), src_key_padding_mask=ids == 0))


class Classified(Recipe):
    """Loss: a mean over records."""

    pad = {"ids": Pad(0, multiple=4)}  # noqa: RUF012 - as recipes declare it

    def model(self) -> Any:
        return Reader()

    def training_step(self, model: Any, batch: Any) -> Any:
        assert len(batch["name"]) == len(batch["ids"])
        assert [int(name) for name in batch["name"]] == batch["ids"][:, 0].tolist()
        scores = model(batch["ids"]).masked_fill((batch["ids"] == 0)[..., None], 0).sum(1)
        return nn.functional.cross_entropy(scores / batch["ids_length"][:, None], batch["label"])


class NextWord(Classified):
    """Loss: a mean over the words that follow another."""

    def training_step(self, model: Any, batch: Any) -> Any:
        scores, following = model(batch["ids"])[:, :-1], batch["ids"][:, 1:]
        return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten(), ignore_index=0)

    def loss_weight(self, batch: Any) -> Any:
        return (batch["ids_length"] - 1).sum()


def make(recipe: Recipe, rank: int = 0, world: int = 1, max_tokens: int | None = None, **train: Any) -> Any:
    """(worker, step) with weights that depend on the seed alone."""
    data = {"max_tokens": max_tokens}
    config = Config.model_validate({"seed": 3, "data": data, "train": {"lr": 0.1, **train}})
    worker = Worker(config, recipe, None, 0, rank, world, torch.device("cpu"))
    build(worker, records=4 * BATCH)
    return worker, Step(worker)


def feed(count: int, rank: int = 0, world: int = 1) -> list[dict[str, Any]]:
    """Batches of a rank as the feed gives them; with 1 to 40 words, most short, of which rank 1 has fewer."""
    chance = torch.Generator().manual_seed(8)
    batches = []
    for _ in range(count):
        lengths = (40 * torch.rand(BATCH, generator=chance) ** 3).long() + 1
        width = -(-int(lengths.max()) // 4) * 4
        ids = torch.randint(1, WORDS, (BATCH, width), generator=chance)
        ids = ids.masked_fill(torch.arange(width) >= lengths[:, None], 0)
        label = torch.randint(0, WORDS, (BATCH,), generator=chance)
        # The ranks' shares of it: the longer half and the shorter one.
        own = lengths.argsort(descending=True).chunk(world)[rank]
        width = -(-int(lengths[own].max()) // 4) * 4
        name = [str(int(i)) for i in ids[own, 0]]
        columns = {"ids": ids[own, :width], "ids_length": lengths[own], "label": label[own]}
        batches.append({**columns, "name": name})
    return batches
