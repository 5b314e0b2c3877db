"""Reviews of varying length: CPU hosts tokenize them, a small transformer classifies the sentiment."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from stoker.data import Pad, Record, RecordTransform, read_parquet
from stoker.recipe import Batch, Recipe, Split

if TYPE_CHECKING:
    from torch import Tensor, nn

FOLDER = Path(".data/reviews")
GOOD, BAD = ["good", "great", "lovely", "superb"], ["bad", "poor", "awful", "dull"]
FILLING = ["the", "film", "plot", "cast", "was", "a", "it", "then"]


def write(folder: Path = FOLDER, records: int = 4000) -> None:
    """Laptop: write train.parquet and val.parquet unless they exist; "not" inverts the meaning of a word."""
    import pyarrow as pa
    from pyarrow import parquet

    if (folder / "val.parquet").exists():
        return
    rng = np.random.default_rng(7)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", records), ("val", records // 4)):
        rows = []
        for _ in range(count):
            praises, turned = rng.random() < 0.5, rng.random() < 0.3
            words = list(rng.choice(FILLING, int(rng.geometric(0.1)) % 38))
            word = rng.choice(GOOD if praises != turned else BAD)
            words.insert(int(rng.integers(len(words) + 1)), f"{'not' if turned else 'so'} {word}")
            rows.append({"text": " ".join(words), "label": int(praises)})
        parquet.write_table(
            pa.Table.from_pylist(rows), folder / f"{split}.parquet", row_group_size=500
        )


class Tokenize(RecordTransform):
    """Chain worker: `text` → `ids`, one number ≥ 1 per word. Replace it by any tokenizer."""

    random = False

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        words = record["text"].lower().split()
        if not words:
            raise ValueError("no word in the text")  # which quarantines the record
        ids = np.array([1 + zlib.crc32(word.encode()) % (self.vocabulary - 1) for word in words])
        return {"key": record["key"], "ids": ids, "label": record["label"]}


class Reviews(Recipe):
    """Every host: trains a one-layer transformer on texts and labels 0 or 1 from Parquet."""

    data: str
    vocabulary: int = Field(4096, ge=2, description="number of hash buckets for words")

    pad = {"ids": Pad(0, multiple=8)}  # noqa: RUF012 - as recipes declare it

    def read(self, split: Split) -> Any:
        return read_parquet(self.data, split, columns=["text", "label"])

    def preprocess(self, split: Split) -> list[Any]:
        return [Tokenize(self.vocabulary)]

    def model(self) -> nn.Module:
        from torch import nn

        class Network(nn.Module):
            def __init__(self, words: int, width: int = 32) -> None:
                super().__init__()
                self.words = nn.Embedding(words, width, padding_idx=0)
                self.near = nn.Conv1d(width, width, 3, padding=1)
                self.layer = nn.TransformerEncoderLayer(
                    width, 4, 2 * width, dropout=0.0, batch_first=True
                )
                self.head = nn.Linear(width, 2)

            def forward(self, ids: Tensor) -> Tensor:
                padded = ids == 0
                x = self.words(ids)
                x = self.layer(x + self.near(x.mT).mT, src_key_padding_mask=padded)
                x = x.masked_fill(padded[..., None], 0).sum(1) / (~padded).sum(1, keepdim=True)
                return self.head(x)  # type: ignore[no-any-return]

        return Network(self.vocabulary)

    def training_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        import torch.nn.functional as F

        preds = model(batch["ids"])
        return {
            "loss": F.cross_entropy(preds, batch["label"]),
            "preds": preds,
            "target": batch["label"],
        }
