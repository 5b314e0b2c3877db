"""A recipe's `collate`: what it gets, what it may return, and when it is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from stoker.data.feed.feed import as_tensors
from stoker.data.opening import open_data
from stoker.data.preprocessing.chain import Chain
from stoker.data.preprocessing.collating import all_of, collated, seed_of
from stoker.data.transport.batches import as_batch
from stoker.errors import SchemaError, UsageError
from stoker.schema import Config

RECORDS = [
    {
        "key": f"r{i}",
        "image": np.arange(i, i + 5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3),
        "flow": torch.full((2, 6), float(i)),
        "label": i,
        "score": i / 3,
        "small": np.float16(i),
        "name": f"name {i}",
    }
    for i in range(9)
]


def left(records: list[dict[str, Any]], collate: Any = None) -> tuple[dict[str, Any], Any]:
    """What leaves a chain of no stages."""
    return Chain([], seed=1, collate=collate).run([dict(each) for each in records], 0)


def test_with_the_default_collate_of_pytorch_a_batch_is_as_it_is_without() -> None:
    columns, report = left(RECORDS)
    expected, ids, _, _ = as_tensors(as_batch(columns, report.schemas[-1]))
    columns, report = left(RECORDS, default_collate)
    # Rows of two blocks, as they come from two hosts.
    records, own_ids, _ = all_of([(columns, 0, 4), (columns, 4, report.rows)])
    batch = collated(default_collate, records, "")
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        if isinstance(values, list):
            assert batch[name] == values
        else:
            assert batch[name].dtype == values.dtype
            assert torch.equal(batch[name], values)
    assert own_ids.tolist() == ids.tolist()


def test_records_of_any_shape_and_type_arrive() -> None:
    odd = [{"key": str(i), "boxes": np.ones((i, 4)), "tags": [("a", i)], "hint": {i}} for i in range(4)]
    columns, report = left(odd, list)
    assert report.rows == 4
    assert not report.bad
    seen: list[Any] = []

    def collate(records: list[Any]) -> dict[str, Any]:
        seen.extend(records)
        return {"boxes": [record["boxes"] for record in records], "n": np.arange(4)}

    batch = collated(collate, all_of([(columns, 0, 4)])[0], "")
    assert [tuple(boxes.shape) for boxes in batch["boxes"]] == [(i, 4) for i in range(4)]
    assert torch.equal(batch["n"], torch.arange(4))
    assert [(record["tags"], record["hint"]) for record in seen] == [([("a", i)], {i}) for i in range(4)]


def test_a_record_that_lacks_a_column_is_quarantined_and_another_type_ends_the_run() -> None:
    _, report = left([{"key": "a", "x": 1, "y": 2}, {"key": "b", "x": 1, "y": None}], list)
    assert [bad.key for bad in report.bad] == ["b"]
    with pytest.raises(SchemaError, match="'x' is float64 in record b, int64 in record a"):
        left([{"key": "a", "x": 1}, {"key": "b", "x": 1.5}], list)


def test_draws_depend_on_seed_pass_and_records_alone() -> None:
    def collate(records: list[Any]) -> dict[str, Any]:
        return {"drawn": [(random.random(), np.random.rand(), torch.rand(()).item()) for _ in records]}

    def drawn(seed: str) -> Any:
        return collated(collate, [{}, {}], seed)["drawn"]

    ids = np.array([3, 4])
    first = drawn(seed_of(1, "train", 0, ids))
    assert drawn(seed_of(1, "train", 0, ids)) == first
    for other in ((2, "train", 0, ids), (1, "val", 0, ids), (1, "train", 1, ids), (1, "train", 0, ids[::-1])):
        assert drawn(seed_of(*other)) != first


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ([1, 2, 3], "collate returned a list; return a dict"),
        ({}, "collate returned a dict without entries; return a dict"),
        (None, "collate returned a NoneType without entries"),
        ({1: [1, 2, 3]}, "return a dict: names → tensors or lists"),
        ({"x": torch.zeros(2, 3)}, "collate returned 2 rows as 'x' for 3 records"),
        ({"x": [1, 2, 3], "y": [1, 2]}, "collate returned 2 rows as 'y' for 3 records"),
        ({"x": torch.zeros(())}, "collate returned a Tensor as 'x' for 3 records"),
        ({"x": {"ids": [1, 2, 3]}}, "collate returned a dict as 'x' for 3 records"),
        ({"x": "abc"}, "collate returned a str as 'x' for 3 records"),
    ],
)
def test_what_is_no_batch_of_these_records_is_refused(returned: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        collated(lambda records: returned, [{}, {}, {}], "")


@pytest.mark.parametrize(
    ("recipe", "data", "text"),
    [
        ("Padded", {}, "recipe: Padded has both pad and collate; pad in collate"),
        ("Collated", {"max_tokens": 8}, "data.max_tokens: the recipe pads no column"),
        ("Wrong", {}, "train: collate: KeyError: 'nobody' (collating.py:"),
    ],
)
def test_a_wrong_collate_is_refused_before_training(recipe: str, data: dict[str, Any], text: str) -> None:
    config = Config.model_validate({"recipe": f"collating:{recipe}", "data": data})
    with pytest.raises(UsageError) as refused:
        open_data(config)
    assert text in str(refused.value)
