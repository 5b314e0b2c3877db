"""A recipe's `collate`: what it gets, what it may return, and when it is refused."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from damage import chained
from torch.utils.data import default_collate
from torchvision.transforms import v2

from stoker.chain.collating import all_of, collated, records_of, seed_of
from stoker.config.schema import Config
from stoker.data import DecodeMask
from stoker.errors import SchemaError, UsageError
from stoker.protocol import BlockSlice
from stoker.serve.blocks.batches import as_batch
from stoker.serve.blocks.collator import CollatePlacement
from stoker.serve.opening import open_data
from stoker.train.device import on_tensors
from stoker.train.feed import as_tensors

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
    return chained([dict(each) for each in records], seed=1, collate=collate)


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
    odd = [{"boxes": np.ones((i, 4)), "tags": [("a", i)], "hint": {i}} for i in range(4)]
    odd = [{"key": str(i), **record} for i, record in enumerate(odd)]
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
    assert [(record["tags"], record["hint"]) for record in seen] == [
        ([("a", i)], {i}) for i in range(4)
    ]


def test_a_record_that_lacks_a_column_is_quarantined_and_another_type_ends_the_run() -> None:
    _, report = left([{"key": "a", "x": 1, "y": 2}, {"key": "b", "x": 1, "y": None}], list)
    assert [bad.key for bad in report.bad] == ["b"]
    with pytest.raises(SchemaError, match="'x' is float64 in record b, int64 in record a"):
        left([{"key": "a", "x": 1}, {"key": "b", "x": 1.5}], list)


def test_arrays_of_any_memory_order_arrive_and_masked_ones_keep_their_mask() -> None:
    base = np.arange(6, dtype=np.int16).reshape(2, 3)
    frozen = base.copy()
    frozen.flags.writeable = False
    masked = np.ma.masked_array(np.arange(2.0), [True, False])
    odd = {"big": base.astype(">i2"), "back": base[:, ::-1], "frozen": frozen, "masked": masked}
    columns, _ = left([{"key": "a", **odd}], list)

    def collate(records: list[Any]) -> dict[str, Any]:
        (record,) = records
        assert np.ma.is_masked(record["masked"])
        record["frozen"] += 1
        return {name: record[name][None] for name in ("big", "back", "frozen")}

    batch = collated(collate, all_of([(columns, 0, 1)])[0], "")
    assert torch.equal(batch["big"][0], torch.from_numpy(base))
    assert batch["back"].tolist() == [base[:, ::-1].tolist()]
    assert batch["frozen"].tolist() == (base[None] + 1).tolist()


def test_collate_gets_plain_tensors_of_declared_parts() -> None:
    image = np.zeros((20, 30, 3), np.uint8)
    record = {"key": "0", "image": image, "mask": image[..., 0]}
    columns, _ = chained([record], DecodeMask(), v2.RandomCrop(12), collate=lambda records: {})
    [record] = records_of(columns["__record"])
    assert type(record["mask"]) is type(record["image"]) is np.ndarray


def test_what_cannot_be_sent_names_its_record() -> None:
    says = r"record a cannot be sent to collate: .*; drop in the chain"
    with pytest.raises(SchemaError, match=says):
        left([{"key": "a", "x": (i for i in range(3))}], list)


def test_an_error_names_records_of_the_batch() -> None:
    columns, report = left(RECORDS, list)

    def collate(records: list[Any]) -> Any:
        raise KeyError("caption")

    says = r"^collate: KeyError: 'caption' .*, with records r0, r1, r2, …$"
    with pytest.raises(SchemaError, match=says):
        collated(collate, all_of([(columns, 0, report.rows)])[0], "")


def test_a_batch_moves_to_a_device_with_its_types() -> None:
    class Target(NamedTuple):
        boxes: torch.Tensor
        name: str

    one = torch.ones(2)
    batch = {"x": one, "t": [Target(one, "a")], "pair": (one, "b"), "o": OrderedDict(x=one)}
    batch["s"] = ["a", "b"]
    moved = on_tensors(batch, lambda value: value + 1)
    assert [*map(type, moved.values())] == [torch.Tensor, list, tuple, OrderedDict, list]
    assert type(moved["t"][0]) is Target and moved["t"][0].name == "a" and moved["s"] == ["a", "b"]
    for value in (moved["x"], moved["t"][0].boxes, moved["pair"][0], moved["o"]["x"]):
        assert value.tolist() == [2, 2]
    assert batch["x"].tolist() == [1, 1]


def test_work_is_spread_over_hosts_those_with_the_records_first() -> None:
    parts = [BlockSlice(None, 0, 30, "b"), BlockSlice(None, 0, 20, "a")]
    hosts = CollatePlacement(["a", "b", "c"], at_once=6)
    taken = [hosts.take(parts) for _ in range(6)]
    assert taken == ["b", "b", "a", "a", "c", "c"]
    hosts.done("a")
    assert hosts.take([BlockSlice(None, 0, 5, "b")]) == "a"
    assert hosts.take(parts) == "b", "all have enough to do"
    assert CollatePlacement([], 2).take(parts) == "b"


def test_draws_depend_on_seed_pass_and_records_alone() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    def drawn(seed: str) -> Any:
        return collated(lambda records: {"drawn": [draw() for _ in records]}, [{}, {}], seed)[
            "drawn"
        ]

    ids = np.array([3, 4])
    first = drawn(seed_of(1, "train", 0, ids))
    assert drawn(seed_of(1, "train", 0, ids)) == first
    others = [(2, "train", 0, ids), (1, "val", 0, ids), (1, "train", 1, ids)]
    for other in [*others, (1, "train", 0, ids[::-1])]:
        assert drawn(seed_of(*other)) != first
    assert seed_of(1, "val", 0, ids) == seed_of(1, "val", 3, ids), "as validation is"


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
        ({"x": np.ma.masked_array(np.zeros(3))}, "a MaskedArray as 'x' for 3 records"),
    ],
)
def test_what_is_no_batch_of_these_records_is_refused(returned: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        collated(lambda records: returned, [{}, {}, {}], "")


WRONG = {
    "Padded": ({}, "recipe: Padded has both pad and collate; pad in collate"),
    "Wrong": ({}, "train: collate: KeyError: 'nobody' (collating.py:"),
    "Collated": ({"bucket_by": "mark"}, "bucket_by: no record has 'mark'; columns: x0, x1, y"),
}


@pytest.mark.parametrize("recipe", WRONG)
def test_a_wrong_collate_is_refused_before_training(recipe: str) -> None:
    data, text = WRONG[recipe]
    with pytest.raises(UsageError) as refused:
        open_data(Config.model_validate({"recipe": f"collating:{recipe}", "data": data}))
    assert text in str(refused.value)
