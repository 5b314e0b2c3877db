"""Rows that differ in length: padded as the recipe declares, or refused; never a wrong batch."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from whole_way import Listed, Store, Way

from stoker.chain.chain import Chain
from stoker.chain.columns import Ragged, block_columns, block_parts, schema_of
from stoker.config.schema import Config
from stoker.data import Pad
from stoker.errors import DataError, SchemaError, UsageError
from stoker.protocol import BlockSlice
from stoker.read.sources import record_id
from stoker.serve.blocks import wire
from stoker.serve.blocks.batches import BatchBuilder, BufferPool, as_batch
from stoker.serve.blocks.client import RowRequest
from stoker.serve.opening import open_data

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


def test_rows_stand_in_their_places_in_whatever_order_they_come() -> None:
    ids = Ragged.of([np.array([1, 2]), np.array([3]), np.array([4, 5, 6])], "int64")
    batch = builder(ids, 3)
    for start, stop in ((2, 3), (0, 1), (1, 2)):
        batch.take(BlockSlice("b", start, stop, "", 3), {"ids": ids}, start)
    found = batch.finish()
    assert found["ids"].tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert found["ids_length"].tolist() == [2, 1, 3]


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
