"""One schema per split: every batch is what a plain loop over the records gives, or the run is refused."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from whole_way import Listed, Store, Way

from stoker.chain.columns import schema_of
from stoker.data import Drop, Pad, read_torch
from stoker.errors import SchemaError, StokerError, UsageError
from stoker.protocol import BadRecord, BlockSlice
from stoker.read.sources import record_id
from stoker.serve.blocks.batches import BatchBuilder, BufferPool

EXAMPLES = int(os.environ.get("STOKER_SCHEMA_EXAMPLES", "300"))

VALUES: dict[str, Any] = {
    "int": lambda i: 3 * i - 5,
    "big int": lambda i: 2**53 + i,
    "float": lambda i: i / 3 if i % 5 else float("nan"),
    "bool": lambda i: i % 3 == 0,
    "text": lambda i: ["", "ä", "None", "nul\0"][i % 4] + str(i),
    "uint8": lambda i: np.uint8(i),
    "vector": lambda i: np.arange(i, i + 3, dtype=np.int16),
    "matrix": lambda i: np.full((2, 3), i, np.float32),
    "big endian": lambda i: np.full(2, i, ">f8"),
    "empty": lambda i: np.zeros((0, 2), np.float32),
    "tensor": lambda i: torch.full((2,), i, dtype=torch.int32),
    "image": lambda i: np.full((6, 5, 3), i, np.uint8),
    "tokens": lambda i: np.arange(i, i + i % 4),
    "frames": lambda i: torch.full((5 * i % 7, 2), i / 3),
    "flags": lambda i: np.arange(i % 3) == 1,
    "halves": lambda i: np.full(i % 5, i, np.float16),
}
PADS = {"tokens": -1, "frames": Pad(0.5, multiple=4), "flags": True, "halves": float("inf")}
"""Columns whose rows differ in length, some of them empty."""
DEFECTS: dict[str, Any] = {
    "absent": None,
    "none": lambda value: None,
    "half": lambda value: 0.5,
    "number": lambda value: 7,
    "huge": lambda value: 2**63 + 1,
    "text": lambda value: "x",
    "dict": lambda value: {"a": 1},
    "bytes": lambda value: b"x",
    "list": lambda value: [1, 2],
    "longer": lambda value: np.zeros(5, np.int16),
    "wider": lambda value: np.arange(3, dtype=np.int64),
    "masked": lambda value: np.ma.masked_array(np.zeros(3, np.int16), [True, False, False]),
    "date": lambda value: np.datetime64("2020-01-01"),
    "objects": lambda value: np.array([1, None], dtype=object),
}


OUTCOMES: Counter[str] = Counter()


def unchanged(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def records_of(
    kinds: list[str], count: int, defects: list[tuple[int, int, str]]
) -> list[dict[str, Any]]:
    rows = [{"key": f"r{i}", **{_name(k): VALUES[k](i) for k in kinds}} for i in range(count)]
    for at, column, defect in defects:
        row, name = rows[at % count], _name(kinds[column % len(kinds)])
        if defect == "extra":
            row["extra"] = 1
        elif defect == "absent":
            row.pop(name, None)
        elif name in row:
            row[name] = DEFECTS[defect](row[name])
    return rows


def _name(kind: str) -> str:
    return kind.replace(" ", "_")


def same(batched: Any, value: Any) -> bool:
    """Whether a row of a batch is the record's value, its type too."""
    if isinstance(batched, str):
        return isinstance(value, str) and batched == value
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    kinds = {bool: "bool", int: "int64", float: "float64"}
    expected = np.asarray(value)
    found = batched.numpy()
    name = kinds.get(type(value), expected.dtype.name)
    if expected.ndim == 3:  # images come channels first
        expected = expected.transpose(2, 0, 1)
    return found.dtype.name == name and np.array_equal(
        found, expected, equal_nan=name.startswith("float")
    )


def check(rows: list[dict[str, Any]], steps: Any, bad: Any, batch_size: int, workers: int) -> None:
    columns = {name for row in rows for name in row} - {"key"}
    holes = {row["key"] for row in rows if any(row.get(name) is None for name in columns)}
    left_out = {one.key for one in bad}
    if len(holes) < len(rows):
        assert left_out == holes
    elif steps:
        # No record is whole: those that agree with the first may pass, and the budget ends such a run.
        columns = set(steps[0][0]) - {"__id"}
    columns |= {f"{name}_length" for name in columns & PADS.keys()}
    by_id = {record_id(row["key"]): row for row in rows}
    seen: Counter[int] = Counter()
    for number, step in enumerate(steps):
        sizes = {len(batch["__id"]) for batch in step}
        assert sizes == {batch_size} or (number == len(steps) - 1 and len(sizes) == 1)
        for batch in step:
            ids = batch.pop("__id").tolist()
            seen.update(ids)
            assert set(batch) == columns
            for name in PADS.keys() & columns:
                unpad(batch, name, [len(by_id[one][name]) for one in ids])
            for name, column in batch.items():
                assert len(column) == len(ids)
                for i, one in enumerate(ids):
                    assert same(column[i], by_id[one][name]), (name, column[i], by_id[one][name])
    assert not seen or max(seen.values()) == 1
    assert len(rows) - len(left_out) - len(seen) < min(2, batch_size) * workers


