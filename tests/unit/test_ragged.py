"""Rows that differ in length are padded as declared, collated by the recipe, or refused; never a wrong batch."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from damage import chained
from torch.utils.data import default_collate
from torchvision.transforms import v2
from whole_way import Listed, Store, Way

from stoker.chain.chain import Chain
from stoker.chain.collating import all_of, collated, records_of, seed_of
from stoker.chain.columns import Ragged, block_columns, block_parts, schema_of
from stoker.config.schema import Config
from stoker.data import DecodeMask, Pad
from stoker.errors import DataError, SchemaError, UsageError
from stoker.protocol import BlockSlice
from stoker.read.sources import record_id
from stoker.serve.blocks import wire
from stoker.serve.blocks.batches import BatchBuilder, BufferPool, as_batch
from stoker.serve.blocks.client import RowRequest
from stoker.serve.blocks.collator import CollatePlacement
from stoker.serve.opening import open_data
from stoker.train.device import on_tensors
from stoker.train.feed import as_tensors

LENGTHS = [3, 0, 5, 1, 2, 0, 4, 4, 1, 0, 7, 2]
ROWS = [
    {"key": f"r{i}", "ids": np.arange(10 * i, 10 * i + n, dtype=np.int32), "y": i}
    for i, n in enumerate(LENGTHS)
]


def batches(way: Way, rows: list[dict[str, Any]] = ROWS, **changes: Any) -> list[dict[str, Any]]:
    sizes = {"block_records": 5, "batch_size": 4, "workers": 1, "direct": True}
    steps, _ = way.batches(Listed(rows, 10), changes.pop("chain", []), **(sizes | changes))
    return [batch for step in steps for batch in step]


@pytest.mark.parametrize("direct", [True, False])
def test_a_batch_is_padded_to_its_longest_row(way: Way, direct: bool) -> None:
    found = batches(way, pad={"ids": -1}, direct=direct)
    lengths = [batch["ids_length"].tolist() for batch in found]
    assert lengths == [LENGTHS[:4], LENGTHS[4:8], LENGTHS[8:]]
    assert [batch["ids"].shape for batch in found] == [(4, 5), (4, 4), (4, 7)]
    rows = [[0, 1, 2, -1, -1], [-1] * 5, [20, 21, 22, 23, 24], [30, *[-1] * 4]]
    assert found[0]["ids"].tolist() == rows
    assert found[0]["ids"].dtype == torch.int32


def test_the_padded_length_is_a_multiple_where_that_is_asked_for(way: Way) -> None:
    found = batches(way, pad={"ids": Pad(0, multiple=3)})
    assert [batch["ids"].shape for batch in found] == [(4, 6), (4, 6), (4, 9)]


def test_a_batch_of_empty_rows_has_no_width(way: Way) -> None:
    rows = [{"key": str(i), "ids": np.zeros(0, np.int64)} for i in range(8)]
    assert [batch["ids"].shape for batch in batches(way, rows, pad={"ids": 0})] == [(4, 0), (4, 0)]


def test_rows_of_one_length_are_padded_too_so_that_the_batch_does_not_depend_on_them(
    way: Way,
) -> None:
    rows = [{"key": str(i), "ids": np.arange(3)} for i in range(8)]
    assert all("ids_length" in batch for batch in batches(way, rows, pad={"ids": 0}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, r"^train: column 'ids' differs in shape between records: \(0,\) in r1, \(3,\) in r0; resize or"
             r" crop in the chain, or let batches pad it: pad = \{'ids': 0\} in the recipe$"),
        ({"pad": {"idz": 0, "ids": 0}}, "pad names column 'idz', which no record has; columns: ids, y"),
        ({"pad": {"ids": 0.5}}, "column 'ids' holds int32, which cannot be padded with 0.5"),
        ({"pad": {"ids": 2**31}}, "column 'ids' holds int32, which cannot be padded with 2147483648"),
        ({"pad": {"ids": "x"}}, "pad of column 'ids' is 'x' to a multiple of 1; give a number or"),
        ({"pad": {"ids": Pad(0, 0)}}, "pad of column 'ids' is 0 to a multiple of 0; give a number or"),
        ({"pad": {"ids": 0, "y": 0}}, "column 'y' is int64 in record r0, but the recipe's pad names it"),
    ],
)  # fmt: skip
def test_what_cannot_be_padded_is_refused_before_training(
    way: Way, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected):
        batches(way, **changes)


@pytest.mark.parametrize(("value", "fits"), [(-1e9, False), (-1e4, True), (float("-inf"), True)])
def test_a_finite_pad_never_becomes_infinite(way: Way, value: float, fits: bool) -> None:
    rows = [{**row, "ids": row["ids"].astype(np.float16)} for row in ROWS]
    refused = pytest.raises(UsageError, match="float16, which cannot be")
    with contextlib.nullcontext() if fits else refused:
        assert batches(way, rows, pad={"ids": value})[0]["ids"].min() == value


def test_the_name_of_the_lengths_is_not_for_another_column(way: Way) -> None:
    rows = [{**row, "ids_length": 1} for row in ROWS]
    with pytest.raises(UsageError, match="column 'ids_length': Stoker uses this name"):
        batches(way, rows, pad={"ids": 0})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.arange(3), "column 'ids' is int64 of shape .* in record r9, int32 of shape"),
        (np.zeros((2, 2), np.int32), r"'ids' differs in shape between .*\(-1, 2\) in r9, \(-1,\)"),
        ([1, 2], "column 'ids' holds list .record r9."),
    ],
)
def test_another_type_or_shape_of_the_values_ends_the_run(
    way: Way, value: Any, expected: str
) -> None:
    rows = [*ROWS[:9], {**ROWS[9], "ids": value}, *ROWS[10:]]
    with pytest.raises((SchemaError, DataError), match=expected):
        batches(way, rows, pad={"ids": 0})


def doubled(columns: dict[str, Any]) -> dict[str, Any]:
    return columns | {"ids": [np.repeat(ids, 2) for ids in columns["ids"]]}


def test_a_batch_stage_takes_and_gives_rows_of_any_length(way: Way) -> None:
    found = batches(way, chain=[doubled], pad={"ids": 0})
    assert found[0]["ids_length"].tolist() == [2 * n for n in LENGTHS[:4]]


def test_what_measures_and_exports_sees_padded_batches_too() -> None:
    """As an export that no batch preceded reads them."""
    chain = Chain([], seed=5, pads={"ids": Pad(-1, multiple=4)})
    columns, report = chain.run([dict(row) for row in ROWS[:4]], 0)
    found = as_batch(columns, report.schemas[-1])
    assert found["ids"].shape == (4, 8)
    assert found["ids"][3].tolist() == [30, *[-1] * 7]
    assert found["ids_length"].tolist() == LENGTHS[:4]


def of_lengths(lengths: list[int], first: int = 0) -> list[dict[str, Any]]:
    return [{"key": f"r{i}", "ids": np.zeros(n, np.int32)} for i, n in enumerate(lengths, first)]


def blocks_of_random_lengths(bucket_by: str | None, epoch: int = 0) -> list[list[int]]:
    chance = np.random.default_rng(3)
    chain = Chain([], seed=5, pads={"ids": Pad(0)}, bucket_by=bucket_by)
    found = []
    for number in range(20):
        lengths = chance.integers(0, 200, chance.integers(200, 300)).tolist()
        records = of_lengths(lengths, 1000 * number)
        columns, report = chain.run(records, epoch)
        assert sorted(columns["__id"].tolist()) == sorted(record_id(r["key"]) for r in records)
        assert report.rows == len(records)
        found.append(np.diff(columns["ids"].offsets).tolist())
    return found


def padding(blocks: list[list[int]], batch: int = 32) -> float:
    """Padded values per own value, wherever batches begin."""
    rows = [n for block in blocks for n in block]
    batches = [rows[i : i + batch] for i in range(0, len(rows), batch)]
    return sum(max(one) * len(one) for one in batches) / sum(rows) - 1


def test_bucketing_leaves_less_than_a_third_of_the_padding_wherever_batches_begin() -> None:
    assert padding(blocks_of_random_lengths(None)) > 0.9
    assert padding(blocks_of_random_lengths("ids")) < 0.3


def test_the_order_of_bucketed_rows_depends_on_the_epoch_alone() -> None:
    first = blocks_of_random_lengths("ids")
    assert first == blocks_of_random_lengths("ids")
    assert first != blocks_of_random_lengths("ids", epoch=1)
    begin = [block[0] for block in first]
    assert min(begin) < 50 and max(begin) > 150, "no length has its place in a block"


def test_a_record_without_the_column_that_buckets_is_quarantined_as_ever() -> None:
    records = [*of_lengths([3, 1, 2]), {"key": "none", "ids": None}, {"key": "absent"}]
    columns, report = Chain([], seed=5, pads={"ids": Pad(0)}, bucket_by="ids").run(records, 0)
    assert {(one.key, one.place) for one in report.bad} == {("none", -1), ("absent", -1)}
    assert sorted(np.diff(columns["ids"].offsets)) == [1, 2, 3]


def test_bucketing_by_a_column_that_is_not_padded_is_refused() -> None:
    changes = {"recipe": "lengths:Lengths", "data": {"bucket_by": "index"}}
    with pytest.raises(
        UsageError, match=r"data.bucket_by: 'index' is not a column .* it pads: ids, pairs$"
    ):
        open_data(Config.model_validate(changes))


def backwards(ids: Ragged) -> Ragged:
    offsets = ids.offsets.copy()
    offsets[[1, 2]] = offsets[[4, 1]]
    return Ragged(ids.values, offsets)


CHANGES: dict[str, tuple[Callable[[Ragged], Any], str]] = {
    "more values": (
        lambda ids: Ragged(np.append(ids.values, ids.values[:1]), ids.offsets),
        "row offsets from 0 to .* damaged block",
    ),
    "shifted": (
        lambda ids: Ragged(np.append(ids.values[:1], ids.values), ids.offsets + 1),
        "row offsets from 1 to .* damaged block",
    ),
    "backwards": (backwards, "do not divide"),
    "another type": (
        lambda ids: Ragged(ids.values.astype(np.int64), ids.offsets),
        "column 'ids' is int64 of shape",
    ),
    "a row less": (lambda ids: ids[:-1], "has 4 rows, but was reported with 5"),
    "of one length": (
        lambda ids: np.zeros((len(ids), 3), np.int32),
        r"column 'ids' is int32 of shape \(3,\)",
    ),
}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("case", CHANGES)
def test_a_damaged_block_never_becomes_a_batch(way: Way, case: str, direct: bool) -> None:
    change, expected = CHANGES[case]

    def damage(references: list[str], store: Store) -> None:
        block = store[references[1]]
        ids = change(block["ids"])
        others = {name: column[: len(ids)] for name, column in block.items()}
        store[references[1]] = others | {"ids": ids}

    with pytest.raises(SchemaError, match=expected):
        batches(way, pad={"ids": 0}, direct=direct, damage=damage)


def builder(ids: Ragged, rows: int) -> BatchBuilder:
    schema = schema_of({"ids": ids}, pads={"ids": Pad(0)})
    return BatchBuilder(BufferPool(pinned=False), rows, schema)


@pytest.mark.parametrize(
    ("offsets", "values"),
    [([0, 2, 3], 4), ([0, 4, 3], 3), ([1, 2, 3], 3), ([0, -1, 3], 3), ([0, 2, 3], 2)],
)
def test_a_frame_whose_offsets_and_values_disagree_is_refused(
    offsets: list[int], values: int
) -> None:
    ours, theirs = socket.socketpair()
    header = {"rows": 2, "columns": [], "ragged": [["ids", "int32", [], values]], "text": {}}

    def answer() -> None:
        wire.send_message(theirs, header)
        theirs.sendall(np.array(offsets, np.int64).tobytes() + np.zeros(values, np.int32).tobytes())

    threading.Thread(target=answer).start()
    part = BlockSlice("b", 0, 2, "far", 2)
    columns = {"ids": Ragged(np.zeros(3, np.int32), np.array([0, 2, 3]))}
    batch = builder(columns["ids"], 2)
    request = RowRequest(None, None, ours, part, [], reused=False)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="row offsets from"):
        request.receive(batch, 0)
    for each in (ours, theirs):
        each.close()


def test_rows_that_come_a_second_time_take_the_place_of_the_first() -> None:
    ids = Ragged.of([np.array([1, 2]), np.array([3])], "int64")
    batch = builder(ids, 2)
    batch.ragged("ids", 0, ids.offsets, 3)[...] = 9  # the connection ended before `wrote`
    batch.take(BlockSlice("b", 0, 2, "", 2), {"ids": ids}, 0)
    assert batch.finish()["ids"].tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float16", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_a_block_is_the_same_before_and_after_it_was_a_file(
    dtype: str, shape: tuple[int, ...]
) -> None:
    rows = [np.ones((n, *shape), dtype) * n for n in (0, 3, 1, 0)]
    text = np.array(["ä", "\udce4", "", None, "日本"], dtype=object)
    others = {"t": text, "__id": np.arange(4), "e": np.zeros((0, 2), dtype)}
    whole = {"x": Ragged.of(rows, dtype), **others}
    found = block_columns(b"".join(block_parts(whole)))
    column = found["x"]
    assert found["t"].tolist() == text.tolist() and found["e"].shape == (0, 2)
    assert (column.dtype, column.shape) == (np.dtype(dtype), (4, -1, *shape))
    for i, row in enumerate(rows):
        assert np.array_equal(column[i : i + 1].values, row.astype(dtype))


def test_the_values_of_a_block_are_not_copied() -> None:
    ids = Ragged.of([np.arange(1000), np.arange(7)], "int64")
    parts = block_parts({"i": ids})
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), ids.values) for part in parts)
    content = b"".join(parts)
    assert np.shares_memory(block_columns(content)["i"].values, np.frombuffer(content, np.uint8))


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
