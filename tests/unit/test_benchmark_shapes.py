"""The benchmark of the example recipes: the DataLoader it compares with does the same work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from whole_way import Way

from benchmarks import shapes
from stoker.serve.opening import pads_of


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("text", 1e-9),
        ("audio", 1e-6),
        ("segmentation", 0.3),  # of few records, cropped at random
        ("video", 0.1),
    ],
)
@pytest.mark.long
def test_the_peer_gives_the_same_columns_with_the_same_in_them(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tolerance: float
) -> None:
    monkeypatch.setitem(shapes.KINDS, kind, (shapes.KINDS[kind][0], 20, 2, tolerance))
    monkeypatch.setattr(shapes, "BATCH", 4)
    shapes.write(kind, tmp_path)
    folder = str(tmp_path / "data")
    recipe = shapes.recipe_of(kind)(data=folder)
    steps, bad = way.batches(
        recipe.read("train"),
        recipe.preprocess("train"),
        block_records=8,
        batch_size=4,
        workers=1,
        direct=False,
        pad=pads_of(recipe),
    )
    assert not bad
    ours = [{name: v for name, v in batch.items() if name != "__id"} for (batch,) in steps]
    shapes.check(kind, shapes.consume(ours, 40), shapes.peer(kind, folder))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 11}, "DataLoader gave 11 of 200000 records"),
        ({"kinds": {"ids": ["torch.int32", 2]}}, "the DataLoader {'ids': \\['torch.int32', 2\\]}"),
        ({"means": {"ids": 21.0}}, "ids sums to 20.0 a record"),
    ],
)
def test_a_data_loader_that_does_other_work_is_no_peer(change: dict[str, Any], reason: str) -> None:
    seen = {"rows": shapes.total_of("text"), "means": {"ids": 20.0}, "kinds": {"ids": ["torch.int64", 2]}}
    shapes.check("text", seen, seen)
    with pytest.raises(RuntimeError, match=reason):
        shapes.check("text", seen, seen | change)
