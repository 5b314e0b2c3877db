"""Images and labels in tables as other tools write them: a job trains on the rows, or says what it lacks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from stoker.checks import open_all
from stoker.config import load

COLOURS = [(40 * i, 255 - 30 * i, 10 * i) for i in range(6)]
LABELS = [i % 2 for i in range(6)]


def png(colour: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


PNGS = [png(colour) for colour in COLOURS]
STRUCTS = pa.array([{"bytes": content, "path": f"{i}.png"} for i, content in enumerate(PNGS)])


def write(
    root: Path, table: pa.Table, name: str = "0.parquet", splits: tuple[str, ...] = ("train", "val")
) -> str:
    for split in splits:
        (root / split).mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, root / split / name)
    return str(root)


def opened(root: Any, **params: Any) -> tuple[dict[str, Any], Any]:
    """The parameters and data of a job, as they are before its cluster forms."""
    params = {"data": str(root), "model": "test_resnet", "image_size": 8, "augment": "none", **params}
    config, data = open_all(load({"recipe": "ImageClassification", "params": params}))
    return config.params, data


def trained(data: Any, split: str = "train") -> list[tuple[tuple[int, ...], int]]:
    """Colour and label of each record of a split, as a batch has them."""
    source, found = data.sources[split], []
    reader = source.for_workers()
    for shard in source.shards(4, None):
        columns, report = data.chains[split].run(reader.read(shard, None), 0)
        assert not report.bad
        image = columns["image__hwc"]
        assert (image == image[:, :1, :1]).all()
        found += [(tuple(p.tolist()), int(n)) for p, n in zip(image[:, 0, 0], columns["label"], strict=True)]
    assert len(found) == source.count()
    return found


WHOLE = list(zip(COLOURS, LABELS, strict=True))


@pytest.mark.parametrize("others", [(), ("width", "height")])
def test_a_hugging_face_image_before_the_label(others: tuple[str, ...], tmp_path: Path) -> None:
    sizes = {name: [40 + i for i in range(6)] for name in others}
    params, data = opened(write(tmp_path, pa.table({"image": STRUCTS, "label": LABELS, **sizes})))
    assert params["num_classes"] == 2
    assert trained(data) == trained(data, "val") == WHOLE
