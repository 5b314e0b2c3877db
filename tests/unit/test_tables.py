"""Parquet and Delta tables: columns, filters, versions and partitions; NULLs are refused or ruled."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from damage import checked, opened_job, preprocessed, read_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inprocess import no_cluster
from pyarrow import parquet
from whole_way import Way

from stoker.data import BadRecord, read_any, read_delta, read_parquet
from stoker.errors import UsageError
from stoker.read.sources import record_id

__all__ = ["no_cluster"]
rows_of = partial(read_all, seed=0)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """1,000 rows in row groups of 100, sorted by x, with a heavy column."""
    folder = tmp_path / "rows" / "train"
    folder.mkdir(parents=True)
    content = pa.table(
        {"x": range(1000), "y": [i % 7 for i in range(1000)], "image": [b"i" * 9000] * 1000}
    )
    parquet.write_table(content, folder / "0.parquet", row_group_size=100)
    return tmp_path / "rows"


@pytest.mark.parametrize(
    ("filters", "keeps"),
    [
        ([("x", ">=", 250), ("y", "in", [3, 5])], lambda x: x >= 250 and x % 7 in (3, 5)),
        ([[("x", "<", 3)], [("x", "==", 999)]], lambda x: x in (0, 1, 2, 999)),
    ],
)
def test_a_filter_keeps_matching_rows_and_their_identity(
    filters: Any, keeps: Callable[[int], bool], table: Path
) -> None:
    every = {row["key"]: row["x"] for row in rows_of(read_parquet(str(table), "train"))}
    some = rows_of(read_parquet(str(table), "train", filters=filters))
    assert {r["key"]: r["x"] for r in some} == {k: x for k, x in every.items() if keeps(x)}


@pytest.mark.parametrize("term", [("s", "!=", 1.0), ("s", "not in", [1.0])])
def test_nan_differs_from_every_value_however_rows_are_grouped(term: Any, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    content = pa.table({"s": [1.0, math.nan, 1.0, 2.0], "x": [1, 2, 3, 4]})
    for rows in (1, 2, 4):
        (folder := tmp_path / f"{rows}" / "train").mkdir(parents=True)
        parquet.write_table(content, folder / "0.parquet", row_group_size=rows)
        filters = [term, ("x", "<", 5)]
        found = rows_of(read_parquet(str(folder.parent), "train", columns=["x"], filters=filters))
        assert sorted(row["x"] for row in found) == [2, 4]
        deltalake.write_deltalake(
            tmp_path / "delta", content[2 * rows - 2 : 2 * rows], mode="append"
        )
    found = rows_of(read_delta(str(tmp_path / "delta"), columns=["x"], filters=[term]))
    assert sorted(row["x"] for row in found) == [2, 4]


@pytest.mark.parametrize("term", [("split", "!=", "val"), ("split", "not in", ["val"])])
def test_partitions_that_a_filter_excludes_are_not_read(term: Any, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    for split in ("train", "val"):
        content = pa.table({"x": [1, None if split == "val" else 2], "split": [split] * 2})
        deltalake.write_deltalake(tmp_path / "t", content, partition_by=["split"], mode="append")
    source = read_delta(str(tmp_path / "t"), columns=["x"], filters=[term])
    assert [row["x"] for row in rows_of(source)] == [1, 2]
    assert len(source.footers) == 1


def test_columns_and_row_groups_that_are_not_wanted_are_not_read(table: Path) -> None:
    path = table / "train" / "0.parquet"
    about = parquet.ParquetFile(path).metadata
    content = bytearray(path.read_bytes())
    for group in range(about.num_row_groups):
        for number in range(3):
            chunk = about.row_group(group).column(number)
            if group > 1 or number == 2:  # statistics rule the other groups out
                start = chunk.dictionary_page_offset or chunk.data_page_offset
                size = chunk.total_compressed_size
                content[start : start + size] = b"?" * size
    path.write_bytes(content)
    source = read_parquet(str(table), "train", columns=["y"], filters=[("x", "<", 150)])
    rows = sorted((int(row["key"].split(":")[1]), row["y"]) for row in rows_of(source))
    assert rows == [(x, x % 7) for x in range(150)]
    with pytest.raises(OSError, match="damaged"):
        rows_of(read_parquet(str(table), "train", columns=["y"]))


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([("z", "<", 3)], "has no column z; it has x, y, image"),
        ([("x", "<", -1)], "hold no row that matches"),
        ([("x", "~", 1)], "write \\[\\(column, operator, value\\)"),
        ([("x", "<", "a")], "0.parquet: filters=.* do not fit its columns"),
        ("x < 3", "write \\[\\(column, operator, value\\)"),
    ],
)
def test_wrong_filters_are_named(table: Path, filters: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rows_of(read_parquet(str(table), "train", filters=filters))


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """Version 0: partitions train and val; 1: more rows with a new column; 2: a row deleted."""
    deltalake = pytest.importorskip("deltalake")
    path = tmp_path / "table"
    first = pa.table({"x": range(10), "split": ["train"] * 7 + ["val"] * 3})
    deltalake.write_deltalake(path, first, partition_by=["split"])
    more = pa.table({"x": [11], "split": ["a b/ü"], "y": [2.0]})
    deltalake.write_deltalake(path, more, mode="append", schema_mode="merge")
    deltalake.DeltaTable(path).delete("x = 3")
    return path


def test_a_delta_table_is_read_as_it_is_now(delta: Path) -> None:
    rows = rows_of(read_delta(str(delta), nulls={"y": -1}))
    assert sorted(row["x"] for row in rows) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 11]
    assert {row["x"]: (row["split"], row["y"]) for row in rows}[11] == ("a b/ü", 2.0)
    assert {row["x"]: (row["split"], row["y"]) for row in rows}[8] == ("val", -1.0)
    with pytest.raises(UsageError, match=r"column y holds \d NULLs in \d rows, and \d in 1 other"):
        rows_of(read_delta(str(delta)))
    kept = rows_of(read_delta(str(delta), nulls={"y": "quarantine"}))
    assert [type(row) for row in kept].count(BadRecord) == 9


def test_partitions_of_a_delta_table_keep_their_types_and_nulls(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    days = [date(2020, 1, 1), None, date(2020, 1, 2), None]
    whole = {"x": [0, 1, 2, 3], "n": [7, None, 7, 8], "day": days, "never": pa.nulls(4, pa.int8())}
    deltalake.write_deltalake(tmp_path, pa.table(whole), partition_by=["n", "day"])
    rows = rows_of(read_delta(str(tmp_path), columns=["x", "n"], nulls={"n": -1}))
    assert {row["x"]: row["n"] for row in rows} == {0: 7, 1: -1, 2: 7, 3: 8}
    some = read_delta(str(tmp_path), columns=["x", "day"], filters=[("day", ">=", days[2])])
    assert [(row["x"], row["day"]) for row in rows_of(some)] == [(2, days[2])]


def test_splits_of_one_delta_table_by_partition(delta: Path) -> None:
    train = read_delta(str(delta), filters=[("split", "==", "train")], columns=["x"])
    val = read_delta(str(delta), filters=[("split", "==", "val")], columns=["x"])
    assert sorted(row["x"] for row in rows_of(train)) == [0, 1, 2, 4, 5, 6]
    assert [sorted(row) for row in rows_of(val)] == [["key", "x"]] * 3


def test_files_that_a_delta_tables_log_rules_out_are_not_opened(delta: Path) -> None:
    for path in delta.glob("split=val/*.parquet"):
        path.unlink()
    train = read_delta(str(delta), columns=["x"], filters=[("split", "==", "train"), ("x", "<", 5)])
    assert sorted(row["x"] for row in rows_of(train)) == [0, 1, 2, 4]
    filters = [[("split", "==", "train"), ("x", ">", 5)], [("x", "==", 11)]]
    either = read_delta(str(delta), columns=["x"], filters=filters)
    assert sorted(row["x"] for row in rows_of(either)) == [6, 11]


def test_a_delta_table_as_it_was(delta: Path) -> None:
    assert sorted(row["x"] for row in rows_of(read_delta(str(delta), version=0))) == list(range(10))
    with pytest.raises(UsageError, match="at version 9"):
        read_delta(str(delta), version=9)


@pytest.mark.parametrize("name", ["main.vision.digits", "uc://main.vision.digits"])
def test_the_name_of_a_catalogs_table_is_refused(name: str) -> None:
    for read in (read_delta, read_any):
        with pytest.raises(UsageError, match=name):
            read(name, "train")


def test_delta_is_told_from_a_heap_of_parquet_files(delta: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="read it with read_delta"):
        read_parquet(str(delta), "train")
    train = read_any(str(delta), "train", ["x"])
    assert len(rows_of(train)) == 6 and "of split a b/ü" in train.notes[0]
    assert sorted(row["x"] for row in rows_of(read_any(str(delta), "val", ["x"]))) == [7, 8, 9]
    with pytest.raises(UsageError, match="cannot be read as a Delta table"):
        read_delta(str(tmp_path / "nowhere"))


def test_tables_named_train_and_val(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    for split, n in (("train", 8), ("val", 4)):
        deltalake.write_deltalake(tmp_path / split, pa.table({"x": range(n)}))
    assert len(rows_of(read_delta(str(tmp_path), "val"))) == 4
    assert len(rows_of(read_any(str(tmp_path), "train"))) == 8


KINDS: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "int": (pa.int64(), lambda i: i % 3),
    "small": (pa.int16(), lambda i: 100 + i),
    "float": (pa.float32(), lambda i: i / 4),
    "text": (pa.string(), lambda i: f"t{i}"),
    "bytes": (pa.binary(), lambda i: b"b%d" % i),
    "image": (
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        lambda i: {"bytes": b"i%d" % i, "path": f"{i}.jpg"},
    ),
    "struct": (
        pa.struct([("b", pa.int64()), ("c", pa.struct([("d", pa.string())]))]),
        lambda i: {"b": -i, "c": {"d": f"d{i}"}},
    ),
    "list": (pa.list_(pa.float32()), lambda i: [i / 2] * (i % 3 + 1)),
    "boxes": (pa.list_(pa.struct([("x", pa.int64())])), lambda i: [{"x": i}, {"x": i + 1}]),
    "map": (pa.map_(pa.string(), pa.int64()), lambda i: [("k", i), ("l", 2 * i)]),
}
NAMES = ["a", "a.b", "b", "a.b.c", "image", "image.bytes", "label", "x.list.element", "bytes"]


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Table, dict[str, str]]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True))
    kinds = {name: draw(st.sampled_from([*KINDS])) for name in names}
    kinds[draw(st.sampled_from(names))] = "int"
    columns = {
        n: pa.array([KINDS[k][1](i) for i in range(7)], KINDS[k][0]) for n, k in kinds.items()
    }
    return pa.table(columns), kinds


def what_a_record_holds(kind: str, i: int) -> Any:
    value = KINDS[kind][1](i)
    return value["bytes"] if kind == "image" else value


@pytest.mark.long
@pytest.mark.parametrize("form", ["parquet", "delta"])
@settings(max_examples=70, deadline=None, derandomize=True, database=None)
@given(made=tables(), data=st.data(), group=st.sampled_from([2, 7]), statistics=st.booleans())
def test_a_column_is_its_own_whatever_stands_beside_it(
    tmp_path_factory: pytest.TempPathFactory,
    made: tuple[pa.Table, dict[str, str]],
    data: st.DataObject,
    group: int,
    statistics: bool,
    form: str,
) -> None:
    table, kinds = made
    folder = tmp_path_factory.mktemp("rows")
    if form == "delta":
        pytest.importorskip("deltalake").write_deltalake(folder, table)
        read = partial(read_delta, str(folder))
    else:
        options = {"row_group_size": group, "write_statistics": statistics}
        parquet.write_table(table, folder / "train.parquet", **options)
        read = partial(read_parquet, str(folder), "train")
    some = st.lists(st.sampled_from([*kinds]), min_size=1, unique=True)
    columns = data.draw(st.none() | some)
    numbers = [name for name, kind in kinds.items() if kind == "int"]
    by, value = data.draw(st.sampled_from(numbers)), data.draw(st.sampled_from([None, 0, 1, 2]))
    source = read(columns=columns, filters=None if value is None else [(by, "==", value)])
    rows = {int(row.pop("key").split(":")[-1]): row for row in rows_of(source, records=2)}
    assert sorted(rows) == [i for i in range(7) if value in (None, i % 3)]
    for i, row in rows.items():
        assert row.keys() == {*(columns or kinds)}
        for name, found in row.items():
            kind, expected = kinds[name], what_a_record_holds(kinds[name], i)
            if kind in ("list", "boxes"):
                assert found.dtype == (np.float32 if kind == "list" else object)
                found = found.tolist()
            assert type(found) is type(expected) and found == expected, (name, kind)
    labels = {name: {*source.label_values(name)} for name in numbers}
    assert labels == dict.fromkeys(numbers, {0, 1, 2} if value is None else {value})


@pytest.mark.parametrize("rooms", [["3", "4"], ["3", "n/a"]])
def test_text_in_a_column_of_numbers_is_named_with_each_record(
    rooms: list[str], tmp_path: Path
) -> None:
    table = pa.table({"size": [50.0, 60.0], "rooms": rooms, "price": [1.0, 2.0]})
    for split in ("train", "val"):
        parquet.write_table(table, tmp_path / f"{split}.parquet")
    job = {
        "recipe": "stoker_launcher.projects.tabular.recipe:Table",
        "params": {"data": str(tmp_path)},
        "train": {"batch_size": 1},
    }
    _, data = opened_job(job)
    [(_, report)] = preprocessed(data)
    assert len(report.bad) == 2
    assert "'<' not supported between instances of 'str'" in report.bad[0].reason
    assert "(columns of text: rooms)" in report.bad[0].reason


records = partial(read_all, records=3)


def write(folder: Path, statistics: bool = True, **columns: Any) -> str:
    table = pa.table({"n": pa.array(range(8)), **columns})
    parquet.write_table(
        table, folder / "train-0.parquet", row_group_size=3, write_statistics=statistics
    )
    return str(folder)


INTS = pa.array([1, 2, None, 4, 5, 6, None, 8])
PAIRS = [[1, 2], [3, 4], None, [5, 6], [7, 8], [9, 0], [1, None], [3, 4]]
TENSORS = pa.array(PAIRS, pa.list_(pa.int64(), 2)).cast(pa.fixed_shape_tensor(pa.int64(), (2,)))
COLUMNS = {
    "int": INTS,
    "float": INTS.cast(pa.float32()),
    "text": pa.array(["a", "b", None, "d", "e", "f", None, "h"]),
    "list": pa.array(
        [[1.0], [2.0], None, [4.0], [5.0], [6.0], [None], [8.0]], pa.list_(pa.float32())
    ),
    "nested": pa.array([[[1]], [[2]], [None], [[4]], [[5]], [[6]], [[None]], [[8]]]),
    "image": pa.array([{"bytes": None if i in (2, 6) else b"x", "path": None} for i in range(8)]),
    "tensor": TENSORS,
    "struct": pa.array([None if i in (2, 6) else {"a": None} for i in range(8)]),
    "all null": pa.nulls(8),
}


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("name", COLUMNS)
def test_nulls_are_refused_with_column_file_and_count(
    name: str, statistics: bool, tmp_path: Path
) -> None:
    root = write(tmp_path, statistics, **{name: COLUMNS[name]})
    known = statistics and name in ("int", "float", "text", "image")
    found = "2 NULLs in 8" if known else r"\d NULLs? in 3"
    expected = f"column {name} holds {found} rows; handle them with"
    with pytest.raises(UsageError, match=f"train-0.parquet: {expected} nulls="):
        (checked if known else records)(read_parquet(root, "train"))
    assert len(records(read_parquet(root, "train", columns=["n"]))) == 8


def test_empty_lists_are_no_nulls(tmp_path: Path) -> None:
    root = write(tmp_path, x=pa.array([[]] * 8, pa.list_(pa.int64())))
    assert [record["x"].tolist() for record in records(read_parquet(root, "train"))] == [[]] * 8


def test_nulls_in_several_files_and_columns_are_told_at_once(tmp_path: Path) -> None:
    for number in range(3):
        table = pa.table({"x": pa.array([1, None]), "y": pa.array([None, "a"])})
        parquet.write_table(table, tmp_path / f"train-{number}.parquet")
    with pytest.raises(UsageError) as caught:
        records(read_parquet(str(tmp_path), "train"))
    assert [line.split("column ")[1][:1] for line in caught.value.problems] == ["x", "y"]
    assert "1 NULL in 2 rows, and 2 in 2 other files" in str(caught.value)


def test_only_nulls_of_rows_that_match_count(tmp_path: Path) -> None:
    root = write(tmp_path, x=INTS)
    whole = records(read_parquet(root, "train", filters=[("n", "not in", [2, 6])]))
    assert [record["x"] for record in whole] == [1, 2, 4, 5, 6, 8]
    with pytest.raises(UsageError, match="holds 1 NULL"):
        records(read_parquet(root, "train", filters=[("n", "<", 5)]))


@pytest.mark.parametrize("column", [INTS, TENSORS], ids=["numbers", "tensors"])
def test_quarantine_books_the_record_and_the_others_keep_their_values(
    column: pa.Array, tmp_path: Path
) -> None:
    root = write(tmp_path, x=column)
    found = records(read_parquet(root, "train", nulls={"x": "quarantine"}))
    expected = PAIRS if column is TENSORS else INTS.to_pylist()
    for row, (record, value) in enumerate(zip(found, expected, strict=True)):
        if row in (2, 6):
            assert record == BadRecord(f"train-0.parquet:{row}", "column x is NULL")
        else:
            assert np.array_equal(record["x"], value)


def test_a_value_that_stands_for_nulls_has_the_type_of_its_column(tmp_path: Path) -> None:
    columns = {"f": COLUMNS["float"], "i": INTS, "t": COLUMNS["text"].cast(pa.string_view())}
    rules = {"f": 0, "i": 7.0, "t": "keep"}
    found = records(read_parquet(write(tmp_path, **columns), "train", nulls=rules))
    values = [found[2][name] for name in columns]
    assert values == [0.0, 7, ""] and [type(value) for value in values] == [float, int, str]
    assert [record["t__valid"] for record in found] == [row not in (2, 6) for row in range(8)]


@pytest.mark.parametrize(
    ("column", "rule", "expected"),
    [
        ("int", 0.5, "nulls: 0.5 does not fit column int, which is int64"),
        ("text", 0, "nulls: 0 does not fit column text, which is string"),
        ("float", True, "nulls: True does not fit column float"),
        ("list", "keep", "keep is for numbers, booleans and text: use quarantine"),
        ("absent", "keep", "has no column absent"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(
    column: str, rule: Any, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=expected):
        records(read_parquet(write(tmp_path, **COLUMNS), "train", nulls={column: rule}))


def test_images_in_structs_of_a_ray_dataset_are_images() -> None:
    from stoker.serve.shards import as_records

    columns = {"hf": [{"bytes": b"x", "path": "p"}] * 2, "other": [{"bytes": 1}] * 2}
    _, row = as_records(pa.table({"key": ["a", "b"], **columns}))
    assert (row["hf"], row["other"]) == (b"x", {"bytes": 1})


EXAMPLES = int(os.environ.get("STOKER_SCHEMA_EXAMPLES", "1000")) // 10

RULED: dict[str, Any] = {
    "int": (pa.int32(), lambda i: i - 3, [7, "keep"], 0),
    "float": (pa.float32(), lambda i: i / 4, [0.5, "keep"], None),
    "bool": (pa.bool_(), lambda i: i % 2 == 0, [True, "keep"], False),
    "text": (pa.string(), lambda i: f"t{i}", ["none", "keep"], ""),
    "list": (pa.list_(pa.float32(), 2), lambda i: [i, i / 2], [], None),
}
"""Column → its type, its values, what may stand for a NULL, and what "keep" puts there."""


@pytest.mark.long
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data(), direct=st.booleans(), statistics=st.booleans())
def test_a_batch_is_what_the_table_holds(
    way: Way, tmp_path: Path, data: st.DataObject, direct: bool, statistics: bool
) -> None:
    kinds = data.draw(st.lists(st.sampled_from(list(RULED)), min_size=1, unique=True))
    count = data.draw(st.integers(2, 14))
    holes = {kind: data.draw(st.sets(st.integers(0, count - 1), max_size=2)) for kind in kinds}
    options = {kind: st.sampled_from(["quarantine", *RULED[kind][2]]) for kind in kinds}
    rules = {
        kind: data.draw(rule) for kind, rule in options.items() if data.draw(st.integers(0, 4))
    }
    table = [
        {kind: None if i in holes[kind] else RULED[kind][1](i) for kind in kinds}
        for i in range(count)
    ]
    schema = pa.schema([(kind, RULED[kind][0]) for kind in kinds])
    parquet.write_table(
        pa.Table.from_pylist(table, schema),
        tmp_path / "train-0.parquet",
        row_group_size=data.draw(st.integers(1, 6)),
        write_statistics=statistics,
    )
    expected, lost = [], set()
    for i, row in enumerate(table):
        key = f"train-0.parquet:{i}"
        values: dict[str, Any] = {"__id": record_id(key)}
        for kind, value in row.items():
            rule = rules.get(kind)
            if value is None and rule == "quarantine":
                lost.add(key)
            stands_in = RULED[kind][3] if rule == "keep" else rule
            values[kind] = stands_in if value is None else value
            if rule == "keep" and kind != "float":
                values[f"{kind}__valid"] = value is not None
        if key not in lost:
            expected.append(values)
    source = read_parquet(str(tmp_path), "train", nulls=rules)
    assert source is not None
    block_records, batch_size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    sizes = {"block_records": block_records, "batch_size": batch_size}
    unruled = [kind for kind in kinds if holes[kind] and kind not in rules]
    if unruled or not expected:
        with pytest.raises(UsageError if unruled else Exception) as caught:
            way.batches(source, [], workers=1, direct=direct, **sizes)
        assert not unruled or any(f"column {k} holds" in str(caught.value) for k in unruled)
        return
    steps, bad = way.batches(source, [], workers=1, direct=direct, **sizes)
    assert {one.key for one in bad} == lost
    found = []
    for (batch,) in steps:
        columns = {name: c if isinstance(c, list) else c.tolist() for name, c in batch.items()}
        rows = zip(*columns.values(), strict=True)
        found += [dict(zip(columns, row, strict=True)) for row in rows]
    for row in found:
        if "float" in row and row["float"] != row["float"]:
            row["float"] = None  # NaN, which "keep" puts there
    assert found == expected