def unpad(batch: dict[str, Any], name: str, lengths: list[int]) -> None:
    """Leave the rows' own values in a batch; what else it holds of the column is as declared."""
    pad = PADS[name] if isinstance(PADS[name], Pad) else Pad(PADS[name])
    rows, found = batch[name], batch.pop(f"{name}_length")
    assert found.dtype == torch.int64
    assert found.tolist() == lengths
    assert rows.shape[1] == -(-max(lengths) // pad.multiple) * pad.multiple
    assert all((row[length:] == pad.value).all() for row, length in zip(rows, lengths, strict=True))
    batch[name] = [row[:length] for row, length in zip(rows, lengths, strict=True)]


HOLES = ["absent", "none"]
AT = st.tuples(st.integers(0, 30), st.integers(0, 4))


def at_places(kinds: list[str]) -> st.SearchStrategy[list[tuple[int, int, str]]]:
    one = st.builds(lambda at, kind: (*at, kind), AT, st.sampled_from(kinds))
    return st.lists(one, max_size=3)


@pytest.mark.long
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    kinds=st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=4, unique=True),
    count=st.integers(1, 24),
    defects=at_places(HOLES) | at_places([*DEFECTS, "extra"]),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 3)),
    batch_stage=st.booleans(),
    turned=st.booleans(),
    direct=st.booleans(),
)
def test_a_batch_is_what_a_loop_over_the_records_gives_or_the_run_is_refused(
    way: Way,
    kinds: list[str],
    count: int,
    defects: list[tuple[int, int, str]],
    sizes: tuple[int, int, int, int],
    batch_stage: bool,
    turned: bool,
    direct: bool,
) -> None:
    """Long since 300 examples go the whole way: about 6 s of one core. STOKER_SCHEMA_EXAMPLES has more."""
    rows = records_of(kinds, count, defects)
    shard, block_records, batch_size, workers = sizes
    try:
        steps, bad = way.batches(
            Listed(rows, shard),
            [unchanged] if batch_stage else [],
            block_records=block_records,
            batch_size=batch_size,
            workers=workers,
            direct=direct,
            delivery=lambda blocks: (
                sorted(blocks, key=lambda made: -made[1].shard) if turned else blocks
            ),
            pad={name: PADS[name] for name in PADS.keys() & set(kinds)},
        )
    except StokerError as error:
        OUTCOMES["refused"] += 1
        too_few = count < 2 * workers and "data.remainder" in str(error)
        assert defects or too_few, f"nothing is wrong with these records: {error}"
        assert len(str(error).splitlines()) == 1
        return
    OUTCOMES["quarantined" if bad else "whole"] += 1
    check(rows, steps, bad, batch_size, workers)


@pytest.mark.long
def test_the_examples_are_of_every_outcome() -> None:
    """Else the property above would say little: runs after it."""
    total = sum(OUTCOMES.values())
    if not total:
        pytest.skip("the examples did not run in this process")
    assert total >= EXAMPLES
    print(OUTCOMES)
    assert all(OUTCOMES[name] > 0.05 * total for name in ("whole", "quarantined", "refused"))


ROWS = [
    {"key": f"r{i}", "x": i, "word": f"w{i}", "v": np.full(2, i, np.float32)} for i in range(20)
]


def batches(
    way: Way, rows: list[dict[str, Any]], chain: Any = (), direct: bool = True, **changes: Any
) -> tuple[Any, list[BadRecord]]:
    sizes = {"block_records": 5, "batch_size": 8, "workers": 1, "direct": direct}
    source = changes.pop("source", None) or Listed(rows, 10)
    return way.batches(source, list(chain), **(sizes | changes))


def words(count: int) -> Any:
    return np.array([None] * count, dtype=object)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a row less": (
        lambda block: {name: column[:-1] for name, column in block.items()},
        "has 4 rows, but was reported with 5",
    ),
    "a row more": (
        lambda block: {name: np.append(column, column[-1:], 0) for name, column in block.items()},
        "has 6 rows, but was reported with 5",
    ),
    "another type": (
        lambda block: block | {"x": block["x"] + 0.5},
        "has other columns than its split: column 'x' is float64, int64 in record r0",
    ),
    "another shape": (
        lambda block: block | {"v": np.zeros((len(block["v"]), 3), np.float32)},
        r"column 'v' is float32 of shape \(3,\), float32 of shape \(2,\) in record r0",
    ),
    "a column less": (
        lambda block: {name: column for name, column in block.items() if name != "v"},
        "column 'v' is absent, float32 of shape",
    ),
    "a column more": (
        lambda block: block | {"more": block["x"]},
        "column 'more' is int64, absent in record r0",
    ),
    "no text": (
        lambda block: block | {"word": words(len(block["word"]))},
        "column 'word' holds None, which is not text",
    ),
}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("case", CHANGES)
def test_a_block_that_is_not_as_reported_is_an_error_where_it_is_fetched(
    way: Way, case: str, direct: bool
) -> None:
    change, expected = CHANGES[case]

    def damage(references: Any, store: Store) -> None:
        store[references[1]] = change(store[references[1]])

    with pytest.raises(SchemaError, match=expected):
        batches(way, ROWS, direct=direct, damage=damage)


@pytest.mark.parametrize("block_records", [1, 3, 20])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("x", 0.5, "column 'x' is float64 in record r13, int64 in record r"),
        ("x", True, "column 'x' is bool in record r13, int64 in record r"),
        ("x", np.int32(1), "column 'x' is int32 in record r13, int64 in record r"),
        ("x", 2**63, "column 'x': the number in record r13 does not fit int64"),
        ("word", b"w", "column 'word' holds bytes .record r13."),
        ("v", np.zeros(3, "f4"), r"column 'v' differs in shape .* \(3,\) in r13, \(2,\) in r"),
        ("extra", 1, "record r13 has a column 'extra' that record r0 lacks"),
        ("__id", 1, "record r13 has a column '__id' that record r0 lacks"),
    ],
)
def test_one_record_that_does_not_fit_ends_the_run_however_blocks_are_cut(
    way: Way, name: str, value: Any, expected: str, block_records: int
) -> None:
    rows = [dict(row) for row in ROWS]
    rows[13][name] = value
    with pytest.raises(SchemaError, match=expected):
        batches(way, rows, block_records=block_records)


@pytest.mark.parametrize("block_records", [1, 3, 20])
@pytest.mark.parametrize("stage", [[], [unchanged]])
def test_a_record_that_lacks_a_value_is_quarantined_however_blocks_are_cut(
    way: Way, block_records: int, stage: list[Any]
) -> None:
    rows = [dict(row) for row in ROWS]
    del rows[0]["word"]
    rows[7]["x"] = None
    steps, bad = batches(way, rows, stage, block_records=block_records)
    assert {one.key: one.reason for one in bad} == {
        "r0": "no column 'word', which other records have",
        "r7": "column 'x' is None",
    }
    assert sum(len(batch["x"]) for step in steps for batch in step) == 18


UNBATCHED: list[tuple[Any, str]] = [
    ({"a": 1}, r"dict .record r0., which a batch cannot; .*Drop\('x'\)"),
    ([1, 2], "list"),
    (b"x", "bytes"),
    (np.datetime64("2020-01-01"), "arrays of datetime64"),
    (np.array(["a"], dtype=object), "arrays of object"),
]


@pytest.mark.parametrize(("value", "expected"), UNBATCHED)
def test_columns_that_no_batch_holds_are_refused_before_training_unless_they_are_dropped(
    way: Way, value: Any, expected: str
) -> None:
    rows = [{"key": f"r{i}", "x": value, "y": i} for i in range(10)]
    with pytest.raises(UsageError, match=f"train: column 'x' holds {expected}"):
        batches(way, rows)
    steps, _ = batches(way, rows, [Drop("x", "absent")])
    assert [sorted(batch) for step in steps for batch in step] == [["__id", "y"]] * 2


def test_names_that_stoker_uses_are_refused(way: Way) -> None:
    for name in ("__id", "__key", "image__hwc"):
        with pytest.raises(UsageError, match=f"column {name!r}: Stoker uses this name"):
            batches(way, [{"key": "a", name: 1}])


def test_blocks_that_disagree_end_the_run_where_nobody_knew_the_schema(way: Way) -> None:
    class Late(Listed):
        def read(self, shard: Any, order: Any) -> Any:
            for record in super().read(shard, order):
                late = record["key"] in ("r0", "r1", "r2", "r3")
                yield BadRecord(record["key"], "bad") if late else record

    rows = [dict(row) for row in ROWS]
    _, bad = batches(way, rows, source=Late(rows, 10))
    assert len(bad) == 4
    for row in rows[10:]:
        row["x"] += 0.5
    says = "the train split has blocks with different columns: column 'x' is"
    with pytest.raises(SchemaError, match=says):
        batches(way, rows, source=Late(rows, 10))


def test_no_batch_has_a_row_that_nothing_wrote() -> None:
    columns = {"x": np.arange(5), "y": np.arange(5)}
    batch = BatchBuilder(BufferPool(pinned=False), 7, schema_of(columns))
    batch.take(BlockSlice("b", 0, 5, "", 5), columns, 0)
    with pytest.raises(SchemaError, match="column 'x': 5 of the batch's 7 rows were written"):
        batch.finish()


def test_a_torch_dataset_loses_no_value_of_its_items(way: Way) -> None:
    with pytest.raises(UsageError, match="item 0 has 3 values, but columns= names 2: image, label"):
        batches(way, [], source=read_torch([(1, 2, 3)]))
    items = [(1, 2, 3), (4, 5, 6)]
    [[batch]], _ = batches(way, [], source=read_torch(items, columns=("a", "b", "c")))
    assert [batch[name].tolist() for name in ("a", "b", "c")] == [[1, 4], [2, 5], [3, 6]]
